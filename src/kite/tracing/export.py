"""Where spans go: batches over OTLP (HTTP, protobuf) to the collector of the environment, or nowhere.

The SDK is imported only when a collector is named. Its provider is not made the global one: KITE's spans are its own,
and a test can start and stop as often as it likes.
"""

import logging
from threading import Thread
from typing import TYPE_CHECKING

from kite.tracing.settings import TracingSettings
from kite.tracing.tally import Tally

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

EXPORT_S = 2.0  # for one batch, with its retries
STOP_S = 3.0  # a dead collector delays the end of a process by no more
DELAY_MS = 500  # a span leaves at the latest this long after its end
QUEUE_SPANS = 2_048  # then the oldest are dropped, with a log line of the SDK
BATCH_SPANS = 512


class Exporter:
    """The export of this process; `tracer` is None while tracing is off. `tally` goes on over starts and stops."""

    def __init__(self) -> None:
        self.tally = Tally(QUEUE_SPANS)
        self.tracer: Tracer | None = None
        self._provider: TracerProvider | None = None

    def start(self, service: str) -> None:
        """See `start`."""
        self.stop()
        settings = TracingSettings()
        if settings.sdk_disabled.lower() == "true" or not settings.exporter_otlp_endpoint:
            return
        self._provider = _provider(service, self.tally)
        self.tracer = self._provider.get_tracer("kite")

    def stop(self) -> None:
        """See `stop`. The SDK has no bound of its own that holds, so it ends in a thread that is waited for."""
        provider, self._provider, self.tracer = self._provider, None, None
        if provider is None:
            return
        thread = Thread(target=provider.shutdown, name="tracing-stop", daemon=True)
        thread.start()
        thread.join(STOP_S)


def _provider(service: str, tally: Tally) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider

    from kite.tracing.counted import CountedProcessor

    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # a line per lost batch, none per retry
    exporter = OTLPSpanExporter(timeout=EXPORT_S)
    processor = CountedProcessor(exporter, tally, queue=QUEUE_SPANS, delay_ms=DELAY_MS, batch=BATCH_SPANS)
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


EXPORTER = Exporter()


def start(service: str) -> None:
    """Send spans as `service` if `OTEL_EXPORTER_OTLP_ENDPOINT` names a collector; it need not answer."""
    EXPORTER.start(service)


def counts() -> Tally:
    """Return what became of this process's spans so far."""
    return EXPORTER.tally


def stop() -> None:
    """Send what is left and stop, within STOP_S; safe to call again."""
    EXPORTER.stop()
