"""An order that the bus has to deliver again is counted, by the worker that gets it."""

import asyncio
from contextlib import suppress
from pathlib import Path

from kite.events import Origin
from kite.metrics import SPANS
from kite.orders import Emit, Received, Task, Worker
from kite.orders.measure import REDELIVERED, Meter, seconds
from kite.testing.bus import bus
from kite.testing.eventually import eventually
from kite.testing.orders import facts, give, stop_order
from kite_schemas.why import Outcome
from kite_schemas.yoco import InstanceChanged, OrderFailed, State, StopOrdered

ORIGIN = Origin(source="kite/yoco/n1", producer="yoco@test")
ACK_WAIT_S = 1.0


def failed(received: Received[StopOrdered], at: str, code: str, message: str) -> Outcome:
    return OrderFailed(instance=received.data.instance, state=State.FAILED, stage=at, code=code, message=message)


class Stops:
    """Holds each stop until `gate` opens; `begun` says that one waits there."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def stop(self, received: Received[StopOrdered], emit: Emit) -> Outcome:
        del emit
        self.begun.set()
        await self.gate.wait()
        return InstanceChanged(
            instance=received.data.instance,
            node=received.data.node,
            from_state=State.READY,
            to_state=State.ABSENT,
            code="asked",
            duration_us=1,
        )


async def test_an_order_whose_worker_ended_comes_again_and_is_counted(tmp_path: Path):
    async with bus(tmp_path) as client:
        meter, stops = Meter(seconds("upcycle")), Stops()
        tasks = meter.measured({StopOrdered: Task(stops.stop, failed)})

        def worker() -> Worker:
            return Worker(
                bus=client,
                origin=ORIGIN,
                service="yoco",
                node="n1",
                journal=tmp_path / "orders.sqlite",
                handlers=tasks,
                ack_wait_s=ACK_WAIT_S,
            )

        async def run(one: Worker, until: asyncio.Event) -> None:
            task = asyncio.create_task(one.run())
            await until.wait()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        first, second, done = worker(), worker(), asyncio.Event()
        await give(client, "yoco", stop_order("a"), "instance/a")
        await run(first, stops.begun)
        assert first.redelivered == 0
        stops.gate.set()
        meter.watch(second)
        running = asyncio.create_task(run(second, done))
        try:
            await eventually(lambda: second.redelivered > 0)
            await eventually(lambda: facts(client))
        finally:
            done.set()
            await running
    assert meter.registry.get_sample_value(REDELIVERED.name) == second.redelivered
    took = "kite_upcycle_order_seconds_count"
    assert meter.registry.get_sample_value(took, {"order": "stop_ordered", "outcome": "cancelled"}) == 1
    assert meter.registry.get_sample_value(took, {"order": "stop_ordered", "outcome": "instance_changed"}) == 1
    assert meter.registry.get_sample_value(SPANS.name, {"outcome": "dropped"}) is not None
