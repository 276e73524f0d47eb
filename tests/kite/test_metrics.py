"""Metrics: what is measured comes out of the page, labels have an end, and a port that is taken is one clear error."""

import asyncio
import socket
from collections.abc import Mapping
from urllib.request import urlopen

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kite.errors import KiteError
from kite.metrics import MetricsUnserved, served
from kite.orders import Emit, Received, Task
from kite.settings import MetricsSettings
from kite_arbitrator.metrics import Meter as Arbitrator
from kite_arbitrator.state import Account, Passage, State
from kite_schemas.envelope import Header
from kite_schemas.why import Outcome, Reason, Why
from kite_schemas.yoco import InstanceReady, OrderFailed, OrderRefused, Path, StopOrdered, WakeOrdered
from kite_schemas.yoco import State as Life
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
    assert page(meter.registry) == {("kite_arbitrator_leading", ()): 0.0}
    meter.state = structs.replace(
        State(),
        pos=42,
        accounts={"n": Account(node="n", retained_bytes=2_400_000)},
        passages={"a": passage(Path.HOT, 3, 2, 1), "b": passage(Path.COLD, 1, 0, 0)},
    )
    found = page(meter.registry)
    assert found["kite_arbitrator_leading", ()] == 1
    assert found["kite_ledger_position", ()] == 42
    assert found["kite_upcycle_adapter_retention_bytes_total", ("n",)] == 2_400_000
    assert found["kite_yoco_passages_total", ("tiny", "n", "hot")] == 3
    assert found["kite_yoco_hit_ratio", ("tiny", "n", "hot")] == 0.75
    assert found["kite_yoco_on_time_ratio", ("tiny", "n", "hot")] == 2 / 3
    assert ("kite_yoco_on_time_ratio", ("tiny", "n", "cold")) not in found


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


async def ended(meter: Meter, outcome: Outcome | type[BaseException]) -> None:
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
