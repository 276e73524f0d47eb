"""A stream that is not the one that was read is never read on from: another one, an older copy, or one cut off."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from kite.bus import EVT, TEL, Bus, EmbeddedServer, Mark, StreamChanged, StreamMissing, StreamState, evt_subject
from kite.bus.link import Link
from kite.bus.mark import epoch_end
from kite.bus.message import Message, msg_id
from kite.testing.bus import FACTS_BYTES, bus
from kite_schemas.ledger import EpochEnd

READY = evt_subject("kite.yoco.instance_ready.v1", "instance/i-1")
WINDOW = "kite.tel.v1.node-1"
READ = Mark(seq=7, msg_id="m7", created="monday")
NOON_US = 43_200_000_000


def stored(name: str, published_us: int = NOON_US) -> Message:
    return Message(EVT, 7, READY, b"", {"Nats-Msg-Id": name}, published_us)


def holding(first: int, last: int, created: str = "monday") -> StreamState:
    return StreamState(EVT, created, first, last, 0)


@pytest.mark.parametrize(
    ("mark", "state", "found", "end"),
    [
        (READ, holding(1, 7), stored("m7"), None),
        (READ, holding(8, 9), None, None),  # aged out
        (READ, holding(8, 7), None, None),  # all of it
        (Mark(7), holding(1, 7, "tuesday"), None, None),  # nothing is known
        (Mark(7, created="monday"), holding(1, 9), None, None),  # sent on past a hole
        (Mark(0), holding(0, 0), None, None),
        (READ, holding(1, 7, "tuesday"), stored("m7"), EpochEnd.CREATED_ANEW),
        (READ, holding(1, 6), None, EpochEnd.SHORTER),
        (Mark(7), holding(1, 6), None, EpochEnd.SHORTER),
        (READ, holding(1, 9), stored("other"), EpochEnd.OTHER_MESSAGE),
        (READ, holding(1, 9), stored(""), EpochEnd.OTHER_MESSAGE),
        (READ, holding(7, 9), None, EpochEnd.MESSAGE_MISSING),
        (Mark.at(stored("m7"), "monday"), holding(1, 9), stored("m7"), None),
        (Mark.at(stored("m7"), "monday"), holding(1, 9), stored("m7", NOON_US + 1), EpochEnd.OTHER_MESSAGE),  # again
    ],
)
def test_what_is_known_of_the_last_message_tells_streams_apart(
    mark: Mark, state: StreamState, found: Message | None, end: EpochEnd | None
):
    assert epoch_end(mark, state, found) is end


@asynccontextmanager
async def running(folder: Path, port: int | None = None) -> AsyncGenerator[tuple[Bus, int]]:
    """Run a server and return a client of it and its port."""
    async with EmbeddedServer(folder, port=port) as server, await Bus.connect(server.url, "writer") as client:
        yield client, server.port


async def publish(client: Bus, name: str, first: int, last: int, subject: str = READY) -> None:
    for n in range(first, last + 1):
        await client.publish(subject, f"{name}-{n}".encode(), f"{name}-{n}")


async def read_up_to(pulled: AsyncGenerator[list[Message]], seq: int) -> Message:
    async for messages in pulled:
        if messages[-1].seq >= seq:
            return messages[-1]
    raise AssertionError


def replace_store(folder: Path, copy: Path) -> None:
    shutil.rmtree(folder / "store")
    shutil.copytree(copy, folder / "store")


@pytest.mark.parametrize("filters", [None, READY])
@pytest.mark.parametrize(("filled_to", "why"), [(5, EpochEnd.SHORTER), (12, EpochEnd.OTHER_MESSAGE)])
async def test_a_store_restored_from_an_older_copy_is_noticed(
    tmp_path: Path, filters: str | None, filled_to: int, why: EpochEnd
):
    folder, copy = tmp_path / "nats", tmp_path / "copy"
    async with running(folder) as (client, port):
        await client.provision(facts_bytes=FACTS_BYTES)
        await publish(client, "a", 1, 5)
        created = (await client.stream(EVT)).created
    shutil.copytree(folder / "store", copy)
    async with EmbeddedServer(folder, port=port) as server:
        reader = await Bus.connect(server.url, "reader")
        pulled = reader.pull(EVT, 0, filters)
        await publish(reader, "a", 6, 10)
        last = await read_up_to(pulled, 10)
        waiting = asyncio.ensure_future(anext(pulled))
    replace_store(folder, copy)
    async with running(folder) as (client, _):  # where the reader cannot see it
        await publish(client, "b", 6, filled_to)
    async with reader, running(folder, port):
        with pytest.raises(StreamChanged) as caught:
            await waiting
    assert caught.value.why is why
    assert caught.value.read == Mark.at(last, created)
    assert caught.value.read.msg_id == msg_id("a-10", b"a-10")
    assert (caught.value.state.created, caught.value.state.last_seq) == (created, filled_to)


async def test_a_reader_that_has_read_nothing_yet_knows_where_it_began(tmp_path: Path):
    folder, copy = tmp_path / "nats", tmp_path / "copy"
    async with running(folder) as (client, port):
        await client.provision(facts_bytes=FACTS_BYTES)
        await publish(client, "a", 1, 1)
    shutil.copytree(folder / "store", copy)
    async with EmbeddedServer(folder, port=port) as server:
        reader = await Bus.connect(server.url, "reader")
        await publish(reader, "a", 2, 3)
        waiting = asyncio.ensure_future(anext(reader.pull(EVT, 3)))
        for _ in range(20):  # answered one after the other with what the reader asks
            await reader.stream(EVT)
    replace_store(folder, copy)
    async with running(folder) as (client, _):
        await publish(client, "b", 2, 5)
    async with reader, running(folder, port):
        with pytest.raises(StreamChanged) as caught:
            await waiting
    assert caught.value.why is EpochEnd.OTHER_MESSAGE


async def test_a_deleted_store_is_missing_and_then_another_stream(tmp_path: Path):
    folder = tmp_path / "nats"
    async with EmbeddedServer(folder) as server:
        port, reader = server.port, await Bus.connect(server.url, "reader")
        await reader.provision(facts_bytes=FACTS_BYTES)
        pulled = reader.pull(EVT, 0)
        await publish(reader, "a", 1, 3)
        last = await read_up_to(pulled, 3)
        created = (await reader.stream(EVT)).created
        waiting = asyncio.ensure_future(anext(pulled))
    shutil.rmtree(folder / "store")
    async with reader, EmbeddedServer(folder, port=port):
        with pytest.raises(StreamMissing):
            await waiting
        await reader.provision(facts_bytes=FACTS_BYTES)
        assert await end_of(reader, Mark(3, last.msg_id, created)) is EpochEnd.CREATED_ANEW
        assert await end_of(reader, Mark(3, last.msg_id)) is EpochEnd.SHORTER
        await publish(reader, "b", 1, 5)
        assert await end_of(reader, Mark(3, last.msg_id, created)) is EpochEnd.CREATED_ANEW
        assert await end_of(reader, Mark(3, last.msg_id)) is EpochEnd.OTHER_MESSAGE


async def end_of(client: Bus, mark: Mark, stream: str = EVT) -> EpochEnd:
    with pytest.raises(StreamChanged) as caught:
        await anext(client.pull(stream, mark))
    assert caught.value.read == mark
    return caught.value.why


async def test_a_stream_made_anew_on_a_living_server_is_noticed(tmp_path: Path):
    async with bus(tmp_path) as client:
        await publish(client, "a", 1, 3)
        async with aclosing(client.pull(EVT, 0)) as pulled:
            await read_up_to(pulled, 3)
            waiting = asyncio.ensure_future(anext(pulled))
            link = Link(client.url)
            await link.open("vandal")
            await link.api(f"STREAM.DELETE.{EVT}", {})
            await link.close()
            await client.provision(facts_bytes=FACTS_BYTES)
            with pytest.raises((StreamMissing, StreamChanged)):  # as it looks between the two, or after both
                await waiting


async def test_a_message_that_is_gone_without_having_aged_is_noticed(tmp_path: Path):
    async with bus(tmp_path) as client:
        await publish(client, "w", 1, 6, WINDOW)
        mark = Mark(4, msg_id("w-4", b"w-4"), (await client.stream(TEL)).created)
        link = Link(client.url)
        await link.open("vandal")
        await link.api(f"STREAM.MSG.DELETE.{TEL}", {"seq": 4})
        assert await end_of(client, mark, TEL) is EpochEnd.MESSAGE_MISSING
        await link.api(f"STREAM.PURGE.{TEL}", {"seq": 5})  # everything before it, as age does
        await link.close()
        async with aclosing(client.pull(TEL, mark)) as pulled:
            assert [message.seq for message in await anext(pulled)] == [5, 6]
