"""The one span that vLLM emits for a request, joined to the caller's trace."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.propagate import extract

SPAN = "llm_request"


def start_tracing() -> Callable[[], None]:
    """Send spans to the collector of the environment, if one is named. Return what flushes and ends it."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return lambda: None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "vllm"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown


@contextmanager
def request_span(headers: Mapping[str, str]) -> Generator[None]:
    """Record one request as a child of the caller's span."""
    carrier = {name.lower(): value for name, value in headers.items()}
    tracer = trace.get_tracer(__name__)
    with tracer.start_as_current_span(SPAN, context=extract(carrier), kind=trace.SpanKind.SERVER):
        yield
