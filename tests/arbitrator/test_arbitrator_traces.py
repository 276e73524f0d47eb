"""What is decided later than it was asked for is still a part of the request's trace."""

import secrets
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from statistics import median

import pytest

from kite import clock, tracing
from kite.bus import DEC, Bus
from kite.clock import US_PER_S
from kite.events import Origin, compose, publish
from kite.testing.bus import nats
from kite.tracing.export import EXPORT_S
from kite.trust import Keyring
from kite_arbitrator.batch import TRACES_MAX, Batch, Traces
from kite_arbitrator.testing import BASE, Story
from kite_arbitrator.testing.running import Place, arbitrator
from kite_schemas.arbitration import Discarded
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.yoco import OrderRequested, WakeOrdered

ORIGIN = Origin("kite/arbitrator/leader", "arbitrator@test")
WINDOW_US = 10_000_000
ROUNDS, REQUESTS = 4, 25
NOISE_US = 5_000
"""By how much two medians of requests may differ on a machine that does other things."""


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    async with nats(tmp_path) as server:
        yield Place.beside(server, tmp_path)


@contextmanager
def traced(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Send this process's spans to a collector, also those of an arbitrator in it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    tracing.start("arbitrator")
    yield
    tracing.stop()


async def decided(bus: Bus) -> list[int]:
    """Ask again and again for what is refused; return how long each decision took to be on the bus, in us."""
    took_us: list[int] = []
    for _ in range(REQUESTS):
        before = (await bus.stream(DEC)).last_seq
        began_us = clock.mono_us()
        request = ChangeRequested(actor="me", changes=(Change(key="nonsense", value=1),))
        await publish(bus, compose("policy/fleet", request, ORIGIN))
        async with aclosing(bus.follow(DEC, after_seq=before)) as published:
            await anext(published)
        took_us.append(clock.mono_us() - began_us)
    return took_us


async def test_a_collector_that_never_answers_costs_spans_and_no_decision_its_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    failed, alone_us, beside_us = tracing.counts().failed, list[int](), list[int]()
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        endpoint = f"http://127.0.0.1:{stuck.getsockname()[1]}"
        async with arbitrator(place) as bus:
            for _ in range(ROUNDS):  # by turns: what else the machine does meets both
                alone_us += await decided(bus)
                with traced(endpoint, monkeypatch):
                    beside_us += await decided(bus)
    print(f"median {median(alone_us)} us without a collector, {median(beside_us)} us with one that is stuck")
    assert tracing.counts().failed >= failed + ROUNDS * REQUESTS, "every decision had its span, and none was taken"
    assert median(beside_us) <= 2 * median(alone_us) + NOISE_US
    assert max(beside_us) < EXPORT_S * US_PER_S, "nobody waited for the collector"


def batch(fleet: Story, at_us: int, traces: Traces) -> Batch:
    return Batch(fleet.state, lambda last_us: max(last_us + 1, at_us), ORIGIN, 1, Keyring(None), {}, traces)


def test_a_wake_that_was_put_off_belongs_to_the_trace_of_its_request():
    fleet, traces, trace_id = Story().up(), Traces(), secrets.token_hex(16)
    fleet.amend({"arbitration.switch_window_us": WINDOW_US})
    request: Data = OrderRequested(actor="me", base=BASE)
    asked = compose(f"base/{BASE}", request, ORIGIN, traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01")
    first = batch(fleet, fleet.now_us + 1_000, traces)
    first.put(asked, request)
    assert [draft.type for draft in first.drafts][1:] == [Discarded.TYPE]
    fleet.state = first.state
    later = batch(fleet, fleet.now_us + WINDOW_US, traces)
    later.write(Tick())
    (woken,) = [draft for draft in later.drafts if draft.type == WakeOrdered.TYPE]
    assert woken.trace_id == trace_id


def test_only_the_last_requests_are_remembered():
    traces = Traces()
    header = compose("base/x", OrderRequested(actor="me", base="x"), ORIGIN).header
    for number in range(TRACES_MAX + 1):
        traces.keep(header.model_copy(update={"id": str(number), "traceparent": f"00-{number:032x}-{1:016x}-01"}))
    assert len(traces) == TRACES_MAX
    assert "0" not in traces
