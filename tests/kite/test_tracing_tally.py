"""What becomes of spans is counted: sent, not taken by a collector that is dead, pushed out of a full queue."""

import socket
from collections.abc import Iterator

import pytest

from kite import tracing
from kite.metrics import SPANS, page
from kite.testing.otlp import Receiver
from kite.tracing.export import QUEUE_SPANS
from kite.tracing.tally import Tally

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    tracing.stop()


def told(outcome: str) -> float:
    """What the page of this process says."""
    value = page().get_sample_value(SPANS.name, {"outcome": outcome})
    assert value is not None
    return value


def record(spans: int) -> None:
    for _ in range(spans):
        with tracing.span("step"):
            pass


def test_spans_that_a_collector_took_are_sent(monkeypatch: pytest.MonkeyPatch):
    before = {outcome: told(outcome) for outcome in ("sent", "failed", "dropped")}
    with Receiver() as receiver:
        monkeypatch.setenv(ENDPOINT, receiver.endpoint)
        tracing.start("test")
        record(3)
        tracing.stop()
        assert len(receiver.spans) == 3
    assert {outcome: told(outcome) - count for outcome, count in before.items()} == {
        "sent": 3,
        "failed": 0,
        "dropped": 0,
    }


def test_spans_for_a_collector_that_is_stuck_are_dropped_and_fail(monkeypatch: pytest.MonkeyPatch):
    """It takes connections and never answers, so that the queue runs full behind one batch."""
    failed, dropped, sent = told("failed"), told("dropped"), told("sent")
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{stuck.getsockname()[1]}")
        tracing.start("test")
        record(4 * QUEUE_SPANS)
        lost = told("dropped") - dropped
        assert QUEUE_SPANS < lost <= 3 * QUEUE_SPANS, "one batch at most is on its way, the queue holds the newest"
        tracing.stop()
    assert told("failed") > failed
    assert told("sent") == sent


def test_without_a_collector_nothing_is_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ENDPOINT, raising=False)
    before = [told(outcome) for outcome in ("sent", "failed", "dropped")]
    tracing.start("test")
    record(3)
    assert [told(outcome) for outcome in ("sent", "failed", "dropped")] == before


def test_what_was_dropped_stays_counted_when_the_queue_is_empty_again():
    tally = Tally(room=10)
    for _ in range(14):
        tally.end()
    tally.take(10)
    tally.export(10, sent=True)
    for _ in range(10):
        tally.end()
    assert (tally.sent, tally.failed, tally.dropped) == (10, 0, 4)
    tally.end()
    assert tally.dropped == 5
