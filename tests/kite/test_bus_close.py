"""Closing ends, whatever the server does at that moment, and leaves nothing running; reconnecting never ends."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite.bus import EVT, Bus, BusClosed, EmbeddedServer, Outgoing, evt_subject, link
from kite.bus.link import Link
from kite.clock import US_PER_S, mono_us
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.eventually import eventually

SUBJECT = evt_subject("kite.yoco.instance_ready.v1", "instance/i-1")
LINKS = 40
SLAMS = 5
TRIES = 100  # nats-py gives up after 60 by default
STEP_S = 0.001


class Door:
    """Passes connections on to a server, until it is slammed: then all that are open break, and new ones pass."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def standing(self) -> AsyncGenerator[str]:
        """Stand open and give the address to connect to."""
        async with await asyncio.start_server(self._pass, "127.0.0.1", 0) as server:
            yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        ends = (writer, forth)
        self._open += ends
        await asyncio.gather(_copy(reader, forth), _copy(back, writer))
        self._open = [end for end in self._open if end not in ends]

    def slam(self) -> None:
        for end in self._open:
            end.transport.abort()

    @property
    def is_empty(self) -> bool:
        return not self._open


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
    sink.close()


async def test_closing_while_the_connection_comes_back_leaves_nothing_running(tmp_path: Path):
    async with nats(tmp_path) as server:
        door = Door(server.port)
        before = asyncio.all_tasks()
        async with door.standing() as url:
            for _ in range(SLAMS):
                links = [Link(url) for _ in range(LINKS)]
                await asyncio.gather(*(opened.open("brief") for opened in links))
                door.slam()
                await asyncio.gather(*(close_at(opened, n) for n, opened in enumerate(links)))
                await eventually(lambda: door.is_empty)
        await eventually(lambda: asyncio.all_tasks() == before)


async def close_at(opened: Link, step: int) -> None:
    await asyncio.sleep(link.RECONNECT_WAIT_S + step * STEP_S)  # nothing is waited for: each moment is one to try
    async with asyncio.timeout(2 * link.CLOSE_S):
        await opened.close()
    with pytest.raises(BusClosed):
        await opened.ready()


async def test_closing_does_not_wait_for_a_server_that_takes_nothing_more(tmp_path: Path):
    async with nats(tmp_path) as server:
        before = asyncio.all_tasks()
        client = await Bus.connect(server.url, "test")
        await client.provision(facts_bytes=FACTS_BYTES)
        os.kill(server.pid, signal.SIGSTOP)
        much = [Outgoing(SUBJECT, bytes(500_000), f"id-{n}") for n in range(40)]  # more than a socket takes
        sending = asyncio.create_task(client.publish_many(much))
        waiting = asyncio.create_task(anext(client.pull(EVT, 0)))
        await asyncio.wait({sending, waiting}, timeout=0.2)
        begun_us = mono_us()
        await client.close()
        assert mono_us() - begun_us < 2 * link.CLOSE_S * US_PER_S
        for task in (sending, waiting):
            with pytest.raises(BusClosed):
                await task
        await eventually(lambda: asyncio.all_tasks() == before)
        os.kill(server.pid, signal.SIGCONT)


async def test_closing_just_after_the_server_died_ends_readers_and_publishers(tmp_path: Path):
    async with nats(tmp_path) as server:
        client = await Bus.connect(server.url, "test")
        await client.provision(facts_bytes=FACTS_BYTES)
        sending = asyncio.create_task(client.publish(SUBJECT, b"x", "id"))
        reading = asyncio.create_task(anext(client.pull(EVT, 7)))
        os.kill(server.pid, signal.SIGKILL)
        await client.close()
        await asyncio.wait({sending, reading})
        assert isinstance(reading.exception(), BusClosed)
        assert sending.exception() is None or isinstance(sending.exception(), BusClosed)
        await server.wait()
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_it_reconnects_however_often_nobody_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link, "RECONNECT_WAIT_S", 0.002)
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision(facts_bytes=FACTS_BYTES)
        async with aclosing(client.pull(EVT, 0)) as pulled:
            waiting = asyncio.ensure_future(anext(pulled))
            await server.stop()
            with capture_logs() as logs:
                await eventually(lambda: sum(entry["event"] == "bus_error" for entry in logs) > TRIES)
            async with EmbeddedServer(server.directory, port=server.port):
                await client.publish(SUBJECT, b"x", "id")
                assert [message.payload for message in await waiting] == [b"x"]
                assert client.sessions == 2
