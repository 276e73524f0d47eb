"""Publishing: acknowledged once, in order, whatever happens to the connection; refused clearly when it cannot be."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import pytest
from structlog.testing import capture_logs

from kite.bus import (
    DEC,
    EVT,
    FILL_ALARM_PPM,
    Bus,
    BusClosed,
    BusFull,
    EmbeddedServer,
    Message,
    Outgoing,
    PubAck,
    PublishFailed,
    PublishUnanswered,
    StreamMissing,
    evt_subject,
    publish,
)
from kite.bus import server as bus_server
from kite.bus.errors import StreamRefused
from kite.bus.link import Link
from kite.bus.publish import acked_prefix
from kite.clock import US_PER_S, wall_us
from kite.testing.bus import bus, nats
from kite.testing.eventually import eventually
from kite.trust import Signer, parse, verifies

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
    name = f"id-1.{sha256(stored.payload).hexdigest()[:16]}"
    assert dict(stored.headers) == {**headers, "Nats-Msg-Id": name, "Nats-Expected-Stream": EVT}
    assert (stored.msg_id, stored.event_id, stored.signature) == (name, "id-1", "")
    assert before_us - US_PER_S < stored.published_us < wall_us() + US_PER_S
    assert await client.message(EVT, 2) is None


async def test_a_squatted_id_does_not_keep_the_genuine_message_away(client: Bus):
    squatted = await client.publish(SUBJECT, b"forged", "id-1")
    genuine = await client.publish(SUBJECT, b"genuine", "id-1")
    assert [squatted, genuine] == [PubAck(EVT, 1, duplicate=False), PubAck(EVT, 2, duplicate=False)]
    both = [await client.message(EVT, seq) for seq in (1, 2)]
    assert [message and (message.event_id, message.payload) for message in both] == [
        ("id-1", b"forged"),
        ("id-1", b"genuine"),
    ]


async def test_what_a_signer_publishes_is_signed_over_its_exact_bytes(client: Bus):
    signer = Signer.generate()
    async with await Bus.connect(client.url, "signing", signer=signer) as signing:
        for n in range(2):  # again: the same signature
            ack = await signing.publish(SUBJECT, b"\x00 exact \xff", "id-1", {"traceparent": "t"})
            assert ack == PubAck(EVT, 1, duplicate=n == 1)
    stored = await client.message(EVT, 1)
    assert stored is not None
    signature = parse(stored.signature)
    assert signature is not None
    assert signature.key_id == signer.key_id
    assert verifies(signer.public, stored.payload, signature.value)
    assert not verifies(signer.public, stored.payload + b" ", signature.value)


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


async def test_every_message_of_a_burst_over_a_killed_server_has_one_outcome(tmp_path: Path):
    bursts = {name: [*named(name, 800), POISON, *named(f"{name}-after", 80)] for name in ("a", "b", "c", "d")}
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision()
        sending = [asyncio.create_task(client.publish_many(items)) for items in bursts.values()]

        async def has_begun() -> bool:
            return (await client.stream(EVT)).last_seq > 0

        await eventually(has_begun)
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        async with EmbeddedServer(server.directory, port=server.port):
            outcomes = dict(zip(bursts, await asyncio.gather(*sending), strict=True))
            stored = await everything(client)
        assert len({message.msg_id for message in stored}) == len(stored)
        for name, items in bursts.items():
            acks = acked_prefix(outcomes[name])
            assert len(outcomes[name]) == len(items)
            assert len(acks) == 800
            assert type(outcomes[name][len(acks)]) is PublishFailed
            assert all(isinstance(outcome, PublishUnanswered) for outcome in outcomes[name][len(acks) + 1 :])
            kept = [stored[ack.seq - 1].payload for ack in acks]
            assert kept == [item.payload for item in items[: len(acks)]]


POISON = Outgoing("no subject", b"", "poison")


def named(name: str, count: int) -> list[Outgoing]:
    return [Outgoing(SUBJECT, f"{name}-{n}".encode(), f"{name}-{n}") for n in range(count)]


async def everything(client: Bus) -> list[Message]:
    last = (await client.stream(EVT)).last_seq
    async with aclosing(client.follow(EVT, after_seq=0)) as followed:
        return [await anext(followed) for _ in range(last)]


async def test_a_full_stream_blocks_its_publishers_until_there_is_room(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision(facts_bytes=64 * 1024)
        items = [Outgoing(SUBJECT, bytes([n]) * 10_000, f"id-{n}") for n in range(20)]
        with capture_logs() as logs:
            sending = asyncio.create_task(client.publish_many(items))
            await eventually(lambda: any(entry.get("code") == BusFull.code for entry in logs))
        full = await client.stream(EVT)
        assert not sending.done()
        assert full.limit_bytes == 64 * 1024
        assert 700_000 < full.fill_ppm <= 1_000_000
        await client.provision(facts_bytes=1024**2)
        assert seqs(await sending) == list(range(1, 21))
        assert [message.payload for message in await everything(client)] == [item.payload for item in items]
        assert (await client.stream(EVT)).fill_ppm < FILL_ALARM_PPM


async def test_a_server_without_room_is_a_full_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bus_server, "STORE_BYTES", 64 * 1024)
    monkeypatch.setattr(publish, "BACKOFF_S", 0.001)
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        link = Link(server.url)
        await link.open("operator")
        await link.api(f"STREAM.CREATE.{EVT}", {"name": EVT, "subjects": ["kite.evt.v1.>"], "discard": "new"})
        await link.close()
        outcomes = await client.publish_many([Outgoing(SUBJECT, bytes([n]) * 10_000, f"id-{n}") for n in range(20)])
        taken = acked_prefix(outcomes)
        assert 0 < len(taken) < 20
        assert isinstance(outcomes[len(taken)], BusFull)
        unbounded = await client.stream(EVT)
        assert (unbounded.last_seq, unbounded.limit_bytes, unbounded.fill_ppm) == (len(taken), 0, 0)


async def test_publishing_waits_for_a_stream_that_is_not_there_yet(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        with capture_logs() as logs:
            sending = asyncio.create_task(client.publish_many(numbered(10)))
            await eventually(lambda: any("no stream takes it" in entry.get("error", "") for entry in logs))
        await client.provision()
        assert seqs(await sending) == list(range(1, 11))


async def test_a_full_stream_refuses_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publish, "BACKOFF_S", 0.001)
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
    assert await client.stream(EVT) == replace(before, limit_bytes=32 * 1024**2)
    assert (await client.stream(DEC)).last_seq == 0


async def test_a_bound_beyond_the_server_is_refused_with_its_reason(tmp_path: Path):
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        with pytest.raises(StreamRefused, match="insufficient storage"):
            await client.provision(facts_bytes=1024**4)
        with pytest.raises(StreamMissing) as caught:
            await client.stream(EVT)
        assert "provision()" in caught.value.hint
