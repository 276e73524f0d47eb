"""Orders whose time is over: refused and told, or given up by the arbitrator before, while and after they are begun."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kite import clock
from kite.bus import Bus, EmbeddedServer
from kite.events import new_id
from kite.orders import GRACE_US, Journal, State
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.eventually import eventually
from kite.testing.orders import TTL_US, Said, effects, expire, facts, give, journal_of, left, pause, relay
from kite.testing.orders import stop_order as stop
from kite.testing.orders import work as run
from kite_schemas.yoco import InstanceChanged, OrderFailed

ACK_WAIT_S = 0.5


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    async with nats(tmp_path) as running:
        yield running


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncGenerator[Bus]:
    async with await Bus.connect(server.url, "test") as connected:
        await connected.provision(facts_bytes=FACTS_BYTES)
        yield connected


@asynccontextmanager
async def working(server: EmbeddedServer, folder: Path) -> AsyncGenerator[None]:
    """Run the worker; in the end wait until the bus has nothing more for it, unless an order is to be cut off."""
    task = asyncio.create_task(run(server.url, folder, ack_wait_s=ACK_WAIT_S))

    async def nothing_left() -> bool:
        return await left(server.monitor_url, "yoco", "n1") == 0

    try:
        yield
        if not pause(folder).exists():
            await eventually(nothing_left)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def told(client: Bus, count: int = 1) -> list[Said]:
    async def enough() -> list[Said]:
        said = await facts(client)
        return said if len(said) >= count else []

    return await eventually(enough)


def failure(said: Said) -> tuple[str, str, int, bool]:
    assert isinstance(said.event.data, OrderFailed)
    return said.event.data.stage, said.event.data.code, said.event.data.attempt, said.event.data.done


def known(folder: Path, order_id: str) -> State | None:
    with Journal.open(journal_of(folder)) as journal:
        entry = journal.find(order_id)
    return entry and entry.state


async def test_an_order_that_came_too_late_is_refused_and_told_whenever_it_comes_again(
    server: EmbeddedServer, client: Bus, tmp_path: Path
) -> None:
    late = await give(client, "yoco", stop("late", ttl_us=0), "instance/late")
    over_us = clock.wall_us() + GRACE_US
    await eventually(lambda: clock.wall_us() > over_us)
    async with working(server, tmp_path):
        await give(client, "yoco", stop("a"), "instance/a")
        first, _ = await told(client, 2)
    assert failure(first) == ("begin", "late", 0, True), "attempt 0: nothing was begun"
    assert first.event.header.causationid == late.header.id
    async with working(server, tmp_path):
        await relay(client, "yoco", late, msg_id=new_id())  # fresh by the broker's clock: only the journal knows it
        await give(client, "yoco", stop("b"), "instance/b")
        await told(client, 3)
    assert [line.split()[0] for line in effects(tmp_path)] == ["a", "b"]
    assert len(await facts(client)) == 3
    assert known(tmp_path, late.header.id) is State.DONE


@pytest.mark.parametrize("ttl_us", [0, TTL_US])
async def test_an_order_given_up_before_it_is_delivered_is_never_begun_and_nobody_is_told(
    server: EmbeddedServer, client: Bus, tmp_path: Path, ttl_us: int
) -> None:
    order = await give(client, "yoco", stop("a", ttl_us=ttl_us), "instance/a")
    await expire(client, "yoco", order)
    async with working(server, tmp_path):
        await relay(client, "yoco", order, msg_id=new_id())
        await give(client, "yoco", stop("b"), "instance/b")
        (said,) = await told(client)
    assert isinstance(said.event.data, InstanceChanged)
    assert [line.split()[0] for line in effects(tmp_path)] == ["b"]
    assert known(tmp_path, order.header.id) is State.DROPPED


async def test_an_order_given_up_while_its_worker_was_dead_is_stopped_by_the_next_one_and_its_lane_goes_on(
    server: EmbeddedServer, client: Bus, tmp_path: Path
) -> None:
    pause(tmp_path).touch()
    async with working(server, tmp_path):
        order = await give(client, "yoco", stop("a"), "instance/a")
        await eventually(lambda: effects(tmp_path))
    await expire(client, "yoco", order)
    following = await give(client, "yoco", stop("a"), "instance/a")
    async with working(server, tmp_path):
        (said,) = await told(client)
        pause(tmp_path).unlink()
        await told(client, 2)
    assert failure(said) == ("begin", "expired", 2, True)
    assert [line.split()[1:] for line in effects(tmp_path)] == [[order.header.id, "1"], [following.header.id, "1"]]


async def test_an_order_that_is_done_stays_done_when_it_is_given_up(
    server: EmbeddedServer, client: Bus, tmp_path: Path
) -> None:
    async with working(server, tmp_path):
        order = await give(client, "yoco", stop("a"), "instance/a")
        (said,) = await told(client)
        await expire(client, "yoco", order)
        await relay(client, "yoco", order, msg_id=new_id())
        await give(client, "yoco", stop("b"), "instance/b")
        await told(client, 2)
    assert (await facts(client))[0].raw == said.raw
    assert known(tmp_path, order.header.id) is State.DONE
    assert len(effects(tmp_path)) == 2
