"""A worker that is cut off in the middle, by its own end or by that of the bus: one effect, one outcome.

The worker is a process of its own (`kite.testing.orders.run`). Its effect is a line in a file, as an adapter is a name
in an engine: the handler looks before it acts. All points where it can be killed: test_orders_points.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kite.bus import Bus
from kite.clock import US_PER_S, mono_us
from kite.orders import Journal, State
from kite.testing import crash
from kite.testing.bus import FACTS_BYTES, bus, nats
from kite.testing.eventually import eventually
from kite.testing.orders import Said, effects, facts, give, journal_of, left, pause, run, stop_order, work
from kite_schemas.yoco import InstanceChanged

ACK_WAIT_S = 30.0
RESTART_S = 15.0  # well before ACK_WAIT_S: it is not the redelivery that resumes an order


def log(folder: Path) -> str:
    return (folder / "log").read_text()


@asynccontextmanager
async def process(url: str, folder: Path) -> AsyncGenerator[None]:
    """Run the worker as a process, and kill it in the end."""
    async with crash.process(folder / "log", None, run, url, folder, "n1", ACK_WAIT_S) as child:
        yield
        assert child.is_alive(), log(folder)


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
            await eventually(lambda: effects(tmp_path))
        assert await facts(client) == []
        pause(tmp_path).unlink()
        before_us = mono_us()
        async with process(client.url, tmp_path):
            (said,) = await outcomes(client)
            assert mono_us() - before_us < ACK_WAIT_S * US_PER_S, "resumed from the journal"
    assert said_of(said) == ("found", 2, True)
    assert effects(tmp_path) == [f"a {order.header.id} 1"]
    with Journal.open(journal_of(tmp_path)) as journal:
        entry = journal.find(order.header.id)
    assert entry
    assert (entry.state, entry.attempt, entry.outcome) == (State.DONE, 2, said.raw)


async def test_killed_between_done_and_publish_it_says_the_very_same_bytes(tmp_path: Path) -> None:
    async with nats(tmp_path) as server:
        async with await Bus.connect(server.url, "test") as client:
            await client.provision(facts_bytes=FACTS_BYTES)
            pause(tmp_path).touch()
            async with process(server.url, tmp_path):
                order = await give(client, "yoco", stop_order("a"), "instance/a")
                await eventually(lambda: effects(tmp_path))
                await server.stop()
                pause(tmp_path).unlink()
                await eventually(lambda: "publish_retried" in log(tmp_path))
        with Journal.open(journal_of(tmp_path)) as journal:
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


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
async def test_a_bus_that_was_away_gets_the_outcome_when_it_is_back(tmp_path: Path, by: signal.Signals) -> None:
    async with nats(tmp_path) as server:
        port = server.port
        async with await Bus.connect(server.url, "test") as client:
            await client.provision(facts_bytes=FACTS_BYTES)
            pause(tmp_path).touch()
            async with process(server.url, tmp_path):
                await give(client, "yoco", stop_order("a"), "instance/a")
                await eventually(lambda: effects(tmp_path))
                os.kill(server.pid, by)
                await server.wait()
                pause(tmp_path).unlink()
                await eventually(lambda: "publish_retried" in log(tmp_path))
                async with type(server)(server.directory, port=port) as again:
                    await client.ready()
                    (said,) = await outcomes(client)

                    async def nothing_left() -> bool:
                        return await left(again.monitor_url, "yoco", "n1") == 0

                    await eventually(nothing_left)
                    assert len(await facts(client)) == 1
    assert said_of(said) == ("made", 1, True)
    assert len(effects(tmp_path)) == 1


async def test_cancelled_in_the_middle_it_leaves_the_order_to_the_next_run(tmp_path: Path) -> None:
    async with bus(tmp_path) as client:
        pause(tmp_path).touch()
        run = asyncio.create_task(work(client.url, tmp_path))
        await give(client, "yoco", stop_order("a"), "instance/a")
        await eventually(lambda: effects(tmp_path))
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        pause(tmp_path).unlink()
        async with process(client.url, tmp_path):
            (said,) = await outcomes(client)
    assert said_of(said) == ("found", 2, True)
