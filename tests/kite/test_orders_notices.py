"""Notices: a worker hears them at each delivery, says nothing of them, and an old one never undoes a newer one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite.bus import DEC, Bus, dec_filters
from kite.events import Origin, new_id
from kite.orders import Notices, Worker
from kite.testing.bus import bus
from kite.testing.eventually import eventually
from kite.testing.orders import facts, notify, relay
from kite_schemas.arbitration import Transport, TransportChanged

BOOT = "00000000-0000-4000-8000-000000000001"
ACK_WAIT_S = 1.0


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with bus(tmp_path) as connected:
        yield connected


@asynccontextmanager
async def working(client: Bus, folder: Path, notices: Notices) -> AsyncGenerator[None]:
    """Run a worker that carries out no orders."""
    worker = Worker(
        bus=client,
        origin=Origin(source="kite/yoco/n1", producer="yoco@test"),
        service="yoco",
        node="n1",
        journal=folder / "orders.sqlite",
        handlers={},
        notices=notices,
        ack_wait_s=ACK_WAIT_S,
    )
    task = asyncio.create_task(worker.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def hearing(heard: list[TransportChanged]) -> Notices:
    """Return what puts each notice into a list."""

    def hear(notice: TransportChanged, _id: str) -> None:
        heard.append(notice)

    return {TransportChanged: hear}


async def test_a_notice_is_heard_at_each_delivery_and_again_by_the_next_worker(client: Bus, tmp_path: Path) -> None:
    heard: list[TransportChanged] = []
    async with working(client, tmp_path, hearing(heard)):
        event = await notify(client, Transport.RELIABLE, BOOT)
        await eventually(lambda: heard)
        await relay(client, "yoco", event, msg_id=new_id())
        await eventually(lambda: len(heard) == 2)
    assert {(notice.node, notice.boot, notice.transport) for notice in heard} == {("n1", BOOT, Transport.RELIABLE)}
    async with working(client, tmp_path, hearing(heard)):
        assert len(await eventually(lambda: heard if len(heard) > 2 else [])) == 3, "acknowledged, so from the journal"
        await notify(client, Transport.FAST, BOOT)
        await eventually(lambda: heard[-1].transport is Transport.FAST)
    assert len(heard) == 4
    async with working(client, tmp_path, hearing(heard)):
        await eventually(lambda: len(heard) == 5)
    assert heard[-1].transport is Transport.FAST, "only the newest of a subject is remembered"
    assert await facts(client) == [], "a notice has no outcome"


async def test_a_notice_that_nobody_wants_is_said_in_the_log_and_done_with(client: Bus, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with working(client, tmp_path, {}):
            await notify(client, Transport.RELIABLE, BOOT)
            await eventually(lambda: "order_unknown" in {line["event"] for line in logs})


async def test_a_notice_that_comes_again_behind_a_newer_one_is_passed_over(client: Bus, tmp_path: Path) -> None:
    await notify(client, Transport.FAST, BOOT)
    works = client.work(DEC, "yoco-n1", dec_filters("yoco", "n1"), ack_wait_s=ACK_WAIT_S)
    async with aclosing(works) as deliveries:
        async for work in deliveries:
            assert work.delivered == 1
            break  # heard, and its acknowledgement lost: it comes again
    await notify(client, Transport.RELIABLE, BOOT)
    heard: list[TransportChanged] = []
    with capture_logs() as logs:
        async with working(client, tmp_path, hearing(heard)):
            await eventually(lambda: "notice_overtaken" in {line["event"] for line in logs})
    assert [notice.transport for notice in heard] == [Transport.RELIABLE]
