"""Publishing: acknowledged once, in order, whatever happens to the connection; refused clearly when it cannot be."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from types import MappingProxyType

import pytest

from kite.bus import (
    DEC,
    EVT,
    Bus,
    BusClosed,
    BusFull,
    EmbeddedServer,
    Outgoing,
    PubAck,
    PublishFailed,
    PublishUnanswered,
    StreamMissing,
    evt_subject,
)
from kite.bus.errors import StreamRefused
from kite.clock import US_PER_S, wall_us
from kite.testing.bus import bus, nats
from kite.testing.eventually import eventually

SUBJECT = evt_subject("kite.yoco.instance_ready.v1", "instance/i-1")


def numbered(count: int, start: int = 1) -> list[Outgoing]:
    return [Outgoing(SUBJECT, f"{n}".encode(), f"id-{n}") for n in range(start, start + count)]


def seqs(outcomes: list[PubAck | PublishFailed]) -> list[int | str]:
    return [outcome.seq if isinstance(outcome, PubAck) else outcome.why for outcome in outcomes]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with bus(tmp_path) as connected:
        yield connected


async def test_a_message_is_stored_once_however_often_it_is_sent(client: Bus):
    first = await client.publish(SUBJECT, b"payload", "id-1")
    again = await client.publish(SUBJECT, b"payload", "id-1")
    assert first == PubAck(EVT, 1, duplicate=False)
    assert again == PubAck(EVT, 1, duplicate=True)
    assert (await client.stream(EVT)).last_seq == 1


async def test_a_stored_message_has_its_bytes_headers_and_time(client: Bus):
    headers = MappingProxyType({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-03", "tracestate": "k=v"})
    before_us = wall_us()
    await client.publish(SUBJECT, b"\x00\xff", "id-1", headers)
    stored = await client.message(EVT, 1)
    assert stored is not None
    assert (stored.stream, stored.seq, stored.subject, stored.payload) == (EVT, 1, SUBJECT, b"\x00\xff")
    assert dict(stored.headers) == {**headers, "Nats-Msg-Id": "id-1", "Nats-Expected-Stream": EVT}
    assert stored.msg_id == "id-1"
    assert before_us - US_PER_S < stored.published_us < wall_us() + US_PER_S
    assert await client.message(EVT, 2) is None


async def test_an_empty_payload_is_a_message_too(client: Bus):
    await client.publish(SUBJECT, b"", "id-1")
    stored = await client.message(EVT, 1)
    assert stored is not None
    assert stored.payload == b""


async def test_many_keep_their_order_over_several_windows(client: Bus):
    outcomes = await client.publish_many(numbered(1_000))
    assert seqs(outcomes) == list(range(1, 1_001))
    last = await client.message(EVT, 1_000)
    assert last is not None
    assert last.payload == b"1000"


async def test_overlapping_publishers_share_the_window(client: Bus):
    acks = await asyncio.gather(*(client.publish(SUBJECT, b"x", f"id-{n}") for n in range(600)))
    assert sorted(ack.seq for ack in acks) == list(range(1, 601))


async def test_what_is_in_flight_when_the_server_is_killed_is_sent_again_in_order(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test", window=64) as client:
        await client.provision()
        sending = asyncio.create_task(client.publish_many(numbered(3_000)))

        async def has_begun() -> bool:
            return (await client.stream(EVT)).last_seq > 0

        await eventually(has_begun)
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        assert not sending.done()
        async with EmbeddedServer(server.directory, port=server.port):
            outcomes = await sending
            assert seqs(outcomes) == list(range(1, 3_001))
            assert client.sessions == 2
            assert (await client.stream(EVT)).last_seq == 3_000


async def test_a_full_stream_refuses_and_loses_nothing(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision(facts_bytes=64 * 1024)
        items = [Outgoing(SUBJECT, bytes(10_000), f"id-{n}") for n in range(20)]
        outcomes = await client.publish_many(items)
        taken = sum(isinstance(outcome, PubAck) for outcome in outcomes)
        assert len(outcomes) == 20
        assert 0 < taken < 20
        assert isinstance(outcomes[taken], BusFull)
        with pytest.raises(BusFull, match="id-x on kite") as caught:
            await client.publish(SUBJECT, bytes(10_000), "id-x")
        assert caught.value.retryable
        await client.provision(facts_bytes=1024**2)
        again = await client.publish_many(items)
        assert seqs(again) == list(range(1, 21))
        assert [isinstance(ack, PubAck) and ack.duplicate for ack in again] == [True] * taken + [False] * (20 - taken)


async def test_after_a_message_that_can_never_be_stored_nothing_more_is_sent(client: Bus):
    items = [*numbered(2), Outgoing(SUBJECT, bytes(2 * 1024**2), "big"), *numbered(2, start=3)]
    outcomes = await client.publish_many(items)
    assert seqs(outcomes[:2]) == [1, 2]
    assert type(outcomes[2]) is PublishFailed
    assert all(isinstance(outcome, PublishUnanswered) for outcome in outcomes[3:])
    assert (await client.stream(EVT)).last_seq == 2


@pytest.mark.parametrize("item", [Outgoing("kite.evt.v1.a b", b"", "id"), Outgoing(SUBJECT, b"", "id", {"a b": "c"})])
async def test_a_malformed_message_fails_at_once(client: Bus, item: Outgoing):
    (outcome,) = await client.publish_many([item])
    assert type(outcome) is PublishFailed


async def test_nothing_is_sent_when_there_is_nothing(client: Bus):
    assert await client.publish_many([]) == []


async def test_a_closed_bus_says_so(client: Bus):
    await client.close()
    await client.close()
    with pytest.raises(BusClosed):
        await client.publish(SUBJECT, b"", "id")
    with pytest.raises(BusClosed):
        await client.stream(EVT)


async def test_provisioning_is_idempotent_and_keeps_what_is_stored(client: Bus):
    await client.publish(SUBJECT, b"", "id-1")
    before = await client.stream(EVT)
    await client.provision(facts_bytes=32 * 1024**2)
    await client.provision(facts_bytes=32 * 1024**2)
    assert await client.stream(EVT) == before
    assert (await client.stream(DEC)).last_seq == 0


async def test_a_bound_beyond_the_server_is_refused_with_its_reason(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        with pytest.raises(StreamRefused, match="insufficient storage"):
            await client.provision(facts_bytes=1024**4)
        with pytest.raises(StreamMissing) as caught:
            await client.stream(EVT)
        assert "provision()" in caught.value.hint
