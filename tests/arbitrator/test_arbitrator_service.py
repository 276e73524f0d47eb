"""The arbitrator as a process among real parts: a NATS server, a SQLite ledger, events that are wrong in every way."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path

import pytest

from kite import clock
from kite.bus import DEC, TEL, Bus, Outgoing, PublishUnanswered, evt_subject, tel_subject
from kite.events import Composed, Origin, compose, new_id, publish
from kite.ledger import Ledger, LedgerHeld, Reader
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite_arbitrator.service import serve
from kite_arbitrator.testing import BASE, Story
from kite_arbitrator.testing import NODE as STORY_NODE
from kite_arbitrator.testing.running import Place, arbitrator
from kite_incident.replay import verify
from kite_schemas.envelope import decode, encode
from kite_schemas.ledger import BusGap, DeadlineMissed, Refusal, Rejected, Tick
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested, PolicySet
from kite_schemas.telemetry import Window
from kite_schemas.yoco import InstanceReady, NodeRegistered, OrderRequested, StartOrdered
from kite_schemas.yoco import Path as HandOver

ORIGIN = Origin(source="kite/test/1", producer="test@0")
NODE = "node-1.a"
BOOT = new_id()
LEAD_IN = 1_000  # windows from this number on only find out whether windows are followed yet


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    async with nats(tmp_path) as server:
        yield Place.beside(server, tmp_path)


async def test_a_new_ledger_begins_with_its_birth_a_lease_and_the_shipped_policy(place: Place):
    async with arbitrator(place):
        pass
    with Reader.open(place.url) as reader:
        kinds = [row.type.removeprefix("kite.") for row in reader.rows(1, 4)]
        assert kinds == ["ledger.created.v1", "ledger.lease_taken.v1", "policy.change_requested.v1", "policy.set.v1"]
        assert verify(reader, 1, 4).identical


async def test_a_request_becomes_a_row_followed_by_its_decision_which_is_published(place: Place):
    async with arbitrator(place) as bus:
        request = ChangeRequested(actor="me", changes=(Change(key="nonsense", value=1),))
        event = compose("policy/fleet", request, ORIGIN)
        await publish(bus, event)
        await eventually(lambda: place.found(ChangeRejected))
        async with aclosing(bus.follow(DEC, after_seq=0)) as published:
            shipped, decision = [decode((await anext(published)).payload) for _ in range(2)]
        assert isinstance(shipped.data, PolicySet)
        assert isinstance(decision.data, ChangeRejected)
        assert decision.header.causationid == event.header.id
    with Reader.open(place.url) as reader:
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
    with Reader.open(place.url) as reader:
        conflicts = list(reader.find(types=["kite.ledger.event_id_conflict.v1"]))
        assert len(conflicts) == 1


async def test_an_unknown_type_is_stored_and_skipped(place: Place):
    event = compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN)
    raw = event.raw.replace(b"kite.yoco.order_requested.v1", b"kite.yoco.order_requested.v9")
    async with arbitrator(place) as bus:
        await bus.publish(evt_subject("kite.yoco.order_requested.v9", "base/tiny"), raw, new_id())
        await publish(bus, compose("base/tiny", OrderRequested(actor="next", base="tiny"), ORIGIN))
        await eventually(lambda: place.found(OrderRequested))
    with Reader.open(place.url) as reader:
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
    with Reader.open(place.url) as reader:
        assert reader.head.epoch == 2
        assert verify(reader).identical


def window(seq: int, subject: str = f"node/{NODE}") -> Composed:
    """An idle node's window."""
    now_us = clock.wall_us()
    data = Window(node=NODE, boot=BOOT, seq=seq, interval_us=100_000, sampled_us=now_us, emitted_us=now_us)
    return compose(subject, data, ORIGIN)


def fact() -> Composed:
    return compose("base/tiny", OrderRequested(actor="me", base="tiny"), ORIGIN)


def policy_change(key: str, value: int) -> Composed:
    return compose("policy/fleet", ChangeRequested(actor="me", changes=(Change(key=key, value=value),)), ORIGIN)


async def send(bus: Bus, event: Composed, subject: str = tel_subject(NODE)) -> None:
    """Publish under an id of the bus's own: not its duplicate window is to be tested."""
    await bus.publish(subject, event.raw, new_id())


async def following(bus: Bus, place: Place) -> None:
    """Wait until windows are followed: those from before that moment are nobody's."""
    seq = count(LEAD_IN)

    async def followed() -> bool:
        await send(bus, window(next(seq)))
        return bool(place.found(Window))

    await eventually(followed)


def told(place: Place) -> list[int]:
    """Return the numbers of the windows in the ledger that a test has sent, in its order."""
    return [data.seq for data in place.found(Window) if data.seq < LEAD_IN]


async def test_windows_become_rows_and_what_came_while_nobody_led_does_not(place: Place):
    async with arbitrator(place):
        pass
    async with await Bus.connect(place.server.url, "test") as bus:
        await send(bus, window(1))
    async with arbitrator(place) as bus:
        await following(bus, place)
        for seq in (2, 3):
            await send(bus, window(seq))
        await eventually(lambda: told(place) == [2, 3])
    with Reader.open(place.url) as reader:
        rows = list(reader.find(types=[Window.TYPE]))
        assert {(row.subject, row.bus_stream) for row in rows} == {(f"node/{NODE}", TEL)}
        assert rows[-1].bus_seq == rows[-2].bus_seq + 1
        assert verify(reader).identical


async def test_a_window_twice_is_one_row_and_other_bytes_under_its_id_are_a_conflict(place: Place):
    event = window(1)
    other = Composed(event.header, event.raw.replace(b'"seq":1,', b'"seq":2,'))
    async with arbitrator(place) as bus:
        await following(bus, place)
        for sent in (event, event, other, window(3)):
            await send(bus, sent)
        await eventually(lambda: told(place) == [1, 3])
        for sent in (event, other, window(4)):
            await send(bus, sent)
        await eventually(lambda: told(place) == [1, 3, 4])
    with Reader.open(place.url) as reader:
        assert len(list(reader.find(types=["kite.ledger.event_id_conflict.v1"]))) == 2
        assert verify(reader).identical


@pytest.mark.parametrize(
    ("event", "subject"),
    [
        (window(1), evt_subject(Window.TYPE, f"node/{NODE}")),
        (window(1), tel_subject("other")),
        (window(1, "node/other"), tel_subject("other")),
        (window(1, f"instance/{NODE}"), tel_subject(NODE)),
        (fact(), tel_subject("tiny")),
    ],
    ids=["a window among the facts", "on another's subject", "about another", "about no node", "a fact among windows"],
)
async def test_each_stream_takes_only_what_belongs_there(place: Place, event: Composed, subject: str):
    async with arbitrator(place) as bus:
        await following(bus, place)
        await send(bus, event, subject)
        (rejected,) = await eventually(lambda: place.found(Rejected))
    assert rejected.code is Refusal.SUBJECT_MISMATCH
    assert (told(place), place.found(OrderRequested)) == ([], [])


async def test_lost_windows_are_no_gap_and_the_pull_goes_on_behind_them(place: Place):
    async with arbitrator(place) as bus:
        await following(bus, place)
        await place.administer(f"STREAM.PURGE.{TEL}", {"seq": 1_000_000})
        for seq in (1, 2):
            await send(bus, window(seq))
        await eventually(lambda: told(place) == [1, 2])
        assert place.found(BusGap) == []


async def test_a_stream_of_windows_that_is_deleted_or_made_anew_ends_nothing(place: Place):
    async with arbitrator(place) as bus:
        await following(bus, place)
        await place.administer(f"STREAM.DELETE.{TEL}", {})
        await eventually(lambda: comes(bus, place, 1))
        await place.administer(f"STREAM.DELETE.{TEL}", {})
        await bus.provision()
        await eventually(lambda: comes(bus, place, 2))
    with Reader.open(place.url) as reader:
        assert verify(reader).identical


async def comes(bus: Bus, place: Place, seq: int) -> bool:
    """Send a window, and tell whether one with its number has come; there may be no stream to take it."""
    with suppress(PublishUnanswered):
        await send(bus, window(seq))
    return seq in told(place)


async def test_what_is_refused_on_a_stream_made_anew_has_an_id_of_its_own(place: Place):
    async with arbitrator(place) as bus:
        await following(bus, place)
        await place.administer(f"STREAM.DELETE.{TEL}", {})
        await bus.provision()
        await eventually(lambda: comes(bus, place, 1))
        number = (await bus.stream(TEL)).last_seq
        await send(bus, fact())
        await eventually(lambda: place.found(Rejected))
        await place.administer(f"STREAM.DELETE.{TEL}", {})
        await bus.provision()
        await place.administer(f"STREAM.PURGE.{TEL}", {"seq": number + 1})
        await eventually(lambda: refused(bus, place, number + 1))


async def refused(bus: Bus, place: Place, seq: int) -> bool:
    """Send what is to be refused, and tell whether it was, at a place where something was before."""
    await send(bus, fact())
    found = [data.seq for data in place.found(Rejected)]
    return len(found) > 1 and seq in found


async def test_a_flood_of_windows_holds_up_no_fact_and_loses_nothing(place: Place):
    async with arbitrator(place) as bus:
        await following(bus, place)
        flood = [Outgoing(tel_subject(NODE), (event := window(seq)).raw, event.header.id) for seq in range(1, LEAD_IN)]
        flooding = asyncio.create_task(bus.publish_many(flood))
        await publish(bus, fact())
        await eventually(lambda: place.found(OrderRequested))
        await flooding
        await eventually(lambda: told(place) == list(range(1, LEAD_IN)))
    with Reader.open(place.url) as reader:
        assert verify(reader).identical


async def test_a_decision_that_came_too_late_is_recorded_before_the_next_input(place: Place):
    async with arbitrator(place) as bus:
        await publish(bus, policy_change("arbitration.decision_deadline_us", 1))
        await eventually(lambda: len(place.found(PolicySet)) == 2)
        missed = (await eventually(lambda: place.found(DeadlineMissed)))[0]
    assert missed.took_us > missed.deadline_us == 1
    with Reader.open(place.url) as reader:
        decision = reader.row(missed.last)
        assert decision is not None
        assert decision.type == PolicySet.TYPE
        assert verify(reader).identical


async def test_a_slow_clock_becomes_a_faster_one_by_the_policy_and_not_after_its_own_pause(place: Place):
    async with arbitrator(place) as bus:
        await publish(bus, policy_change("arbitration.idle_tick_us", 3_600_000_000))
        await eventually(lambda: len(place.found(PolicySet)) == 2)
        before = len(place.found(Tick))
        await publish(bus, policy_change("arbitration.idle_tick_us", 200_000))
        await eventually(lambda: len(place.found(Tick)) > before + 2)


async def test_decisions_are_out_of_the_outbox_when_the_arbitrator_has_ended(place: Place):
    async with arbitrator(place) as bus:
        before = (await bus.stream(DEC)).last_seq
        await publish(bus, policy_change("nonsense", 1))

        async def published() -> bool:
            return (await bus.stream(DEC)).last_seq > before

        await eventually(published)
    with Ledger.open(place.url) as ledger:
        assert ledger.pending(10) == []


async def test_routes_stand_beside_the_rows_that_they_follow_from(place: Place):
    inputs = [row for row in Story().begin(standbys=0).rows if isinstance(row.data, ChangeRequested | NodeRegistered)]
    ready = InstanceReady(
        instance=f"{STORY_NODE}-{BASE}-0",
        node=STORY_NODE,
        path=HandOver("cold"),
        pid=1,
        endpoint="http://127.0.0.1:9000",
        versions=(),
        noise_micronats=0,
        t_wake_us=1,
        t_first_token_us=2,
    )
    async with arbitrator(place) as bus:
        for row in inputs[1:]:
            assert row.data is not None
            await publish(bus, compose(row.subject, row.data, ORIGIN))
        await eventually(lambda: place.found(StartOrdered))
        with Reader.open(place.url) as reader:
            assert reader.routes() == []
            event = compose(f"instance/{ready.instance}", ready, ORIGIN)
            await publish(bus, event)
            await eventually(lambda: reader.by_event_id(event.header.id))
            (route,) = reader.routes()
            row = reader.by_event_id(event.header.id)
            assert row is not None
            assert route.pos == row.pos
    assert (route.name, route.version, route.instance) == (BASE, BASE, ready.instance)
    assert (route.endpoint, route.channel) == (ready.endpoint, "upcycle")
