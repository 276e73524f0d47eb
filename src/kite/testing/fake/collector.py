"""An OTLP/HTTP receiver that keeps the spans it is sent, for tests that assert on a trace."""

from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Self

HOST = "127.0.0.1"
SPANS_MAX = 100_000  # a test that makes more has lost its way


@dataclass(frozen=True, slots=True)
class Span:
    """What tests ask of a span; ids in lower-case hexadecimal, `parent_id` empty at the root."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]


class Collector:
    """A listening receiver: `url` is what OTEL_EXPORTER_OTLP_ENDPOINT takes. Use as a context manager."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._spans: list[Span] = []
        self._server = ThreadingHTTPServer((HOST, 0), receiver(self))
        self._server.daemon_threads = True
        self.url = f"http://{HOST}:{self._server.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self, name: str | None = None, trace_id: str | None = None) -> list[Span]:
        """Return the spans received so far, those of one name or trace if asked."""
        with self._lock:
            found = list(self._spans)
        return [span for span in found if name in (None, span.name) and trace_id in (None, span.trace_id)]

    def receive(self, body: bytes) -> None:
        """Keep the spans of one export request."""
        spans = decode(body)
        with self._lock:
            self._spans = [*self._spans, *spans][-SPANS_MAX:]


def receiver(collector: Collector) -> type[BaseHTTPRequestHandler]:
    """Return the handler that feeds a collector."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.receive(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Stay silent."""

    return Receiver


def decode(body: bytes) -> list[Span]:
    """Read an export request (protobuf, perhaps gzipped)."""
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    plain = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    return [
        Span(
            name=span.name,
            service=next(
                (item.value.string_value for item in group.resource.attributes if item.key == "service.name"), ""
            ),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            attributes={item.key: str(item.value) for item in span.attributes},
        )
        for group in ExportTraceServiceRequest.FromString(plain).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]
