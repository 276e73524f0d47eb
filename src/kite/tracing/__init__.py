"""Tracing: spans over OTLP when a collector is named, and the caller's `traceparent` passed on either way."""

from kite.tracing.attributes import (
    ATTEMPT,
    DECISION_ID,
    EVENT_TYPE,
    ORDER_ID,
    POS,
    SEQ,
    STREAM,
    Operation,
    messaging,
)
from kite.tracing.export import counts, start, stop
from kite.tracing.spans import Kind, Span, Value, headers, span, traceparent
from kite.tracing.tally import Tally

__all__ = [
    "ATTEMPT",
    "DECISION_ID",
    "EVENT_TYPE",
    "ORDER_ID",
    "POS",
    "SEQ",
    "STREAM",
    "Kind",
    "Operation",
    "Span",
    "Tally",
    "Value",
    "counts",
    "headers",
    "messaging",
    "span",
    "start",
    "stop",
    "traceparent",
]
