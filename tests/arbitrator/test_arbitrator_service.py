"""The arbitrator as a process among real parts: a NATS server, a SQLite ledger, events that are wrong in every way."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from kite.bus import DEC, Bus, EmbeddedServer, evt_subject
from kite.events import Origin, compose, new_id, publish
from kite.ledger import LedgerHeld, LedgerMissing, NotALedger, Reader
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite_arbitrator.service import BusReplaced, serve
from kite_arbitrator.settings import Settings
from kite_incident.replay import verify
from kite_schemas.envelope import decode, encode
from kite_schemas.ledger import Refusal, Rejected, Tick
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested, PolicySet
from kite_schemas.yoco import OrderRequested

ORIGIN = Origin(source="kite/test/1", producer="test@0")


@dataclass
class Place:
    """Where one test's arbitrator lives."""

    server: EmbeddedServer
    folder: Path

    @property
    def settings(self) -> Settings:
        return Settings(nats_url=self.server.url, ledger_url=f"sqlite:///{self.folder / 'ledger.db'}")

    def found(self, kind: type[Data]) -> list[Data]:
        """Return the payloads of one type in the ledger; none while it is being made."""
        try:
            with Reader.open(self.settings.ledger_url) as reader:
                datas = [decode(row.raw).data for row in reader.find(types=[kind.TYPE])]
        except (LedgerMissing, NotALedger):
            return []
        return [data for data in datas if data is not None]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    async with nats(tmp_path) as server:
        yield Place(server, tmp_path)


@asynccontextmanager
async def arbitrator(place: Place) -> AsyncGenerator[Bus]:
    """Run an arbitrator until the block ends; yields a connection to its bus once it leads."""
    task = asyncio.create_task(serve(place.settings))
    try:
        await eventually(lambda: task.done() or bool(place.found(PolicySet)))
        if task.done():
            await task
        async with await Bus.connect(place.server.url, "test") as bus:
            yield bus
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await task


async def test_a_new_ledger_begins_with_its_birth_a_lease_and_the_shipped_policy(place: Place):
    async with arbitrator(place):
        pass
    with Reader.open(place.settings.ledger_url) as reader:
        kinds = [row.type.removeprefix("kite.") for row in reader.rows(1, 4)]
        assert kinds == ["ledger.created.v1", "ledger.lease_taken.v1", "policy.change_requested.v1", "policy.set.v1"]
        assert verify(reader, 1, 4).identical


async def test_a_request_becomes_a_row_followed_by_its_decision_which_is_published(place: Place):
    async with arbitrator(place) as bus:
        before = (await bus.stream(DEC)).last_seq
        request = ChangeRequested(actor="me", changes=(Change(key="nonsense", value=1),))
        event = compose("policy/fleet", request, ORIGIN)
        await publish(bus, event)
        await eventually(lambda: place.found(ChangeRejected))
        async with aclosing(bus.follow(DEC, after_seq=before)) as published:
            decision = decode((await anext(published)).payload)
        assert isinstance(decision.data, ChangeRejected)
        assert decision.header.causationid == event.header.id
    with Reader.open(place.settings.ledger_url) as reader:
        row = reader.by_event_id(event.header.id)
        assert row is not None
        assert row.raw == event.raw
        assert reader.by_event_id(decision.header.id) == reader.row(row.pos + 1)


def wrong_subject() -> tuple[str, bytes]:
    event = compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN)
    return evt_subject(event.header.type, "base/other"), event.raw


def not_for_producers() -> tuple[str, bytes]:
    event = compose("ledger/fleet", Tick(), ORIGIN)
    return evt_subject(event.header.type, "ledger/fleet"), event.raw


SUBJECT = evt_subject(OrderRequested.TYPE, "base/tiny")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: (SUBJECT, b"\x00garbage"), Refusal.MALFORMED),
        (lambda: (SUBJECT, b"{}"), Refusal.MALFORMED),
        (lambda: (SUBJECT, b"x" * 1_000_100), Refusal.TOO_LARGE),
        (wrong_subject, Refusal.SUBJECT_MISMATCH),
        (not_for_producers, Refusal.NOT_FOR_PRODUCERS),
    ],
    ids=["garbage", "empty object", "too large", "wrong subject", "not for producers"],
)
async def test_what_is_no_event_is_recorded_with_the_reason_and_blocks_nothing(
    place: Place, make: Callable[[], tuple[str, bytes]], code: Refusal
):
    subject, payload = make()
    async with arbitrator(place) as bus:
        await bus.publish(subject, payload, new_id())
        await publish(bus, compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN))
        await eventually(lambda: place.found(OrderRequested))
        (rejected,) = place.found(Rejected)
        assert isinstance(rejected, Rejected)
        assert rejected.code is code
        assert rejected.message


async def test_the_same_event_twice_is_one_row_and_other_bytes_under_its_id_are_a_conflict(place: Place):
    event = compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN)
    other = encode(event.header, OrderRequested(actor="someone else", base="tiny"))
    subject = evt_subject(event.header.type, event.header.subject)
    async with arbitrator(place) as bus:
        for payload in (event.raw, event.raw, other):  # ids of the bus differ: its own window does not hide them
            await bus.publish(subject, payload, new_id())
        await publish(bus, compose("base/tiny", OrderRequested(actor="last", base="tiny"), ORIGIN))
        await eventually(lambda: len(place.found(OrderRequested)) == 2)
    with Reader.open(place.settings.ledger_url) as reader:
        conflicts = list(reader.find(types=["kite.ledger.event_id_conflict.v1"]))
        assert len(conflicts) == 1


async def test_an_unknown_type_is_stored_and_skipped(place: Place):
    event = compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN)
    raw = event.raw.replace(b"kite.yoco.order_requested.v1", b"kite.yoco.order_requested.v9")
    async with arbitrator(place) as bus:
        await bus.publish(evt_subject("kite.yoco.order_requested.v9", "base/tiny"), raw, new_id())
        await publish(bus, compose("base/tiny", OrderRequested(actor="next", base="tiny"), ORIGIN))
        await eventually(lambda: place.found(OrderRequested))
    with Reader.open(place.settings.ledger_url) as reader:
        assert len(list(reader.find(types=["kite.yoco.order_requested.v9"]))) == 1
        assert verify(reader).identical


async def test_a_second_arbitrator_on_the_same_ledger_is_refused(place: Place):
    async with arbitrator(place):
        with pytest.raises(LedgerHeld):
            await serve(place.settings)


async def test_a_restart_continues_the_ledger_and_reads_what_came_meanwhile(place: Place):
    async with arbitrator(place):
        pass
    async with await Bus.connect(place.server.url, "test") as bus:
        await publish(bus, compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN))
    async with arbitrator(place):
        await eventually(lambda: place.found(OrderRequested))
    with Reader.open(place.settings.ledger_url) as reader:
        assert reader.head.epoch == 2
        assert verify(reader).identical


async def test_a_bus_that_was_replaced_is_refused(place: Place, tmp_path: Path):
    async with arbitrator(place) as bus:
        await publish(bus, compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN))
        await eventually(lambda: place.found(OrderRequested))
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    async with nats(fresh) as server:
        with pytest.raises(BusReplaced):
            await serve(Settings(nats_url=server.url, ledger_url=place.settings.ledger_url))
