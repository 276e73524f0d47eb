"""The arbitrator when its ledger's disk fails it: one clear error, nothing half-written, nothing repaired in silence.

What a fault between processes does: tests/simulation/test_faults.py.
"""

import resource
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest

from kite.bus import Bus, EmbeddedServer
from kite.clock import US_PER_S, mono_us
from kite.events import Composed, Origin, compose, publish
from kite.ledger import ChainBroken, LedgerUnwritable, Reader, sqlite
from kite.ledger.address import sqlite_path
from kite.testing.bus import nats
from kite.testing.crash import ended
from kite.testing.disk import read_only
from kite.testing.eventually import eventually
from kite.testing.ledger import forge
from kite_arbitrator.follower import RowUnreadable
from kite_arbitrator.testing.running import Place, arbitrator, forked, served
from kite_incident.replay import verify
from kite_schemas.ledger import BusEpochChanged, LeaseTaken
from kite_schemas.yoco import OrderRequested

ORIGIN = Origin(source="kite/test/1", producer="test@0")
SHORT_S = 0.3
TICK_US = US_PER_S
"""In so long the arbitrator writes at least once."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    async with nats(tmp_path) as running:
        yield running


@pytest.fixture
def place(server: EmbeddedServer, tmp_path: Path) -> Place:
    (tmp_path / "data").mkdir()
    return Place.beside(server, tmp_path / "data")


def asked(actor: str) -> Composed:
    return compose("base/tiny", OrderRequested(actor=actor, base="tiny"), ORIGIN)


def actors(place: Place) -> list[str]:
    return [data.actor for data in place.found(OrderRequested)]


async def told(place: Place, name: str) -> None:
    """Publish a request, and wait until it is a row."""
    async with await Bus.connect(place.server.url, "test") as bus:
        await publish(bus, asked(name))
    await eventually(lambda: name in actors(place))


def whole(place: Place) -> int:
    """Check chain and replay, and return the last position."""
    with Reader.open(place.url) as reader:
        assert verify(reader).identical
        return reader.head.pos


def errors(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, or the one there is."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [one for part in cast("BaseExceptionGroup[BaseException]", error).exceptions for one in errors(part)]


async def end_of(place: Place) -> BaseException:
    """Run an arbitrator until it fails, and return why."""
    async with served(place) as task:
        await eventually(task.done)
        (error,) = errors(task.exception() or AssertionError("it ended well"))
        return error


async def test_without_room_the_arbitrator_ends_and_with_room_it_goes_on(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with forked(place, log) as child:
        await eventually(lambda: place.found(LeaseTaken))
        await told(place, "before")
        wal = sqlite_path(place.url).with_name("ledger.db-wal").stat().st_size
        assert child.pid
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (wal, resource.RLIM_INFINITY))
        async with await Bus.connect(place.server.url, "test") as bus:
            await publish(bus, asked("without room"))
        assert await ended(child) == 1
    (line,) = [line for line in log.read_text().splitlines() if "service_failed" in line]
    assert "code=ledger_unwritable" in line
    assert "have room" in line
    assert "without room" not in actors(place)
    before = whole(place)
    async with forked(place, log):
        await eventually(lambda: "without room" in actors(place))
    assert actors(place) == ["before", "without room"], "the bus kept it"
    assert whole(place) > before


@pytest.mark.parametrize("there", [False, True])
async def test_a_read_only_folder_is_one_clear_error_before_anything_is_read(place: Place, there: bool) -> None:
    if there:
        async with arbitrator(place):
            await told(place, "before")
    folder = sqlite_path(place.url).parent
    files = sorted(folder.iterdir())
    with read_only(folder):
        error = await end_of(place)
    assert isinstance(error, LedgerUnwritable)
    assert sorted(folder.iterdir()) == files
    async with arbitrator(place):
        await told(place, "after")
    assert actors(place) == (["before", "after"] if there else ["after"])


async def test_a_lock_that_is_held_for_longer_than_anyone_waits_is_one_clear_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", SHORT_S)  # 5 s
    other = None
    async with served(place) as task:
        await eventually(lambda: place.found(LeaseTaken))
        await told(place, "before")
        other = sqlite.connect(sqlite_path(place.url))
        other.execute("BEGIN IMMEDIATE")
        await eventually(task.done)
        (error,) = errors(task.exception() or AssertionError("it ended well"))
    assert isinstance(error, LedgerUnwritable)
    assert "database is locked" in str(error)
    other.close()
    whole(place)
    async with arbitrator(place):
        await told(place, "after")


async def test_a_lock_that_is_let_go_in_time_is_waited_for(place: Place) -> None:
    async with served(place) as task:
        await eventually(lambda: place.found(LeaseTaken))
        await told(place, "before")
        other = sqlite.connect(sqlite_path(place.url))
        other.execute("BEGIN IMMEDIATE")
        until_us = mono_us() + TICK_US + TICK_US // 10
        async with await Bus.connect(place.server.url, "test") as bus:
            await publish(bus, asked("meanwhile"))
        await eventually(lambda: mono_us() > until_us)
        assert "meanwhile" not in actors(place), "it waits"
        other.execute("ROLLBACK")
        other.close()
        await eventually(lambda: "meanwhile" in actors(place))
        assert not task.done()
    assert len(place.found(LeaseTaken)) == 1
    whole(place)


async def test_a_flipped_byte_stays_as_it_is_over_restarts(place: Place) -> None:
    async with arbitrator(place):
        await told(place, "before")
    with Reader.open(place.url) as reader:
        (row,) = reader.find(types=[OrderRequested.TYPE])
    forged = row.raw.replace(b"before", b"beforf")
    forge(place.url, row.pos, forged, rehashed=False)
    async with arbitrator(place):
        await told(place, "after")
    with Reader.open(place.url) as reader:
        found = reader.row(row.pos)
        assert found is not None
        assert (found.raw, found.hash) == (forged, row.hash), "neither the byte nor its hash"
        with pytest.raises(ChainBroken) as caught:
            verify(reader)
        assert caught.value.pos == row.pos
        reader.verify_chain(row.pos + 1)  # what came behind it is as it was appended


async def test_a_row_that_can_no_longer_be_read_is_not_passed_over(place: Place) -> None:
    async with arbitrator(place):
        await told(place, "before")
    with Reader.open(place.url) as reader:
        (row,) = reader.find(types=[OrderRequested.TYPE])
        head = reader.head
    forge(place.url, row.pos, row.raw[:-1], rehashed=False)
    error = await end_of(place)
    assert isinstance(error, RowUnreadable)
    assert error.pos == row.pos
    with Reader.open(place.url) as reader:
        assert reader.head.pos == head.pos


async def test_a_bus_that_is_gone_before_anything_of_it_was_read_is_noticed(
    server: EmbeddedServer, place: Place
) -> None:
    async with arbitrator(place):
        assert actors(place) == []
    async with await Bus.connect(server.url, "test") as bus:
        await publish(bus, asked("gone with it"))
    port = server.port
    await server.stop()
    (server.directory / "store").rename(server.directory / "gone")
    async with EmbeddedServer(server.directory, port=port) as another:
        place.server = another
        async with arbitrator(place):
            (changed,) = await eventually(lambda: place.found(BusEpochChanged))
            assert changed.seq == 0
            assert actors(place) == []
