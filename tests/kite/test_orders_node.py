"""An order names its node: brought to another one's worker, it is not carried out."""

import asyncio
from contextlib import suppress
from pathlib import Path

from structlog.testing import capture_logs

from kite.bus import dec_subject
from kite.events import Origin
from kite.orders import Emit, Received, Task, Worker
from kite.testing.bus import bus
from kite.testing.eventually import eventually
from kite.testing.orders import give, ordered, stop_order
from kite_schemas.why import Outcome
from kite_schemas.yoco import OrderFailed, State, StopOrdered


async def test_a_genuine_order_on_the_subject_of_another_node_is_passed_over(tmp_path: Path):
    ended: list[str] = []

    async def stop(received: Received[StopOrdered], emit: Emit) -> Outcome:
        del emit
        ended.append(received.data.instance)
        return failed(received, "stop", "tried", "")

    def failed(received: Received[StopOrdered], at: str, code: str, message: str) -> Outcome:
        return OrderFailed(instance=received.data.instance, state=State.FAILED, stage=at, code=code, message=message)

    async with bus(tmp_path) as client:
        worker = Worker(
            bus=client,
            origin=Origin(source="kite/yoco/n1", producer="yoco@test"),
            service="yoco",
            node="n1",
            journal=tmp_path / "orders.sqlite",
            handlers={StopOrdered: Task(stop, failed)},
        )
        strayed = ordered(stop_order("theirs", node="n2"), "instance/theirs")
        with capture_logs() as logs:
            task = asyncio.create_task(worker.run())
            await client.publish(dec_subject("yoco", "n1", "stop_ordered", "x"), strayed.raw, strayed.header.id)
            await give(client, "yoco", stop_order("mine"), "instance/mine")
            await eventually(lambda: ended)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    assert ended == ["mine"]
    assert [line["reason"] for line in logs if line["event"] == "order_unknown"] == ["it is for node n2"]
