"""Windows beside facts: which of them the writer takes first, how many of each, and what becomes of a message."""

import asyncio
from types import MappingProxyType

import pytest

from kite import clock
from kite.bus import EVT, TEL, Message, evt_subject, tel_subject
from kite.events import Origin, compose, new_id
from kite.trust import Keyring
from kite_arbitrator.intake import ARRIVALS_MAX, FACTS_MAX, WINDOWS_MAX, Arrival, Found, Intake, arrive, examine, ids
from kite_schemas.ledger import BusGap, Refusal, Rejected
from kite_schemas.model import Data
from kite_schemas.telemetry import Window
from kite_schemas.yoco import OrderRequested

ORIGIN = Origin(source="kite/test/1", producer="test@0")
OPEN = Keyring(None)
GAP = BusGap(stream=EVT, first=3, last=4)


def message(stream: str, seq: int, bus_subject: str, subject: str, data: Data) -> Message:
    return Message(stream, seq, bus_subject, compose(subject, data, ORIGIN).raw, MappingProxyType({}), 0)


def window(seq: int = 1, node: str = "n1", bus_subject: str = "") -> Message:
    data = Window(node=node, boot=new_id(), seq=seq, interval_us=1, sampled_us=1, emitted_us=1)
    return message(TEL, seq, bus_subject or tel_subject(node), f"node/{node}", data)


def fact(seq: int = 1) -> Message:
    data = OrderRequested(actor="me", base="tiny")
    return message(EVT, seq, evt_subject(data.TYPE, "base/tiny"), "base/tiny", data)


def arrival(*messages: Message) -> Arrival:
    return arrive(messages, OPEN)


async def test_one_load_has_the_tick_the_facts_in_order_and_the_windows():
    intake = Intake()
    windows, first, second = arrival(window()), arrival(fact()), arrival(fact(5))
    await intake.window(windows)
    for item in (first, GAP, second):
        await intake.fact(item)
    intake.tick()
    intake.tick()
    load = await intake.take()
    assert load.tick
    assert load.facts == [first, GAP, second]
    assert load.windows == [windows]
    found = [one.found[0] for one in (first, second, windows)]
    assert ids(load) == [one.event.header.id for one in found if isinstance(one, Found)]
    intake.tick()
    assert (await intake.take()).facts == []


async def test_an_empty_intake_is_waited_for():
    intake = Intake()
    taking = asyncio.create_task(intake.take())
    await asyncio.sleep(0)
    assert not taking.done()
    await intake.window(arrival(window()))
    assert len((await taking).windows) == 1


async def test_a_load_is_bounded_and_the_rest_waits_for_the_next():
    intake = Intake()
    many = [window(seq) for seq in range(WINDOWS_MAX // 2)]
    for _ in range(5):
        await intake.window(arrival(*many))
    assert [len((await intake.take()).windows) for _ in range(3)] == [2, 2, 1]
    await intake.fact(arrival(*[fact(seq) for seq in range(FACTS_MAX)]))
    await intake.fact(GAP)
    assert len((await intake.take()).facts) == 1
    assert (await intake.take()).facts == [GAP]


async def test_a_full_line_makes_its_pull_wait_and_no_other():
    intake = Intake()
    for _ in range(ARRIVALS_MAX):
        await intake.window(arrival(window()))
    waiting = asyncio.create_task(intake.window(arrival(window())))
    await intake.fact(arrival(fact()))
    await asyncio.sleep(0)
    assert not waiting.done()
    load = await intake.take()
    assert len(load.windows) == ARRIVALS_MAX
    await waiting
    assert len((await intake.take()).windows) == 1


def test_a_window_belongs_on_the_stream_of_windows_whatever_its_version():
    assert isinstance(examine(window(node="node-1.a"), OPEN), Found)
    later = window()
    raw = later.payload.replace(b"window.v1", b"window.v9")
    found = examine(Message(TEL, 1, later.subject, raw, later.headers, 0), OPEN)
    assert isinstance(found, Found)
    assert found.event.data is None


@pytest.mark.parametrize("elsewhere", [evt_subject(Window.TYPE, "node/n1"), tel_subject("n2"), "kite.tel.v1.n1.more"])
def test_a_window_elsewhere_is_refused(elsewhere: str):
    found = examine(window(bus_subject=elsewhere), OPEN)
    assert isinstance(found, Rejected)
    assert found.code is Refusal.SUBJECT_MISMATCH
    assert found.bus_subject == elsewhere


def test_an_arrival_says_when_it_came():
    before_us = clock.mono_us()
    assert before_us <= arrival(window()).at_us <= clock.mono_us()
