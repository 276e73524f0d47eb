"""Metrics: what is measured comes out of the page, labels have an end, and a port that is taken is one clear error."""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from urllib.request import urlopen

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kite import clock
from kite.bus import StreamState
from kite.errors import KiteError
from kite.events import Origin
from kite.metrics import Metric, MetricsUnserved, served
from kite.orders import Emit, Received, Task, Worker
from kite.orders.measure import Meter as Orders
from kite.settings import MetricsSettings
from kite.testing.bus import bus
from kite_arbitrator import metrics as arbitrator_metrics
from kite_arbitrator import shipped
from kite_arbitrator.metrics import Meter as Arbitrator
from kite_arbitrator.records import Account, Feed, Instance, Node, Passage, Pressure, Span
from kite_arbitrator.state import State
from kite_guard import metrics as guard_metrics
from kite_schemas.envelope import Header
from kite_schemas.why import Outcome, Reason, Why
from kite_schemas.yoco import InstanceReady, OrderFailed, OrderRefused, Path, StopOrdered, WakeOrdered
from kite_schemas.yoco import State as Life
from kite_upcycle import metrics as upcycle_metrics
from kite_yoco import metrics as yoco_metrics
from kite_yoco.metrics import ORDERS, READY, Meter, bounded

ID = "018f0000-0000-7000-8000-000000000000"
WAKE = WakeOrdered(
    why=Why(reason=Reason.ASKED),
    node="n",
    target="instance/a",
    expires_us=1,
    ttl_us=1,
    instance="a",
    path=Path.HOT,
    deadline_us=1,
    residents=(),
    noise_micronats=0,
)
AWAKE = InstanceReady(
    instance="a",
    node="n",
    path=Path.HOT,
    pid=1,
    endpoint="http://127.0.0.1:1",
    versions=(),
    noise_micronats=0,
    t_wake_us=5_000,
    t_first_token_us=12_000,
)


def free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def samples(text: str) -> Mapping[tuple[str, tuple[str, ...]], float]:
    """Return the values of a page by name and the values of its labels, these by the labels' names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def page(registry: CollectorRegistry) -> Mapping[tuple[str, tuple[str, ...]], float]:
    settings = MetricsSettings(metrics_port=free())
    with served(registry, settings), urlopen(f"http://127.0.0.1:{settings.metrics_port}/metrics") as answer:
        return samples(answer.read().decode())


def passage(path: Path, ready: int, met: int, missed: int) -> Passage:
    return Passage(node="n", base="tiny", path=path, ready=ready, met=met, missed=missed)


def test_an_arbitrator_tells_what_its_state_says():
    meter = Arbitrator()
    waiting = page(meter.registry)
    assert waiting["kite_arbitrator_leading", ()] == 0
    assert ("kite_ledger_position", ()) not in waiting
    meter.state = structs.replace(
        State(),
        pos=42,
        now_us=clock.wall_us() - 2_000_000,
        accounts={"n": Account(node="n", retained_bytes=2_400_000)},
        passages={"a": passage(Path.HOT, 3, 2, 1), "b": passage(Path.COLD, 1, 0, 0)},
    )
    found = page(meter.registry)
    assert found["kite_arbitrator_leading", ()] == 1
    assert found["kite_ledger_position", ()] == 42
    assert found["kite_upcycle_adapter_retention_bytes_total", ("n",)] == 2_400_000
    assert found["kite_yoco_passages_total", ("tiny", "n", "hot")] == 3
    met = {labels: value for (name, labels), value in found.items() if name == "kite_yoco_deadlines_total"}
    assert met == {("tiny", "yes", "n", "hot"): 2, ("tiny", "no", "n", "hot"): 1}
    assert 2 <= found["kite_ledger_age_seconds", ()] < 60
    assert found["kite_outbox_wait_seconds", ()] == 0
    assert not any(name == "kite_stream_fill_ratio" for name, _ in found), "the bus was not asked yet"


def instance(name: str, state: Life) -> Instance:
    return Instance(id=name, node="n", base="tiny", device="cpu", standby=False, state=state)


NOW_US = 100_000_000
FEED = Feed(node="n", seen_us=NOW_US - 3_000_000, lag_us=20_000, interval_us=100_000, span=Span(loss_ppm=125_000))
LIVE = structs.replace(
    State(),
    now_us=NOW_US,
    policy=shipped.policy(),
    nodes={"n": Node(id="n", boot="b", devices=(), sleep_modes=(), pos=1)},
    feeds={"n": FEED, "stranger": structs.replace(FEED, node="stranger")},
    instances={"a": instance("a", Life.READY), "b": instance("b", Life.READY), "c": instance("c", Life.QUARANTINED)},
    pressures={"n.tiny": Pressure(node="n", base="tiny", on=True)},
    accounts={"n": Account(node="n")},
    passages={"a": passage(Path.HOT, 1, 1, 0)},
    gap_pos=9,
)


def test_an_arbitrator_tells_of_nodes_instances_and_the_bus():
    meter = Arbitrator()
    meter.state, meter.behind = LIVE, 17
    meter.streams = [StreamState("KITE_EVT", "", 1, 9, bytes=710, limit_bytes=1_000)]
    meter.waiting_us = lambda: 1_500_000
    meter.decided([4_000, 30_000])
    found = page(meter.registry)
    assert found["kite_telemetry_age_seconds", ("n",)] == 3
    assert found["kite_telemetry_lag_seconds", ("n",)] == 0.02
    assert found["kite_telemetry_stale", ("n",)] == 1
    assert found["kite_telemetry_loss_ratio", ("n",)] == 0.125
    assert ("kite_telemetry_age_seconds", ("stranger",)) not in found, "who is not registered makes no series"
    assert found["kite_instances", ("tiny", "n", "ready")] == 2
    assert found["kite_instances", ("tiny", "n", "quarantined")] == 1
    assert found["kite_instances", ("tiny", "n", "failed")] == 0
    assert found["kite_pool_pressure", ("tiny", "n")] == 1
    assert found["kite_bus_gap", ()] == 1
    assert found["kite_stream_fill_ratio", ("KITE_EVT",)] == 0.71
    assert found["kite_ledger_lag_messages", ()] == 17
    assert found["kite_outbox_wait_seconds", ()] == 1.5
    assert found["kite_decision_latency_seconds_count", ()] == 2
    assert found["kite_decision_latency_seconds_bucket", ("0.017",)] == 1


def shown(registry: CollectorRegistry) -> set[str]:
    """The names of a registry's metrics; of a counter with `_total`, whichever way it was made."""
    return {found.name + ("_total" if found.type == "counter" else "") for found in registry.collect()}


def declared(metrics: Iterable[Metric]) -> set[str]:
    return {found.name for found in metrics}


async def test_what_is_documented_is_what_is_told(tmp_path: FilePath):
    """`docs/metrics.md` is made from these tables, and `make check` holds it to them."""
    async with bus(tmp_path) as client:
        origin, journal = Origin("kite/test/n", "test@0"), tmp_path / "orders.sqlite"
        worker = Worker(bus=client, origin=origin, service="x", node="n", journal=journal, handlers={})

    def watched(meter: Meter | Orders) -> CollectorRegistry:
        meter.watch(worker)
        return meter.registry

    meter = Arbitrator()
    meter.state, meter.streams = LIVE, [StreamState("KITE_EVT", "", 1, 9, bytes=1, limit_bytes=2)]
    assert shown(meter.registry) == declared(arbitrator_metrics.METRICS)
    assert shown(watched(Meter())) == declared(yoco_metrics.METRICS)
    assert shown(watched(Orders(upcycle_metrics.SECONDS))) == declared(upcycle_metrics.METRICS)
    assert shown(watched(Orders(guard_metrics.SECONDS))) == declared(guard_metrics.METRICS)


class Broken(KiteError):
    """Not what an engine should do."""

    code = "engine_died"


def handled(outcome: Outcome | type[BaseException]) -> Task[WakeOrdered]:
    """A task that ends in one way."""

    async def handler(received: Received[WakeOrdered], emit: Emit) -> Outcome:  # noqa: ARG001 # the form of a handler
        if isinstance(outcome, Outcome):
            return outcome
        raise outcome("so")

    def failed(received: Received[WakeOrdered], stage: str, code: str, message: str) -> Outcome:  # noqa: ARG001 # as above
        return OrderFailed(instance="a", state=Life.FAILED, stage=stage, code=code, message=message)

    return Task(handler, failed)


async def ended(meter: Meter | Orders, outcome: Outcome | type[BaseException]) -> None:
    """Have a wake end in one way."""

    async def emit(_: Outcome) -> None: ...

    task = meter.measured({WakeOrdered: handled(outcome)})[WakeOrdered]
    header = Header(
        id=ID, source="x", type=WAKE.TYPE, subject="instance/a", time="2026-01-01T00:00:00.000000Z", producer="t@0"
    )
    with pytest.raises(outcome) if isinstance(outcome, type) else served(CollectorRegistry(), MetricsSettings()):
        await task.handler(Received(ID, 1, WAKE, header, 1), emit)  # pyright: ignore[reportArgumentType] # a table's tasks take Never


async def test_a_yoco_counts_how_orders_end_and_how_long_instances_take():
    meter = Meter()
    await ended(meter, AWAKE)
    await ended(meter, Broken)
    await ended(meter, asyncio.CancelledError)
    await ended(meter, OrderRefused(instance="a", code="never_heard_of", message=""))
    found = page(meter.registry)
    counted = {labels[0]: value for (name, labels), value in found.items() if name == ORDERS.name}
    assert counted == {"done": 1, "engine_died": 1, "cancelled": 1, "other": 1}
    assert found[f"{READY.name}_count", ("hot",)] == 1
    assert found[f"{READY.name}_bucket", ("0.02", "hot")] == 1
    assert found[f"{READY.name}_bucket", ("0.01", "hot")] == 0


async def test_a_worker_tells_how_long_each_order_took_and_how_it_ended():
    meter = Orders(upcycle_metrics.SECONDS)
    await ended(meter, AWAKE)
    await ended(meter, Broken)
    await ended(meter, asyncio.CancelledError)
    found = page(meter.registry)
    counted = {labels: value for (name, labels), value in found.items() if name == "kite_upcycle_order_seconds_count"}
    outcomes = ("instance_ready", "error", "cancelled")
    assert counted == {("wake_ordered", outcome): 1 for outcome in outcomes}


def test_what_is_not_counted_is_left_alone():
    task = handled(AWAKE)
    assert Meter().measured({StopOrdered: task})[StopOrdered] is task
    assert bounded("x" * 100) == "other"


def test_a_port_that_is_taken_is_one_clear_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = f"no metrics can be served at 127.0.0.1:{port}"
        with (
            pytest.raises(MetricsUnserved, match=taken) as error,
            served(CollectorRegistry(), MetricsSettings(metrics_port=port)),
        ):
            pass
    assert "KITE_METRICS_PORT" in error.value.hint
