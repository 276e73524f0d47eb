"""Faults of the journal: one clear error, nothing begun without `begun` on disk, and the next run goes on."""

import asyncio
import resource
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite.bus import Bus, EmbeddedServer
from kite.orders import Journal, JournalHeld, JournalUnwritable, State
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.disk import read_only
from kite.testing.eventually import eventually
from kite.testing.orders import effects, facts, give, journal_of, left, pause, stop_order, work
from kite_schemas.yoco import InstanceChanged

END_S = 10.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    async with nats(tmp_path) as running:
        yield running


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncGenerator[Bus]:
    async with await Bus.connect(server.url, "test") as connected:
        await connected.provision(facts_bytes=FACTS_BYTES)
        yield connected


@contextmanager
def full(path: Path) -> Generator[None]:
    """Let no file of this process grow beyond the journal's log as it is: what is appended to it finds no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name(f"{path.name}-wal").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def end_of(worker: "asyncio.Task[None]") -> None:
    """Wait for the end of a worker, and raise what ended it."""
    async with asyncio.timeout(END_S):
        await worker


async def finished(server: EmbeddedServer, client: Bus, folder: Path) -> InstanceChanged:
    """Let the next run do what is left, and return the only fact there is."""
    worker = asyncio.create_task(work(server.url, folder, ack_wait_s=1.0))

    async def over() -> bool:
        return bool(await facts(client)) and await left(server.monitor_url, "yoco", "n1") == 0

    await eventually(over)
    worker.cancel()
    await asyncio.wait([worker])
    (said,) = await facts(client)
    assert isinstance(said.event.data, InstanceChanged)
    return said.event.data


async def test_without_room_for_begun_nothing_is_begun_and_the_worker_ends(
    server: EmbeddedServer, client: Bus, tmp_path: Path
) -> None:
    worker = asyncio.create_task(work(server.url, tmp_path, ack_wait_s=1.0))
    await eventually(lambda: journal_of(tmp_path).with_name("orders.sqlite-wal").exists())
    with capture_logs(), full(journal_of(tmp_path)):
        order = await give(client, "yoco", stop_order("a"), "instance/a")
        with pytest.raises(JournalUnwritable, match=r"orders\.sqlite cannot be written: .*") as caught:
            await end_of(worker)
    assert "room" in caught.value.hint
    assert (effects(tmp_path), await facts(client)) == ([], [])
    with Journal.open(journal_of(tmp_path)) as journal:
        assert journal.find(order.header.id) is None
    assert (await finished(server, client, tmp_path)).attempt == 1


async def test_without_room_for_done_the_effect_is_found_by_the_next_run(
    server: EmbeddedServer, client: Bus, tmp_path: Path
) -> None:
    pause(tmp_path).touch()
    worker = asyncio.create_task(work(server.url, tmp_path, ack_wait_s=1.0))
    order = await give(client, "yoco", stop_order("a"), "instance/a")
    await eventually(lambda: effects(tmp_path))
    with capture_logs(), full(journal_of(tmp_path)):
        pause(tmp_path).unlink()
        with pytest.raises(JournalUnwritable):
            await end_of(worker)
    assert await facts(client) == [], "what is not on disk is not told"
    with Journal.open(journal_of(tmp_path)) as journal:
        (entry,) = journal.unfinished()
    assert (entry.id, entry.state) == (order.header.id, State.BEGUN)
    said = await finished(server, client, tmp_path)
    assert (said.code, said.attempt) == ("found", 2)
    assert len(effects(tmp_path)) == 1


@pytest.mark.parametrize("there", [False, True])
async def test_a_read_only_state_folder_ends_the_worker_before_it_takes_an_order(
    server: EmbeddedServer, client: Bus, tmp_path: Path, there: bool
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    if there:
        Journal.open(journal_of(folder)).close()
    await give(client, "yoco", stop_order("a"), "instance/a")
    with read_only(folder), pytest.raises(JournalUnwritable, match="cannot be written"):
        await end_of(asyncio.create_task(work(server.url, folder)))
    assert (effects(folder), await facts(client)) == ([], [])
    assert (await finished(server, client, folder)).attempt == 1


async def test_a_journal_in_use_ends_the_second_worker_before_it_takes_an_order(
    server: EmbeddedServer, client: Bus, tmp_path: Path
) -> None:
    await give(client, "yoco", stop_order("a"), "instance/a")
    with Journal.open(journal_of(tmp_path)), pytest.raises(JournalHeld):
        await end_of(asyncio.create_task(work(server.url, tmp_path)))
    assert (effects(tmp_path), await facts(client)) == ([], [])
    assert (await finished(server, client, tmp_path)).attempt == 1
