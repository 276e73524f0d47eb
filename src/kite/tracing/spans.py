"""Spans, and the trace that the running task belongs to.

The current trace is one context variable that holds a W3C `traceparent`. It is kept when tracing is off too: whatever
came in goes out unchanged, so a process without a collector does not cut the trace of its neighbours.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from kite.tracing.export import EXPORTER

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Tracer
    from opentelemetry.trace import Span as Recorded

Kind = Literal["internal", "client", "server", "producer", "consumer"]
Value = str | int | bool


class Span:
    """One step of a trace. `traceparent` is what its children are told: empty when there is no trace at all."""

    __slots__ = ("_recorded", "traceparent")

    def __init__(self, traceparent: str, recorded: "Recorded | None" = None) -> None:
        self.traceparent = traceparent
        self._recorded = recorded

    @property
    def trace_id(self) -> str:
        """The 32 hex digits of the trace; empty when there is none."""
        return self.traceparent[3:35]

    def set(self, name: str, value: Value) -> None:
        """Add an attribute."""
        if self._recorded is not None:
            self._recorded.set_attribute(name, value)

    def fail(self, code: str) -> None:
        """Mark the step as failed. `code` is a short word: no message that could carry a user's text."""
        if self._recorded is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, code))

    def end(self) -> None:
        """Record the end."""
        if self._recorded is not None:
            self._recorded.end()


_current: ContextVar[str] = ContextVar("kite_traceparent", default="")


@contextmanager
def span(
    name: str,
    *,
    parent: str | None = None,
    links: Sequence[str] = (),
    kind: Kind = "internal",
    attributes: Mapping[str, Value] | None = None,
) -> Generator[Span]:
    """Run the block as one step of a trace: a child of `parent` (a traceparent), else of the current span.

    `links` are traceparents too. An exception marks the span as failed, under the name of its class, and passes.
    """
    above = parent or _current.get()
    tracer = EXPORTER.tracer
    if tracer is None:
        own = Span(above)
    else:
        own = _recorded(tracer, name, above, links=links, kind=kind, attributes=attributes or {})
    token = _current.set(own.traceparent)
    try:
        yield own
    except BaseException as error:
        own.fail(type(error).__name__)
        raise
    finally:
        _current.reset(token)
        own.end()


def traceparent() -> str | None:
    """Return the traceparent that this task's messages should carry, None outside any trace."""
    return _current.get() or None


def headers() -> dict[str, str]:
    """Return the headers that join an outgoing HTTP request to the current trace; empty outside any."""
    current = _current.get()
    return {"traceparent": current} if current else {}


def _recorded(
    tracer: "Tracer",
    name: str,
    above: str,
    *,
    links: Sequence[str],
    kind: Kind,
    attributes: Mapping[str, Value],
) -> Span:
    from opentelemetry.trace import SpanKind

    recorded = tracer.start_span(
        name,
        context=_context(above),
        kind=SpanKind[kind.upper()],
        attributes=dict(attributes),
        links=[_link(link) for link in links],
        record_exception=False,  # `span` marks failures itself
        set_status_on_exception=False,
    )
    context = recorded.get_span_context()
    return Span(f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}", recorded)


def _context(above: str) -> "Context":
    """Return a fresh context inside the trace of a traceparent; one that is empty or malformed begins a new trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": above}, Context())


def _link(above: str) -> "Link":
    from opentelemetry.trace import Link, get_current_span

    return Link(get_current_span(_context(above)).get_span_context())
