"""Replicas: a leader that is killed, stopped, cut off or robbed of its database, and what its standby makes of it.

Every story ends with the same judgement (`judged`): whoever led when, there is one ledger, and nothing in it is missing
or there twice.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from pathlib import Path

import psycopg
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from kite.bus import DEC, Bus, EmbeddedServer
from kite.clock import US_PER_S, mono_us
from kite.events import Composed, Origin, compose, publish
from kite.ledger import Lease, Reader, Row
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.testing.postgres import DATABASE, Postgres
from kite.testing.proxy import Proxy
from kite_arbitrator.standby import LEASE_US
from kite_arbitrator.testing.running import Place, forked, served
from kite_incident.replay import is_decision, verify
from kite_schemas.envelope import decode
from kite_schemas.ledger import Created, LeaseTaken
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested

ORIGIN = Origin(source="kite/test/1", producer="test@0")
PACE_S = 0.01  # between two requests
SOME = 20  # requests: enough that leader and relay are in the middle of something
LED_S = 30.0
"""How long to wait for a take-over; how long it took is asserted where it matters."""

TAKEOVER_US = 3_000_000
"""From the lease's expiry to the first decision. The aim is 1 s, which is printed; a busy machine may be slower."""

SHORT_US = 1_200_000  # well below LEASE_US
QUIET_US = 2_500_000  # longer than a leader without a bus needs to try again


class Stream:
    """Requests that go out one after the other, each of which has exactly one answer: it is refused."""

    def __init__(self, bus: Bus) -> None:
        self.sent: list[Composed] = []
        self.ending = False
        self._bus = bus

    async def run(self) -> None:
        while not self.ending:
            number = len(self.sent)
            request = ChangeRequested(actor=f"asker {number}", changes=(Change(key="a.b", value=number),))
            event = compose("policy/fleet", request, ORIGIN)
            await publish(self._bus, event)
            self.sent.append(event)
            await asyncio.sleep(PACE_S)

    async def goes_on(self, count: int = SOME) -> None:
        """Wait until so many more were taken by the bus."""
        wanted = len(self.sent) + count
        await eventually(lambda: len(self.sent) >= wanted, LED_S)


@asynccontextmanager
async def asking(bus: Bus) -> AsyncGenerator[Stream]:
    """Ask until the block ends; then `sent` is all that was asked."""
    stream = Stream(bus)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run())
        try:
            yield stream
        finally:
            stream.ending = True


@pytest.fixture
def url(empty_database: str) -> str:
    return empty_database


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    async with nats(tmp_path) as server:
        yield server


@pytest.fixture
async def bus(server: EmbeddedServer) -> AsyncGenerator[Bus]:
    """A connection that no partition reaches."""
    async with await Bus.connect(server.url, "test") as bus:
        await bus.provision()
        yield bus


@pytest.fixture
def place(server: EmbeddedServer, url: str) -> Place:
    return Place(server, url)


def behind(place: Place, *, ledger: Proxy | None = None, bus: Proxy | None = None) -> Place:
    """Return the place as it is seen from behind a network that can be cut."""
    url = f"postgresql://kite@127.0.0.1:{ledger.port}/{DATABASE}" if ledger else place.url
    return Place(place.server, url, {"nats_url": f"nats://127.0.0.1:{bus.port}"} if bus else {})


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def lease(place: Place) -> Lease:
    with Reader.open(place.url) as reader:
        return reader.lease


async def leads(place: Place, epoch: int) -> None:
    """Wait for the beginning of a term."""
    await eventually(lambda: epoch in [taken.epoch for taken in place.found(LeaseTaken)], LED_S)


async def past(us: int) -> None:
    """Let the story stand still."""
    until_us = mono_us() + us
    await eventually(lambda: mono_us() >= until_us, LED_S)


def happened(logs: list[EventDict], event: str, count: int = 1) -> Callable[[], bool]:
    """Tell, when asked, whether something was logged so often."""
    return lambda: [line["event"] for line in logs].count(event) >= count


async def judged(place: Place, bus: Bus, stream: Stream) -> list[Row]:
    """Wait until everything asked is answered; return the ledger, whose positions, chain and decisions are in order."""
    wanted = [event.header.id for event in stream.sent]
    await eventually(lambda: len(place.found(ChangeRejected)) >= len(wanted), LED_S)
    with Reader.open(place.url) as reader:
        rows = list(reader.rows())
        reader.verify_chain(last=rows[-1].pos)
        assert verify(reader).identical
    assert [row.pos for row in rows] == list(range(1, len(rows) + 1))
    assert [row.epoch for row in rows] == sorted(row.epoch for row in rows), "who lost the lease wrote nothing more"
    assert [row.event_id for row in rows if row.type == ChangeRequested.TYPE][1:] == wanted
    assert answers(rows) == wanted
    assert len([row for row in rows if row.type == Created.TYPE]) == 1
    decided = {row.event_id for row in rows if is_decision(row.type)}
    await eventually(lambda: published(bus, decided), LED_S)
    return rows


def answers(rows: list[Row]) -> list[str]:
    """Return the requests that were answered, in the order of the answers."""
    datas = [decode(row.raw).data for row in rows if row.type == ChangeRejected.TYPE]
    return [data.request for data in datas if isinstance(data, ChangeRejected)]


async def published(bus: Bus, wanted: set[str]) -> bool:
    """Tell whether each of these events was published at least once."""
    last = (await bus.stream(DEC)).last_seq
    found: set[str] = set()
    async with aclosing(bus.pull(DEC, 0)) as pulled:
        async for messages in pulled:
            found |= {decode(message.payload).header.id for message in messages}
            if messages[-1].seq >= last:
                break
    return found >= wanted


def turns(rows: list[Row]) -> list[int]:
    """Return where in the rows another term begins, but for the first."""
    return [at for at, row in enumerate(rows) if at and row.epoch != rows[at - 1].epoch]


# --- Killed


async def test_a_leader_that_is_killed_is_followed_within_a_second_of_its_lease(place: Place, bus: Bus, tmp_path: Path):
    async with forked(place, tmp_path / "log") as first, AsyncExitStack() as second:
        await leads(place, 1)
        with capture_logs() as logs:
            await second.enter_async_context(served(place))
            await eventually(happened(logs, "standing_by"))
        async with asking(bus) as stream:
            await stream.goes_on()
            assert first.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            await leads(place, 2)
            await stream.goes_on()
        rows = await judged(place, bus, stream)
    (turn,) = turns(rows)
    before_us = rows[turn - 1].ledger_us
    decided_us = next(row.ledger_us for row in rows[turn:] if is_decision(row.type))
    after_us = decided_us - before_us - LEASE_US
    print(
        f"lease taken {(rows[turn].ledger_us - before_us) / US_PER_S:.3f} s after the last row of the leader that was "
        f"killed; decided {after_us / US_PER_S:.3f} s after the lease's time; {len(stream.sent)} requests"
    )
    assert rows[turn].ledger_us - before_us >= LEASE_US
    assert after_us < TAKEOVER_US


# --- Stopped


@asynccontextmanager
async def in_the_middle_of_an_append(postgres: Postgres) -> AsyncGenerator[None]:
    """Hold the leader in a transaction, with rows in it and the lease's row locked, until the block ends."""
    waits = """SELECT 1 FROM pg_stat_activity WHERE datname = current_database()
               AND application_name LIKE 'kite-ledger-%' AND wait_event_type = 'Lock'"""
    url = postgres.url(DATABASE)
    with psycopg.connect(url) as ours, psycopg.connect(url, autocommit=True) as looking:
        ours.execute("LOCK TABLE cursors IN EXCLUSIVE MODE")
        await eventually(lambda: looking.execute(waits).fetchone())
        yield
        ours.rollback()


def anywhere(_: Postgres) -> AbstractAsyncContextManager[None]:
    return nullcontext()


Moment = Callable[[Postgres], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize("moment", [anywhere, in_the_middle_of_an_append], ids=["anywhere", "in an append"])
async def test_a_leader_that_is_stopped_and_wakes_up_writes_nothing_and_stands_by(
    postgres: Postgres, place: Place, bus: Bus, tmp_path: Path, moment: Moment
):
    log = tmp_path / "log"
    async with forked(place, log) as first, AsyncExitStack() as second:
        await leads(place, 1)
        with capture_logs() as logs:
            await second.enter_async_context(served(place))
            await eventually(happened(logs, "standing_by"))
        async with asking(bus) as stream:
            await stream.goes_on()
            assert first.pid is not None
            async with moment(postgres):
                os.kill(first.pid, signal.SIGSTOP)
            await leads(place, 2)
            await stream.goes_on()
            os.kill(first.pid, signal.SIGCONT)
            await eventually(lambda: "term_ended" in log.read_text())
            await eventually(lambda: "standing_by" in log.read_text())
            assert lease(place).epoch == 2
            await second.aclose()
            await leads(place, 3)
            await stream.goes_on()
        rows = await judged(place, bus, stream)
    holders = [taken.holder for taken in place.found(LeaseTaken)]
    assert holders[0] == holders[2] != holders[1]
    assert len(turns(rows)) == 2


# --- Cut off from the ledger


@asynccontextmanager
async def a_pair(first: Place, second: Place) -> AsyncGenerator[list[EventDict]]:
    """Run two arbitrators, the first of which leads; yields what they log."""
    with capture_logs() as logs:
        async with served(first):
            await eventually(happened(logs, "leading"))
            async with served(second):
                await eventually(happened(logs, "standing_by"))
                yield logs


async def test_a_leader_cut_off_from_the_ledger_for_a_moment_goes_on(place: Place, bus: Bus):
    async with Proxy(port_of(place.url)) as network, a_pair(behind(place, ledger=network), place):
        async with asking(bus) as stream:
            await stream.goes_on()
            network.cut()
            try:
                await past(SHORT_US)
            finally:
                network.mend()
            await stream.goes_on()
        rows = await judged(place, bus, stream)
        assert lease(place).epoch == 1
        assert turns(rows) == []


async def test_a_leader_cut_off_from_the_ledger_for_too_long_is_replaced_and_finds_out(place: Place, bus: Bus):
    async with Proxy(port_of(place.url)) as network, a_pair(behind(place, ledger=network), place) as logs:
        async with asking(bus) as stream:
            await stream.goes_on()
            network.cut()
            try:
                await leads(place, 2)
                await stream.goes_on()
            finally:
                network.mend()
            await eventually(happened(logs, "term_ended"))
            await eventually(happened(logs, "standing_by", 2))
            await stream.goes_on()
        rows = await judged(place, bus, stream)
        assert lease(place).epoch == 2
        assert len(turns(rows)) == 1


# --- Cut off from the bus


async def test_a_leader_without_a_bus_leaves_to_one_that_has_it_and_nobody_leads_without(place: Place, bus: Bus):
    port = place.server.port
    async with (
        Proxy(port) as ours,
        Proxy(port) as theirs,
        a_pair(behind(place, bus=ours), behind(place, bus=theirs)) as logs,
    ):
        async with asking(bus) as stream:
            await stream.goes_on()
            ours.cut()
            await leads(place, 2)
            assert happened(logs, "term_ended")()
            await stream.goes_on()
            theirs.cut()
            await eventually(lambda: not lease(place).holder, LED_S)
            left = lease(place)
            await past(QUIET_US)
            assert lease(place) == left, "without a bus nobody takes it"
            ours.mend()
            await leads(place, 3)
            await stream.goes_on()
        rows = await judged(place, bus, stream)
        theirs.mend()
    holders = [taken.holder for taken in place.found(LeaseTaken)]
    assert holders[0] == holders[2] != holders[1]
    assert len(turns(rows)) == 2


# --- A database that goes away


async def test_a_restart_of_the_database_costs_no_decision(mortal: Postgres, server: EmbeddedServer, bus: Bus):
    place = Place(server, mortal.clear(DATABASE))
    async with a_pair(place, place):
        async with asking(bus) as stream:
            await stream.goes_on()
            mortal.restart(immediate=True)  # on this thread: the server would end with another one
            await leads(place, 2)
            await stream.goes_on()
        rows = await judged(place, bus, stream)
    (turn,) = turns(rows)
    print(f"led again after {(rows[turn].ledger_us - rows[turn - 1].ledger_us) / US_PER_S:.3f} s")


async def test_a_leader_whose_database_is_away_still_ends_when_it_is_told_to(mortal: Postgres, server: EmbeddedServer):
    place = Place(server, mortal.clear(DATABASE))
    async with served(place) as task:
        await leads(place, 1)
        mortal.halt()
        try:
            task.cancel()
            await eventually(task.done)
            assert task.cancelled()
        finally:
            mortal.resume()


# --- The network itself


async def test_a_network_that_was_cut_leaves_nothing(server: EmbeddedServer):
    before = asyncio.all_tasks()
    async with Proxy(server.port) as network:
        near, writer = await asyncio.open_connection("127.0.0.1", network.port)
        greeting = await near.readline()
        network.cut()
        late, later = await asyncio.open_connection("127.0.0.1", network.port)
        await eventually(lambda: len(asyncio.all_tasks()) > len(before) + 1)
    assert greeting.startswith(b"INFO")
    for reader, end in ((near, writer), (late, later)):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        end.close()
    await eventually(lambda: asyncio.all_tasks() <= before)
