"""A worker that is killed: the effect is there once, and its outcome reaches the bus.

The killed worker is a process of its own (this file run as a program). Its effect is a line in a file, as an adapter
is a name in an engine: the handler looks before it acts.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from kite.bus import Bus
from kite.clock import US_PER_S, mono_us
from kite.events import Origin
from kite.launch import command
from kite.orders import Emit, Journal, Received, State, Task, Tasks, Worker
from kite.testing.bus import bus, nats
from kite.testing.eventually import eventually
from kite.testing.orders import Said, facts, give, stop_order
from kite_schemas.why import Outcome
from kite_schemas.yoco import InstanceChanged, OrderFailed, StopOrdered
from kite_schemas.yoco import State as Life

ORIGIN = Origin(source="kite/yoco/n1", producer="yoco@test")
ACK_WAIT_S = 30.0
RESTART_S = 15.0  # well before ACK_WAIT_S: it is not the redelivery that resumes an order


def effect(folder: Path) -> Path:
    return folder / "effect"


def pause(folder: Path) -> Path:
    """While this file is there, a handler waits between its effect and its outcome."""
    return folder / "pause"


def tasks(folder: Path) -> Tasks:
    async def stop(received: Received[StopOrdered], _emit: Emit) -> Outcome:
        found = effect(folder).exists()
        if not found:
            effect(folder).write_text(f"by attempt {received.attempt}\n")
        await eventually(lambda: not pause(folder).exists(), deadline_s=60)
        return InstanceChanged(
            instance=received.data.instance,
            node="n1",
            from_state=Life.READY,
            to_state=Life.ABSENT,
            code="found" if found else "made",
            duration_us=1,
        )

    def failed(received: Received[StopOrdered], at: str, code: str, message: str) -> Outcome:
        return OrderFailed(instance=received.data.instance, state=Life.FAILED, stage=at, code=code, message=message)

    return {StopOrdered: Task(stop, failed)}


async def work(url: str, folder: Path) -> None:
    async with await Bus.connect(url, "yoco") as client:
        journal = folder / "orders.sqlite"
        worker = Worker(bus=client, origin=ORIGIN, service="yoco", node="n1", journal=journal, handlers=tasks(folder))
        await worker.run()


@asynccontextmanager
async def process(url: str, folder: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run the worker as a process, its log in a file, and kill it in the end."""
    with (folder / "log").open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *command([sys.executable, __file__, url, str(folder)]), stdout=output, stderr=output
        )
    try:
        yield child
        assert child.returncode is None, (folder / "log").read_text()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def outcomes(client: Bus) -> list[Said]:
    return await eventually(lambda: facts(client), deadline_s=RESTART_S)


def said_of(said: Said) -> tuple[str, int, bool]:
    assert isinstance(said.event.data, InstanceChanged)
    return said.event.data.code, said.event.data.attempt, said.event.data.done


async def test_killed_between_effect_and_outcome_it_looks_first_and_the_effect_is_there_once(tmp_path: Path) -> None:
    async with bus(tmp_path) as client:
        pause(tmp_path).touch()
        async with process(client.url, tmp_path):
            order = await give(client, "yoco", stop_order("a"), "instance/a")
            await eventually(effect(tmp_path).exists)
        assert await facts(client) == []
        pause(tmp_path).unlink()
        before_us = mono_us()
        async with process(client.url, tmp_path):
            (said,) = await outcomes(client)
            assert mono_us() - before_us < ACK_WAIT_S * US_PER_S, "resumed from the journal"
    assert said_of(said) == ("found", 2, True)
    assert effect(tmp_path).read_text() == "by attempt 1\n"
    with Journal.open(tmp_path / "orders.sqlite") as journal:
        entry = journal.find(order.header.id)
    assert entry
    assert (entry.state, entry.attempt, entry.outcome) == (State.DONE, 2, said.raw)


async def test_killed_between_done_and_publish_it_says_the_very_same_bytes(tmp_path: Path) -> None:
    async with nats(tmp_path) as server:
        async with await Bus.connect(server.url, "test") as client:
            await client.provision(facts_bytes=64 * 1024**2)
            pause(tmp_path).touch()
            async with process(server.url, tmp_path):
                order = await give(client, "yoco", stop_order("a"), "instance/a")
                await eventually(effect(tmp_path).exists)
                await server.stop()
                pause(tmp_path).unlink()
                await eventually(lambda: "publish_retried" in (tmp_path / "log").read_text())
        with Journal.open(tmp_path / "orders.sqlite") as journal:
            entry = journal.find(order.header.id)
            assert journal.unfinished() == [entry]
        assert entry
        await server.start()
        async with await Bus.connect(server.url, "test") as client:
            assert await facts(client) == []
            async with process(server.url, tmp_path):
                (said,) = await outcomes(client)
    assert said.raw == entry.outcome
    assert said_of(said) == ("made", 1, True)


async def test_a_bus_that_was_away_gets_the_outcome_when_it_is_back(tmp_path: Path) -> None:
    async with nats(tmp_path) as server:
        port = server.port
        async with await Bus.connect(server.url, "test") as client:
            await client.provision(facts_bytes=64 * 1024**2)
            pause(tmp_path).touch()
            async with process(server.url, tmp_path):
                await give(client, "yoco", stop_order("a"), "instance/a")
                await eventually(effect(tmp_path).exists)
                await server.stop()
                pause(tmp_path).unlink()
                await eventually(lambda: "publish_retried" in (tmp_path / "log").read_text())
                async with type(server)(server.directory, port=port):
                    await client.ready()
                    (said,) = await outcomes(client)
    assert said_of(said) == ("made", 1, True)


async def test_cancelled_in_the_middle_it_leaves_the_order_to_the_next_run(tmp_path: Path) -> None:
    async with bus(tmp_path) as client:
        pause(tmp_path).touch()
        run = asyncio.create_task(work(client.url, tmp_path))
        await give(client, "yoco", stop_order("a"), "instance/a")
        await eventually(effect(tmp_path).exists)
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        pause(tmp_path).unlink()
        async with process(client.url, tmp_path):
            (said,) = await outcomes(client)
    assert said_of(said) == ("found", 2, True)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], Path(sys.argv[2])))
