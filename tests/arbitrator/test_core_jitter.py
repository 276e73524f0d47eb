"""Two opposite decisions about one target are kept apart: the second is discarded, said once, and taken again later."""

from itertools import pairwise
from typing import Any

import pytest

from kite_arbitrator.testing import BASE, NODE, SECOND_US, Doing, Story, of
from kite_arbitrator.turns import WAYS
from kite_schemas.arbitration import Channel, ChannelSelected, Discarded, Held, PressureChanged
from kite_schemas.guard import Compared, ComparisonFailed
from kite_schemas.ledger import Tick
from kite_schemas.upcycle import Frozen, LoadFailed, RollbackOrdered, Unfrozen
from kite_schemas.why import Reason
from kite_schemas.yoco import (
    DrainOrdered,
    OrderRequested,
    PrewarmBlocked,
    PrewarmOrdered,
    PrewarmReleased,
    SleepOrdered,
    StartOrdered,
    WakeOrdered,
)

READY, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1"
WINDOW_US = 137_000
BOTH_SIDES = pytest.mark.parametrize(("after_us", "kept"), [(WINDOW_US - 1, False), (WINDOW_US, True)])


def last_turn_us(fleet: Story, target: str) -> int:
    return fleet.state.turns[target].at_us


def told_at(fleet: Story, us: int) -> Story:
    """Let the next fact come at a moment."""
    fleet.step_us = us - fleet.now_us
    return fleet


def blended() -> Story:
    fleet = Story().up()
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.windows(6 * SECOND_US)
    return fleet


def put_to_sleep() -> tuple[Story, int]:
    """A standby sleeps: it was told to at the moment that is returned, 50 ms ago."""
    fleet = Story().begin()
    fleet.ready(READY)
    fleet.ready(STANDBY)
    fleet.change(STANDBY, "ready", "draining")
    fleet.change(STANDBY, "draining", "draining", "drained", done=True)
    assert len(of(fleet.last, SleepOrdered)) == 1
    slept_us = last_turn_us(fleet, f"instance/{STANDBY}")
    told_at(fleet, slept_us + 50_000).change(STANDBY, "draining", "asleep", "paused", done=True)
    return fleet, slept_us


# --- each pair, at both sides of the window


@BOTH_SIDES
def test_start_against_drain(after_us: int, kept: bool):
    fleet = Story().begin()
    started_us = last_turn_us(fleet, f"instance/{STANDBY}")
    told_at(fleet, started_us + after_us).ready(STANDBY)
    assert len(of(fleet.last, DrainOrdered)) == kept
    assert len(of(fleet.last, Discarded)) == (not kept)
    fleet.wait(2)
    assert len(of(fleet.decided, DrainOrdered)) == 1


@BOTH_SIDES
def test_sleep_against_wake(after_us: int, kept: bool):
    fleet, slept_us = put_to_sleep()
    told_at(fleet, slept_us + after_us).order()
    assert [wake.instance for wake in of(fleet.last, WakeOrdered)] == [STANDBY] * kept
    assert len(of(fleet.last, Discarded)) == (not kept)


@BOTH_SIDES
def test_wake_against_drain(after_us: int, kept: bool):
    fleet = blended()
    fleet.amend({"arbitration.idle_us": 1, "arbitration.sustained_us": 1, "arbitration.concurrency_max": 4})
    fleet.amend({"arbitration.miss_jump_ppm": 0, "arbitration.hit_rate_min_ppm": None})
    fleet.windows(200_000, {READY: Doing(running=5, queries=1_000, hits=900)})
    woken_us = last_turn_us(fleet, f"instance/{STANDBY}")
    told_at(fleet, woken_us + 10_000).ready(STANDBY, "hot", (fleet.state.blends["risk"].resident.version,))
    fleet.amend({"arbitration.concurrency_max": None, "arbitration.switch_window_us": None})  # pressure is off
    fleet.amend({"arbitration.switch_window_us": WINDOW_US})
    fleet.window(at_us=fleet.now_us + 1_000)
    assert woken_us + 60_000 > fleet.now_us
    fleet.tell_at(woken_us + after_us, Tick(), "ledger/fleet")
    assert [drain.instance for drain in of(fleet.last, DrainOrdered)] == [STANDBY] * kept
    assert [data.decision for data in of(fleet.last, Discarded)] == [DrainOrdered.TYPE] * (not kept)


@BOTH_SIDES
def test_channel_upcycle_against_yoco(after_us: int, kept: bool):
    fleet = blended()
    fleet.window(fragmentation_ppm=900_000)
    assert [data.channel for data in of(fleet.last, ChannelSelected)] == [Channel.YOCO]
    turned_us = last_turn_us(fleet, "channel/risk")
    fleet.window(at_us=turned_us + after_us)
    assert [data.channel for data in of(fleet.last, ChannelSelected)] == [Channel.UPCYCLE] * kept
    for data in of(fleet.last, Discarded):
        (rule,) = data.why.rules
        assert (data.decision, data.target, data.why.reason) == (ChannelSelected.TYPE, "channel/risk", Reason.JITTER)
        assert (rule.id, rule.value, rule.threshold, rule.margin) == (
            "arbitration.switch_window_us",
            after_us,
            WINDOW_US,
            after_us - WINDOW_US,
        )


@BOTH_SIDES
def test_pressure_on_against_off(after_us: int, kept: bool):
    fleet = blended()
    fleet.amend({"arbitration.concurrency_max": 4, "arbitration.sustained_us": 1, "arbitration.miss_jump_ppm": 0})
    fleet.windows(200_000, {READY: Doing(running=5, queries=1_000, hits=900)})
    (on,) = of(fleet.decided, PressureChanged)
    turned_us = last_turn_us(fleet, f"pressure/{NODE}.{BASE}")
    fleet.window(at_us=turned_us + 60_000)
    fleet.tell_at(turned_us + after_us, Tick(), "ledger/fleet")
    off = of(fleet.decided, PressureChanged)[1:]
    assert on.on
    assert [change.on for change in off] == [False] * kept
    fleet.wait(WINDOW_US)
    assert [change.on for change in of(fleet.decided, PressureChanged)] == [True, False]


@BOTH_SIDES
def test_prewarm_blocked_against_released(after_us: int, kept: bool):
    fleet = blended()
    fleet.amend({"arbitration.injection_rate_max_milli": 0})
    fleet.inject("mood", blend="other")
    fleet.window(fragmentation_ppm=900_000)
    blocked_us = last_turn_us(fleet, f"prewarm/{NODE}")
    assert len(of(fleet.last, PrewarmBlocked)) == 1
    fleet.window(at_us=blocked_us + after_us)
    assert len(of(fleet.last, PrewarmReleased)) == kept


def test_every_pair_goes_both_ways_and_nothing_else_has_an_opposite():
    assert set(WAYS) == {
        StartOrdered,
        WakeOrdered,
        DrainOrdered,
        SleepOrdered,
        PrewarmOrdered,
        PrewarmBlocked,
        PrewarmReleased,
        PressureChanged,
        ChannelSelected,
    }


# --- what becomes of it


def test_it_is_said_once_and_taken_again_at_the_first_row_after_the_window():
    fleet = blended()
    fleet.window(fragmentation_ppm=900_000)
    turned_us = last_turn_us(fleet, "channel/risk")
    for after_us in (40_000, 80_000, 120_000):
        fleet.window(at_us=turned_us + after_us)
    assert len([data for data in of(fleet.decided, Discarded) if data.target == "channel/risk"]) == 1
    fleet.tell_at(turned_us + WINDOW_US, Tick(), "ledger/fleet")
    assert [data.channel for data in of(fleet.last, ChannelSelected)] == [Channel.UPCYCLE]


def test_every_turn_has_its_own_discarding():
    fleet = blended()
    began = len(fleet.decided)
    for _ in range(3):
        fleet.window(fragmentation_ppm=900_000)
        fleet.windows(SECOND_US)
        fleet.windows(400_000)
    turns = [row for row in fleet.decided[began:] if row.subject == "channel/risk"]
    assert [type(row.data) for row in turns] == [ChannelSelected, Discarded, ChannelSelected] * 3
    times_us = [row.ledger_us for row in turns if isinstance(row.data, ChannelSelected)]
    assert all(later - earlier >= WINDOW_US for earlier, later in pairwise(times_us))


def test_a_wake_that_somebody_asked_for_too_soon_is_put_off_and_ordered_after_the_window():
    fleet, slept_us = put_to_sleep()
    told_at(fleet, slept_us + 70_000).order()
    (asked,) = [row for row in fleet.rows[-2:] if isinstance(row.data, OrderRequested)]
    (data,) = of(fleet.last, Discarded)
    assert (data.request, data.decision) == (asked.id, WakeOrdered.TYPE)
    fleet.tell_at(slept_us + 120_000, Tick(), "ledger/fleet")
    assert fleet.last == (), "said once"
    fleet.tell_at(slept_us + WINDOW_US, Tick(), "ledger/fleet")
    (woken,) = of(fleet.last, WakeOrdered)
    assert woken.request == asked.id
    assert fleet.state.wanted == {}


def test_two_requests_that_were_put_off_get_one_standby_and_one_refusal():
    fleet, slept_us = put_to_sleep()
    for after_us in (70_000, 90_000):
        told_at(fleet, slept_us + after_us).order()
    fleet.tell_at(slept_us + WINDOW_US, Tick(), "ledger/fleet")
    assert len(of(fleet.last, WakeOrdered)) == 1
    fleet.wait(100_000)
    (held,) = of(fleet.last, Held)
    assert held.why.reason is Reason.NO_STANDBY
    assert held.request is not None
    assert fleet.state.wanted == {}


def test_without_the_window_nothing_is_discarded():
    fleet = blended()
    fleet.amend({"arbitration.switch_window_us": None})
    fleet.windows(SECOND_US)
    fleet.window(fragmentation_ppm=900_000)
    fleet.window(at_us=fleet.now_us + 1_000)
    assert [data.channel for data in of(fleet.last, ChannelSelected)] == [Channel.UPCYCLE]
    assert of(fleet.decided, Discarded) == []


# --- exempt


def test_a_freeze_may_end_at_once():
    fleet = blended()
    fleet.order()
    fleet.wake(STANDBY)
    fleet.amend({"guard.enabled": True, "guard.freeze_us": 1})
    pair, version = f"pair/{READY},{STANDBY}", fleet.state.blends["risk"].resident.version
    about: dict[str, Any] = {"done": True, "first": READY, "second": STANDBY}
    conflict: dict[str, Any] = {
        "kl_micronats": 400_000,
        "p99_micronats": 400_000,
        "covered_ppm": 900_000,
        "positions": 9,
    }
    fleet.tell(Compared(order=fleet.open(pair), **about, model=version, **conflict, duration_us=1))
    frozen_us = fleet.state.now_us
    assert len(of(fleet.last, Frozen)) == 1
    fleet.tell_at(fleet.now_us + 10_000, Tick(), "ledger/fleet")
    fleet.step_us = 10_000
    fleet.tell(ComparisonFailed(order=fleet.open(pair), **about, code="timeout", message=""))
    assert len(of(fleet.decided, Unfrozen)) == 1
    assert fleet.state.now_us - frozen_us < WINDOW_US


def test_a_rollback_may_follow_its_load_at_once():
    fleet = Story().up()
    request = fleet.inject("credit", weight_ppm=500_000)
    fleet.verified(request)
    fleet.stored(request)
    fleet.step_us = 10_000
    fleet.tell(
        LoadFailed(
            order=fleet.open(f"load/risk@{READY}"),
            done=True,
            instance=READY,
            version=fleet.resident(request).version,
            stage="load",
            code="refused",
            message="",
        )
    )
    assert len(of(fleet.last, RollbackOrdered)) == 1


def test_an_order_may_expire_at_once():
    fleet = Story().up()
    fleet.amend({"expiry.wake_us": 1})
    fleet.order()
    fleet.tell_at(fleet.now_us + 2_000, Tick(), "ledger/fleet")
    assert "order_expired" in fleet.kinds()
