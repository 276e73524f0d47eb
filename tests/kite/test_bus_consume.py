"""Reading: every message once and in order, over restarts; holes are filled or named; orders come until done."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from kite.bus import (
    DEC,
    EVT,
    TEL,
    Bus,
    BusClosed,
    BusGap,
    EmbeddedServer,
    Message,
    Outgoing,
    PubAck,
    StreamMissing,
    Work,
    dec_filters,
    dec_subject,
    evt_subject,
    tel_subject,
)
from kite.bus.consume import complete
from kite.bus.link import Link
from kite.clock import US_PER_S, mono_us
from kite.testing.bus import bus, nats
from kite.testing.eventually import eventually

READY = evt_subject("kite.yoco.instance_ready.v1", "instance/i-1")
LOADED = evt_subject("kite.upcycle.blend_loaded.v1", "blend/credit")
ORDERS = dec_filters("yoco", "node-1")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with bus(tmp_path) as connected:
        yield connected


async def publish(client: Bus, count: int, start: int = 1, subject: str = READY) -> None:
    outcomes = await client.publish_many(
        [Outgoing(subject, f"{n}".encode(), f"{subject}-{n}") for n in range(start, start + count)]
    )
    assert all(isinstance(outcome, PubAck) for outcome in outcomes)


async def read(client: Bus, stream: str, after_seq: int, until_seq: int, *, batch: int = 64) -> list[Message]:
    messages: list[Message] = []
    async with aclosing(client.pull(stream, after_seq, batch=batch)) as pulled:
        async for some in pulled:
            assert 0 < len(some) <= batch
            messages += some
            if some[-1].seq >= until_seq:
                break
    return messages


async def test_a_reader_gets_everything_in_order_and_resumes_where_it_was(client: Bus):
    await publish(client, 1_000)
    messages = await read(client, EVT, 0, 1_000)
    assert [message.seq for message in messages] == list(range(1, 1_001))
    assert [message.payload for message in messages] == [f"{n}".encode() for n in range(1, 1_001)]
    assert messages[6] == await client.message(EVT, 7)
    assert [message.seq for message in await read(client, EVT, 990, 1_000)] == list(range(991, 1_001))


async def test_a_waiting_reader_hears_at_once(client: Bus):
    reading = asyncio.create_task(read(client, EVT, 0, 1))
    await publish(client, 1)
    (message,) = await asyncio.wait_for(reading, 5)
    assert message.payload == b"1"


async def test_a_quiet_stream_is_not_a_dead_one(client: Bus):
    async with aclosing(client.pull(EVT, 0, idle_s=0.05)) as pulled:
        waiting = asyncio.ensure_future(anext(pulled))
        begun_us = mono_us()
        await eventually(lambda: mono_us() - begun_us > US_PER_S // 2)  # ten heartbeats
        assert not waiting.done()
        await publish(client, 1)
        assert [message.seq for message in await waiting] == [1]


async def test_a_filter_shows_only_its_subjects(client: Bus):
    await publish(client, 3)
    await publish(client, 2, subject=LOADED)
    await publish(client, 1, start=4)
    async with aclosing(client.follow(EVT, "kite.evt.v1.upcycle.>", after_seq=0)) as followed:
        seen = [await anext(followed), await anext(followed)]
    assert [(message.seq, message.subject) for message in seen] == [(4, LOADED), (5, LOADED)]


async def test_following_from_now_leaves_out_the_past(client: Bus):
    await publish(client, 3)
    async with aclosing(client.follow(EVT, [READY, LOADED])) as followed:
        coming = asyncio.ensure_future(anext(followed))

        async def heard() -> bool:
            await client.publish(LOADED, b"now", "now")  # the same id: stored once
            return coming.done()

        await client.publish(LOADED, b"maybe", "maybe")
        await eventually(heard)
        assert (await coming).payload in {b"now", b"maybe"}


async def test_a_reader_survives_a_killed_server(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision()
        await publish(client, 10)
        reading = asyncio.create_task(read(client, EVT, 0, 20))
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        async with EmbeddedServer(server.directory, port=server.port):
            await publish(client, 10, start=11)
            assert [message.seq for message in await reading] == list(range(1, 21))


async def test_a_frozen_server_is_noticed_and_read_on_from(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision()
        async with aclosing(client.pull(EVT, 0, idle_s=0.1)) as pulled:
            await publish(client, 1)
            assert [message.seq for message in await anext(pulled)] == [1]
            waiting = asyncio.ensure_future(anext(pulled))
            with capture_logs() as logs:
                os.kill(server.pid, signal.SIGSTOP)
                await eventually(lambda: "no heartbeat" in reasons(logs))
                os.kill(server.pid, signal.SIGCONT)
                await publish(client, 1, start=2)
                assert [message.seq for message in await waiting] == [2]


def reasons(logs: list[EventDict]) -> list[str]:
    return [entry["reason"] for entry in logs if entry["event"] == "bus_reader_lost"]


async def test_a_reader_whose_consumer_is_deleted_makes_another(client: Bus):
    async with aclosing(client.pull(EVT, 0)) as pulled:
        await publish(client, 1)
        assert [message.seq for message in await anext(pulled)] == [1]
        waiting = asyncio.ensure_future(anext(pulled))
        link = Link(client.url)
        await link.open("vandal")
        for name in await consumers(link, EVT):
            await link.api(f"CONSUMER.DELETE.{EVT}.{name}", {})
        await link.close()
        await publish(client, 1, start=2)
        assert [message.seq for message in await waiting] == [2]


async def consumers(link: Link, stream: str) -> list[str]:
    return cast("list[str]", (await link.api(f"CONSUMER.NAMES.{stream}", {}))["consumers"])


async def test_a_slow_reader_of_a_fast_stream_holds_two_batches_at_most(client: Bus):
    await publish(client, 1_000)
    link = Link(client.url)
    await link.open("witness")
    async with aclosing(client.pull(EVT, 0, batch=8)) as pulled:
        seen = [message.seq for message in await anext(pulled)]
        (name,) = await consumers(link, EVT)

        async def ahead() -> int:
            info = await link.api(f"CONSUMER.INFO.{EVT}.{name}", {})
            return cast("dict[str, int]", info["delivered"])["stream_seq"] - len(seen)

        for _ in range(10):
            assert await ahead() <= 2 * 8
        while seen[-1] < 1_000:
            seen += [message.seq for message in await anext(pulled)]
            assert seen[-1] % 100 or await ahead() <= 2 * 8
    await link.close()
    assert seen == list(range(1, 1_001))


async def test_messages_that_a_reader_missed_are_fetched_one_by_one(client: Bus):
    await publish(client, 10)
    messages = await read(client, EVT, 0, 10)
    link = Link(client.url)
    await link.open("repair")
    run, gap = await complete(link, EVT, 2, [messages[4], messages[5], messages[8]])
    await link.close()
    assert gap is None
    assert run == messages[2:9]


async def test_a_hole_that_cannot_be_filled_is_named_after_everything_before_it(client: Bus):
    subject = tel_subject("node-1")
    await publish(client, 10, subject=subject)
    link = Link(client.url)
    await link.open("vandal")
    for seq in (1, 5, 6):  # telemetry may be deleted; facts may not
        await link.api(f"STREAM.MSG.DELETE.{TEL}", {"seq": seq})
    await link.close()
    seen: list[int] = []
    holes: list[tuple[int, int]] = []
    after_seq = 0
    while after_seq < 10:
        try:
            async for messages in client.pull(TEL, after_seq):
                seen += [message.seq for message in messages]
                after_seq = messages[-1].seq
                if after_seq == 10:
                    break
        except BusGap as gap:
            holes.append((gap.first_seq, gap.last_seq))
            after_seq = gap.last_seq
    assert holes == [(1, 1), (5, 6)]
    assert seen == [2, 3, 4, 7, 8, 9, 10]


async def test_facts_cannot_be_deleted(client: Bus):
    await publish(client, 1)
    link = Link(client.url)
    await link.open("vandal")
    for request, body in ((f"STREAM.MSG.DELETE.{EVT}", {"seq": 1}), (f"STREAM.PURGE.{EVT}", {})):
        with pytest.raises(Exception, match="refuses"):
            await link.api(request, body)
    await link.close()


async def test_closing_the_bus_ends_its_readers(client: Bus):
    pulled = asyncio.ensure_future(anext(client.pull(EVT, 0)))
    worked = asyncio.ensure_future(anext(client.work(DEC, "yoco-node-1", ORDERS)))
    assert await asyncio.wait({pulled, worked}, timeout=0.1) == (set(), {pulled, worked})
    await client.close()
    for task in (pulled, worked):
        with pytest.raises(BusClosed):
            await task


async def order(client: Bus, target: str, node: str = "node-1") -> None:
    await client.publish(dec_subject("yoco", node, "wake_ordered", target), target.encode(), f"order-{target}")


async def test_an_order_comes_until_it_is_acknowledged(client: Bus):
    await order(client, "i-1")
    async with aclosing(client.work(DEC, "yoco/node.1", ORDERS, ack_wait_s=0.2)) as orders:
        first, again = await anext(orders), await anext(orders)
        assert [first.delivered, again.delivered] == [1, 2]
        assert first.message == again.message
        assert first.message.payload == b"i-1"
        assert await again.ack()
        await order(client, "i-2")
        following = await anext(orders)
        assert following.message.payload == b"i-2"
        assert await following.ack()


async def test_a_worker_waits_for_a_stream_that_is_not_there(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        with pytest.raises(StreamMissing):
            await anext(client.pull(DEC, 0))
        async with aclosing(client.work(DEC, "yoco-node-1", ORDERS)) as orders:
            with capture_logs() as logs:
                coming = asyncio.ensure_future(anext(orders))
                await eventually(lambda: logs)
                begun_us = mono_us()
                await eventually(lambda: mono_us() - begun_us > US_PER_S // 2)  # more than two tries
            assert [entry["reason"] for entry in logs] == [f"stream {DEC} does not exist"]
            await client.provision()
            await order(client, "i-1")
            assert (await coming).message.payload == b"i-1"


async def test_an_order_in_progress_does_not_come_again(client: Bus):
    await order(client, "i-1")
    async with aclosing(client.work(DEC, "yoco-node-1", ORDERS, ack_wait_s=0.5)) as orders:
        first = await anext(orders)
        following = asyncio.ensure_future(anext(orders))
        begun_us = mono_us()

        async def long_done() -> bool:
            await first.in_progress()
            return mono_us() - begun_us > US_PER_S

        await eventually(long_done)
        assert not following.done()
        assert await first.ack()
        await order(client, "i-2")
        assert (await following).message.payload == b"i-2"


async def test_an_order_given_back_comes_again_after_its_delay(client: Bus):
    await order(client, "i-1")
    async with aclosing(client.work(DEC, "yoco-node-1", ORDERS)) as orders:
        begun_us = mono_us()
        await (await anext(orders)).nak(delay_s=0.3)
        again = await anext(orders)
        assert mono_us() - begun_us >= 0.3 * US_PER_S
        await again.nak()
        assert (await anext(orders)).delivered == 3


async def test_a_worker_gets_its_nodes_and_the_fleets_orders_only(client: Bus):
    await order(client, "other", node="node-2")
    await order(client, "mine")
    await order(client, "everyones", node="_")
    async with aclosing(client.work(DEC, "yoco-node-1", ORDERS)) as orders:
        assert [(await anext(orders)).message.payload for _ in range(2)] == [b"mine", b"everyones"]


async def test_what_a_worker_fetched_but_never_saw_goes_to_the_next_one_at_once(client: Bus):
    for target in ("i-1", "i-2", "i-3"):
        await order(client, target)
    async with aclosing(client.work(DEC, "yoco-node-1", ORDERS)) as orders:
        assert await (await anext(orders)).ack()
    async with aclosing(client.work(DEC, "yoco-node-1", ORDERS)) as orders:
        following = [await anext(orders), await anext(orders)]
    assert {work.message.payload for work in following} == {b"i-2", b"i-3"}


async def test_a_worker_survives_a_restarted_server(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision()
        await order(client, "i-1")
        async with aclosing(client.work(DEC, "yoco-node-1", ORDERS)) as orders:
            first = await anext(orders)
            following: asyncio.Future[Work] = asyncio.ensure_future(anext(orders))
            await server.stop()
            async with EmbeddedServer(server.directory, port=server.port):
                assert await first.ack()
                await order(client, "i-2")
                assert (await following).message.payload == b"i-2"
