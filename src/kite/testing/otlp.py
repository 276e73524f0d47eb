"""A small OTLP receiver (HTTP, protobuf): takes the spans that real exporters send and keeps them in memory.

`python -m kite.testing.otlp HOST:PORT…` is one as a process of its own, at all of these addresses; it gives out what it
has at /spans (as JSON), and answers every other GET with an empty page.
"""

import gzip
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Self

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from kite.clock import NS_PER_US

TRACES = "/v1/traces"
SPANS = "/spans"
CONTENT_TYPE = "application/x-protobuf"
BODY_MAX_BYTES = 16 * 1024**2
SPANS_MAX = 100_000
POLL_S = 0.02  # how long the end waits for the server to notice
STATUS_ERROR = trace_pb2.Status.STATUS_CODE_ERROR

Value = str | bool | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span. Ids are hex, `parent_id` is empty at a root, `links` are span ids, times are UTC."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    kind: str
    attributes: Mapping[str, Value]
    links: tuple[str, ...]
    failed: bool
    error: str
    begun_us: int
    ended_us: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A span with the spans below it, by their begin."""

    span: Span
    below: tuple["Tree", ...]

    def walk(self) -> Iterator[Span]:
        """Yield every span, parents first."""
        yield self.span
        for tree in self.below:
            yield from tree.walk()

    def find(self, name: str) -> Span:
        """Return the first span of that name. Raises AssertionError when there is none."""
        for span in self.walk():
            if span.name == name:
                return span
        raise AssertionError(f"no span {name!r} in\n{self.outline()}")

    def outline(self, depth: int = 0) -> str:
        """Return one indented line a span: `service: name`."""
        line = f"{'  ' * depth}{self.span.service}: {self.span.name}"
        return "\n".join([line, *(tree.outline(depth + 1) for tree in self.below)])


def grow(spans: Sequence[Span]) -> Tree:
    """Return the one connected tree of all the spans of a trace.

    Raises AssertionError when there is no root, more than one, or a span whose parent is not among them.
    """
    known = {span.span_id for span in spans}
    roots = [span for span in spans if not span.parent_id]
    orphans = [span for span in spans if span.parent_id and span.parent_id not in known]
    if len(roots) != 1 or orphans:
        names = ", ".join(f"{span.service}: {span.name}" for span in (*roots[1:], *orphans))
        raise AssertionError(f"{len(roots)} roots and {len(orphans)} orphans in {len(spans)} spans: {names}")
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.begun_us, span.span_id)):
        children.setdefault(span.parent_id, []).append(span)
    return _tree(roots[0], children)


class Receiver:
    """Listens on a free loopback port. `with Receiver() as receiver:`; exporters are given `receiver.endpoint`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, kept: list[Span] | None = None) -> None:
        """Spans are added to `kept`, which several may share."""
        self._spans: list[Span] = [] if kept is None else kept  # appended by the server's threads, read by copy
        self._server = ThreadingHTTPServer((host, port), _handler(self._take, self._told))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="otlp", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Wait until somebody else ends it."""
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """Base address, as `OTEL_EXPORTER_OTLP_ENDPOINT` wants it."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[Span]:
        """Every span so far, in the order of arrival."""
        return list(self._spans)

    def named(self, name: str) -> list[Span]:
        """Return the spans of that name."""
        return [span for span in self.spans if span.name == name]

    def trace(self, trace_id: str) -> list[Span]:
        """Return the spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def tree(self, trace_id: str) -> Tree:
        """Return one trace as its tree. Raises AssertionError unless it is one, and connected."""
        return grow(self.trace(trace_id))

    def _take(self, body: bytes) -> None:
        self._spans += read(body)
        del self._spans[:-SPANS_MAX]

    def _told(self) -> bytes:
        return msgspec.json.encode(self.spans)


def read(body: bytes) -> list[Span]:
    """Return the spans of an export request. Raises DecodeError."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        _span(span, str(_attributes(resource.resource.attributes).get("service.name", "")))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _span(span: trace_pb2.Span, service: str) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        attributes=_attributes(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        failed=span.status.code == STATUS_ERROR,
        error=span.status.message,
        begun_us=span.start_time_unix_nano // NS_PER_US,
        ended_us=span.end_time_unix_nano // NS_PER_US,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case _:
            return str(value)


def _tree(span: Span, children: Mapping[str, Sequence[Span]]) -> Tree:
    return Tree(span, tuple(_tree(child, children) for child in children.get(span.span_id, ())))


def spans(told: str | bytes) -> list[Span]:
    """Return the spans that a receiver gave out at /spans."""
    return msgspec.json.decode(told, type=list[Span])


def _handler(take: Callable[[bytes], None], told: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            self._answer(self._receive(), ExportTraceServiceResponse().SerializeToString())

        def do_GET(self) -> None:  # likewise
            self._answer(HTTPStatus.OK, told() if self.path == SPANS else b"")

        def _receive(self) -> HTTPStatus:
            if self.path != TRACES:
                return HTTPStatus.NOT_FOUND
            size = int(self.headers.get("Content-Length", "0"))
            if size > BODY_MAX_BYTES:
                return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            body = self.rfile.read(size)
            try:
                take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            except (DecodeError, OSError, EOFError):  # neither protobuf nor gzip
                return HTTPStatus.BAD_REQUEST
            return HTTPStatus.OK

        def _answer(self, status: HTTPStatus, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # http.server's signature
            """Stay quiet."""

    return Handler


def main(addresses: Sequence[str]) -> int:
    """Listen at every HOST:PORT until the process is ended."""
    kept: list[Span] = []
    places = [address.rpartition(":") for address in addresses]
    with ExitStack() as stack:
        receivers = [stack.enter_context(Receiver(host, int(port), kept)) for host, _, port in places]
        for receiver in receivers:
            receiver.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
