"""Standing by: when a lease may be taken, what a standby does until then, and what it is told when it cannot begin."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite.bus import Bus, EmbeddedServer
from kite.errors import KiteError
from kite.events import Origin, compose, publish
from kite.ledger import Lease, LedgerMissing, LedgerUnreachable, Reader
from kite.testing.bus import nats
from kite.testing.crash import ended
from kite.testing.eventually import eventually
from kite.testing.postgres import DATABASE
from kite_arbitrator.service import serve
from kite_arbitrator.standby import LEASE_US, Patience
from kite_arbitrator.testing.running import Place, arbitrator, forked, served
from kite_cli.__main__ import main
from kite_schemas.ledger import Created, LeaseTaken
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested, PolicySet

ORIGIN = Origin(source="kite/test/1", producer="test@0")
NOWHERE = "postgresql://kite@127.0.0.1:1/kite"
LOOKS = ("status", "timeline", "replay", "ledger verify")
PROMPT_US = LEASE_US
"""A lease that was given back is taken sooner than one that has to be outwaited; by how much is printed."""

# --- When a lease may be taken


def test_a_holder_that_stands_still_loses_the_lease_after_its_time():
    patience, lease = Patience("b"), Lease(1, "a", 7)
    assert [patience.over(lease, now) for now in (5, 5 + LEASE_US - 1, 5 + LEASE_US)] == [False, False, True]


def test_a_holder_that_moves_keeps_it():
    patience = Patience("b")
    assert not any(patience.over(Lease(1, "a", count), count * (LEASE_US - 1)) for count in range(10))


def test_one_that_another_took_meanwhile_is_waited_for_anew():
    patience = Patience("c")
    assert not patience.over(Lease(1, "a", 7), 0)
    assert not patience.over(Lease(2, "b", 7), LEASE_US)
    assert patience.over(Lease(2, "b", 7), 2 * LEASE_US)


def test_one_that_was_given_back_is_free_at_once():
    patience = Patience("b")
    assert not patience.over(Lease(1, "a", 7), 0)
    assert patience.over(Lease(1, "", 8), 1)


def test_ones_own_is_free_at_once():
    assert Patience("b").over(Lease(3, "b", 7), 0)


def test_one_that_could_not_be_read_in_between_is_waited_for_anew():
    patience, lease = Patience("b"), Lease(1, "a", 7)
    seen = [(lease, 0), (None, LEASE_US), (lease, LEASE_US + 1), (lease, 2 * LEASE_US), (lease, 2 * LEASE_US + 1)]
    assert [patience.over(found, now) for found, now in seen] == [False, False, False, False, True]


# --- On real parts


@pytest.fixture
def url(empty_database: str) -> str:
    return empty_database


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    async with nats(tmp_path) as server:
        yield server


@pytest.fixture
def place(server: EmbeddedServer, url: str) -> Place:
    return Place(server, url)


async def answered(place: Place, bus: Bus) -> None:
    """Ask for something that is refused, and wait for the answer."""
    before = len(place.found(ChangeRejected))
    request = ChangeRequested(actor="asker", changes=(Change(key="a.b", value=1),))
    await publish(bus, compose("policy/fleet", request, ORIGIN))
    await eventually(lambda: len(place.found(ChangeRejected)) > before)


async def test_two_that_start_at_once_make_one_ledger_and_one_of_them_leads(place: Place):
    with capture_logs() as logs:
        async with served(place) as first, served(place) as second:
            await eventually(lambda: {"leading", "standing_by"} <= {line["event"] for line in logs})
            async with await Bus.connect(place.server.url, "test") as bus:
                await answered(place, bus)
            assert not first.done()
            assert not second.done()
    assert (len(place.found(Created)), len(place.found(PolicySet))) == (1, 1)
    with Reader.open(place.url) as reader:
        assert reader.row(1) is not None
        assert reader.lease.holder == "", "whoever ends in order gives the lease back"


async def test_a_second_one_follows_without_a_word_and_leads_as_soon_as_the_first_leaves(place: Place):
    with capture_logs() as logs:
        async with AsyncExitStack() as second:
            async with arbitrator(place) as bus:
                await second.enter_async_context(served(place))
                await eventually(lambda: "standing_by" in {line["event"] for line in logs})
                await answered(place, bus)
                (led,) = place.found(LeaseTaken)
            await eventually(lambda: len(place.found(LeaseTaken)) > 1)
            async with await Bus.connect(place.server.url, "test") as bus:
                await answered(place, bus)
    assert [lease.epoch for lease in place.found(LeaseTaken)] == [1, 2]
    assert place.found(LeaseTaken)[1].holder != led.holder
    with Reader.open(place.url) as reader:
        rows = list(reader.rows())
        (turn,) = [at for at, row in enumerate(rows) if at and row.epoch != rows[at - 1].epoch]
        gap_us = rows[turn].ledger_us - rows[turn - 1].ledger_us
    print(f"handed over in {gap_us / 1e6:.3f} s")
    assert rows[turn].type == LeaseTaken.TYPE
    assert gap_us < PROMPT_US


# --- What cannot begin


async def test_a_database_that_is_away_at_the_start_ends_it_with_one_error(server: EmbeddedServer, tmp_path: Path):
    log = tmp_path / "log"
    async with forked(Place(server, NOWHERE), log) as process:
        assert await ended(process) == 1
    (line,) = [line for line in log.read_text().splitlines() if "level=error" in line]
    assert "code=ledger_unreachable" in line
    assert "check that PostgreSQL runs there" in line


@pytest.mark.parametrize(
    ("right", "wrong", "error", "told"),
    [
        ("kite@", "stranger@", LedgerUnreachable, 'role "stranger" does not exist'),
        (f"/{DATABASE}", "/nothing", LedgerMissing, "no ledger at postgresql://.*/nothing"),
    ],
    ids=["user", "database"],
)
async def test_what_does_not_let_it_in_is_named(
    place: Place, right: str, wrong: str, error: type[KiteError], told: str
):
    place.url = place.url.replace(right, wrong)
    with pytest.RaisesGroup(pytest.RaisesExc(error, match=told), allow_unwrapped=True):
        await serve(place.settings)


async def test_the_command_line_reads_the_ledger_of_a_fleet_with_replicas(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("KITE_DIR", raising=False)
    monkeypatch.setenv("KITE_NATS_URL", place.server.url)
    monkeypatch.setenv("KITE_LEDGER_URL", place.url)
    async with arbitrator(place) as bus:
        await answered(place, bus)
        codes = [await asyncio.to_thread(main, line.split()) for line in LOOKS]
    assert codes == [0] * len(LOOKS), capsys.readouterr().err
    assert capsys.readouterr().out
