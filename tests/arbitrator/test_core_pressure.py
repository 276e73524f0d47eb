"""Pressure of a pool: concurrency above its limit for long enough, and a jump of misses; what it does, and its end."""

from typing import Any

import pytest

from kite_arbitrator.records import Pressure, pool_subject
from kite_arbitrator.testing import BASE, NODE, SECOND_US, WINDOW_US, Doing, Story, Told, of, offer
from kite_schemas.arbitration import Held, PressureChanged
from kite_schemas.upcycle import DecaySet, InjectionAdmitted
from kite_schemas.why import Reason
from kite_schemas.yoco import SleepMode

READY, SECOND, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1", f"{NODE}-{BASE}-1"
LIMIT, SUSTAINED_US = 4, 5 * SECOND_US
LIMITS = ("arbitration.concurrency_max", "arbitration.sustained_us", "arbitration.miss_jump_ppm")


def doing(in_flight: int, hits: int, queries: int = 1_000) -> Told:
    return {READY: Doing(running=min(in_flight, 3), waiting=max(0, in_flight - 3), queries=queries, hits=hits)}


CALM, CROWDED, MISSING = doing(LIMIT, 900), doing(LIMIT + 1, 900), doing(LIMIT + 1, 700)
"""At the limit, above it, and above it with 20 % more misses."""


def calm(*, ready: int = 1, standbys: int = 1, mode: SleepMode = SleepMode.PAUSED) -> Story:
    """A fleet at its limit for long enough that its misses of the last seconds are known."""
    fleet = Story(engines=(offer(mode),)).up(ready=ready, standbys=standbys, standby_mode=mode).rest()
    fleet.amend({"arbitration.concurrency_max": LIMIT})
    fleet.windows(7 * SECOND_US, CALM)
    return fleet


def pressed(*, ready: int = 1, standbys: int = 1) -> Story:
    """A fleet whose pool has just come under pressure."""
    fleet = calm(ready=ready, standbys=standbys)
    (on,) = changes(fleet, SUSTAINED_US + WINDOW_US, MISSING)
    assert on.on
    return fleet


def changes(fleet: Story, us: int, told: Told, **fields: Any) -> list[PressureChanged]:
    return of(fleet.windows(us, told, **fields), PressureChanged)


def known(fleet: Story) -> Pressure:
    return fleet.state.pressures[pool_subject(NODE, BASE)]


# --- on


@pytest.mark.parametrize(("in_flight", "on"), [(LIMIT, False), (LIMIT + 1, True)])
def test_pressure_needs_more_in_flight_than_the_limit(in_flight: int, on: bool):
    fleet = calm()
    found = changes(fleet, 8 * SECOND_US, doing(in_flight, 700))
    assert [change.on for change in found] == [True] * on
    if on:
        concurrency, sustained, jump = found[0].why.rules
        assert (concurrency.value, concurrency.threshold, concurrency.fired) == (LIMIT + 1, LIMIT, True)
        assert (sustained.value, sustained.threshold) == (SUSTAINED_US, SUSTAINED_US)
        assert (jump.value, jump.threshold) == (200_000, 150_000)
        assert found[0].lasted_us == SUSTAINED_US
        assert found[0].why.inputs[0].id == f"window/{NODE}"


@pytest.mark.parametrize(("lasted_us", "on"), [(SUSTAINED_US - 1, False), (SUSTAINED_US, True)])
def test_pressure_needs_the_whole_time(lasted_us: int, on: bool):
    fleet = calm()
    fleet.window(MISSING)
    began_us = fleet.now_us
    while fleet.now_us + 2 * WINDOW_US < began_us + lasted_us:
        assert of(fleet.window(MISSING), PressureChanged) == []
    fleet.window(MISSING, at_us=began_us + lasted_us)
    assert len(of(fleet.last, PressureChanged)) == on


@pytest.mark.parametrize(("hits", "on"), [(750, False), (749, True)])
def test_pressure_needs_a_jump_of_misses(hits: int, on: bool):
    fleet = calm()
    assert len(changes(fleet, 8 * SECOND_US, doing(LIMIT + 1, hits))) == on


@pytest.mark.parametrize(("queries", "on"), [(19, False), (20, True)])
def test_a_second_with_fewer_than_200_tokens_has_no_share_of_misses(queries: int, on: bool):
    fleet = calm()
    assert len(changes(fleet, 8 * SECOND_US, doing(LIMIT + 1, 0, queries))) == on


def test_a_window_at_the_limit_breaks_the_time():
    fleet = calm()
    assert changes(fleet, 3 * SECOND_US, MISSING) == []
    fleet.window(CALM)
    assert changes(fleet, SUSTAINED_US - WINDOW_US, MISSING) == []
    assert len(changes(fleet, 3 * WINDOW_US, MISSING)) <= 1


def test_the_jump_may_come_at_any_moment_of_the_time():
    fleet = calm()
    assert changes(fleet, SECOND_US, MISSING) == []
    assert [change.on for change in changes(fleet, SUSTAINED_US, CROWDED)] == [True]


def test_a_jump_before_the_time_began_does_not_count():
    fleet = calm()
    fleet.windows(SECOND_US, doing(LIMIT, 0))
    fleet.windows(SECOND_US, CALM)
    assert changes(fleet, 8 * SECOND_US, CROWDED) == []
    fleet.windows(8 * SECOND_US, doing(LIMIT, 0))
    assert changes(fleet, 8 * SECOND_US, doing(LIMIT + 1, 0)) == []  # many misses, but no more than before


def test_the_requests_of_all_ready_instances_count_and_those_of_a_standby_do_not():
    fleet = calm(ready=2, standbys=1)
    asleep = f"{NODE}-{BASE}-2"
    few = {READY: Doing(running=2, queries=900, hits=100), SECOND: Doing(running=2)}
    assert changes(fleet, 8 * SECOND_US, {**few, asleep: Doing(running=9)}) == []
    fleet.windows(8 * SECOND_US, {READY: Doing(queries=900, hits=800), SECOND: Doing()})
    more = {READY: Doing(running=2, queries=900, hits=100), SECOND: Doing(running=2, waiting=1)}
    assert [change.on for change in changes(fleet, 8 * SECOND_US, more)] == [True]


def test_of_an_instance_that_does_not_answer_nothing_is_known():
    fleet = calm(ready=2, standbys=0)
    fleet.windows(2 * SECOND_US, {READY: Doing(running=3, queries=900, hits=300), SECOND: Doing(running=3)})
    above_us = known(fleet).above_us
    fleet.window({READY: Doing(running=3), SECOND: None})  # the other one may have more than 1, or not
    assert known(fleet).above_us == above_us is not None
    fleet.window({READY: Doing(running=9), SECOND: None})  # whatever the other one has, it is too much
    assert (known(fleet).in_flight, known(fleet).above_us) == (9, above_us)


@pytest.mark.parametrize("key", LIMITS)
def test_without_one_of_its_limits_there_is_no_pressure(key: str):
    fleet = calm()
    fleet.amend({key: None})
    assert changes(fleet, 10 * SECOND_US, MISSING) == []


# --- off


@pytest.mark.parametrize(("lasted_us", "off"), [(SUSTAINED_US - 1, False), (SUSTAINED_US, True)])
def test_pressure_ends_when_it_was_at_or_below_the_limit_for_the_whole_time(lasted_us: int, off: bool):
    fleet = pressed()
    fleet.window(CALM)
    began_us = fleet.now_us
    while fleet.now_us + 2 * WINDOW_US < began_us + lasted_us:
        assert of(fleet.window(CALM), PressureChanged) == []
    fleet.window(CALM, at_us=began_us + lasted_us)
    assert [(change.on, change.why.reason) for change in of(fleet.last, PressureChanged)] == [
        (False, Reason.CALM)
    ] * off


def test_misses_take_no_part_in_its_end():
    fleet = pressed()
    assert [change.on for change in changes(fleet, 6 * SECOND_US, doing(LIMIT, 100))] == [False]


def test_a_window_above_the_limit_keeps_it_on():
    fleet = pressed()
    for _ in range(4):
        assert changes(fleet, 4 * SECOND_US, CALM) == []
        fleet.window(CROWDED)
    assert known(fleet).on


def test_pressure_ends_when_the_node_is_lost():
    fleet = pressed()
    fleet.wait(5 * SECOND_US)
    assert [(change.on, change.why.reason) for change in of(fleet.last, PressureChanged)] == [(False, Reason.NODE_LOST)]
    fleet.windows(4 * SECOND_US, MISSING)  # what was before the loss is not a part of the time
    assert not known(fleet).on


@pytest.mark.parametrize("key", LIMITS[:2])
def test_pressure_ends_when_one_of_its_limits_is_unset(key: str):
    fleet = pressed()
    fleet.amend({key: None})
    (off,) = of(fleet.last, PressureChanged)
    assert (off.on, off.why.reason) == (False, Reason.POLICY_CHANGED)


def test_pressure_ends_when_its_pool_is_no_longer_wanted():
    fleet = pressed()
    fleet.amend({"fleet.pools": []})
    assert [change.why.reason for change in of(fleet.last, PressureChanged)] == [Reason.POLICY_CHANGED]


def test_pressure_of_which_nothing_is_known_for_a_minute_is_over():
    fleet = pressed()
    heard_us = known(fleet).heard_us
    silent = {READY: None, STANDBY: None}
    assert changes(fleet, 59 * SECOND_US, silent) == []
    (off,) = changes(fleet, 2 * SECOND_US, silent)
    assert (off.on, off.why.reason) == (False, Reason.INPUT_ABSENT)
    assert off.why.rules[0].value >= off.why.rules[0].threshold == 60 * SECOND_US
    assert fleet.now_us - heard_us > 60 * SECOND_US


def test_a_limit_that_is_lowered_does_not_end_it():
    fleet = pressed()
    fleet.windows(3 * SECOND_US, CALM)
    fleet.amend({"arbitration.concurrency_max": 1, "arbitration.sustained_us": 1})
    assert of(fleet.last, PressureChanged) == []
    assert known(fleet).on


# --- stale windows


def test_stale_windows_do_not_start_a_time():
    fleet = calm()
    assert changes(fleet, 8 * SECOND_US, MISSING, lag_us=50_000) == []
    assert known(fleet).above_us is None
    assert changes(fleet, 2 * SECOND_US, MISSING) == []


def test_time_in_which_windows_were_stale_does_not_extend_it():
    fleet = calm()
    fleet.windows(3 * SECOND_US, MISSING)
    assert changes(fleet, 4 * SECOND_US, MISSING, lag_us=50_000) == []
    assert changes(fleet, 1_500_000, MISSING) == []
    assert len(changes(fleet, SECOND_US, MISSING)) == 1


def test_time_in_which_no_window_came_does_not_extend_it():
    fleet = calm()
    fleet.windows(3 * SECOND_US, MISSING)
    fleet.window(MISSING, at_us=fleet.now_us + 4 * SECOND_US, lost=39)
    assert of(fleet.last, PressureChanged) == []
    assert changes(fleet, 1_500_000, MISSING) == []
    assert len(changes(fleet, SECOND_US, MISSING)) == 1


def test_stale_windows_do_not_end_it():
    fleet = pressed()
    assert changes(fleet, 20 * SECOND_US, CALM, lag_us=50_000) == []
    assert known(fleet).on
    assert len(changes(fleet, 6 * SECOND_US, CALM)) == 1


# --- what it does


def test_under_pressure_free_members_decay_more_and_the_admission_says_so():
    fleet = Story().up().rest()
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.amend({"arbitration.concurrency_max": LIMIT})
    fleet.windows(7 * SECOND_US, CALM)
    decided = fleet.windows(6 * SECOND_US, MISSING)
    assert [(data.base, data.decay_ppm, data.why.reason) for data in of(decided, DecaySet)] == [
        (BASE, 710_000, Reason.PRESSURE)
    ]
    fleet.verified(fleet.inject("mood", weight_ppm=100_000, blend="risk"))
    (admitted,) = of(fleet.last, InjectionAdmitted)
    assert {m.adapter.name: m.weight_ppm for m in admitted.members} == {"credit": 355_000, "mood": 100_000}
    assert ("upcycle.weight_decay_ppm", 710_000) in {(rule.id, rule.value) for rule in admitted.why.rules}
    decided = fleet.windows(8 * SECOND_US, CALM)
    assert [(data.decay_ppm, data.why.reason) for data in of(decided, DecaySet)] == [(930_000, Reason.CALM)]
    assert fleet.state.decays == {}


def test_without_a_factor_for_pressure_the_factor_stays():
    fleet = calm()
    fleet.amend({"upcycle.weight_decay_pressure_ppm": None})
    assert of(fleet.windows(8 * SECOND_US, MISSING), DecaySet) == []
    assert known(fleet).on


def test_the_factor_follows_the_policy_while_pressure_lasts():
    fleet = pressed()
    fleet.amend({"upcycle.weight_decay_pressure_ppm": 600_000})
    assert [data.decay_ppm for data in of(fleet.last, DecaySet)] == [600_000]


@pytest.mark.parametrize(("standbys", "wanted"), [(1, 1), (2, 1), (5, 2)])
def test_the_reserve_is_held_as_hot_already_once(standbys: int, wanted: int):
    fleet = calm(standbys=standbys)
    decided = fleet.windows(20 * SECOND_US, MISSING)
    held = [data for data in of(decided, Held) if data.why.reason is Reason.ALREADY_HOT]
    assert [data.detail.partition(" standbys")[0] for data in held] == [f"{wanted} of {standbys}"]
    fleet.windows(10 * SECOND_US, CALM)
    decided = fleet.windows(8 * SECOND_US, MISSING)
    assert len(of(decided, PressureChanged)) == 1
    assert len([data for data in of(decided, Held) if data.why.reason is Reason.ALREADY_HOT]) == 1


@pytest.mark.parametrize("settings", [{"yoco.reserve_pressure_ppm": None}, {}])
def test_without_a_share_or_without_standbys_nothing_is_said_of_a_reserve(settings: dict[str, None]):
    fleet = calm(standbys=1 if settings else 0)
    fleet.amend(settings)
    decided = fleet.windows(8 * SECOND_US, MISSING)
    assert [data for data in of(decided, Held) if data.why.reason is Reason.ALREADY_HOT] == []
    assert known(fleet).on


def test_standbys_that_sleep_deeply_are_not_called_hot():
    fleet = calm(mode=SleepMode.L1)
    decided = fleet.windows(8 * SECOND_US, MISSING)
    assert [data for data in of(decided, Held) if data.why.reason is Reason.ALREADY_HOT] == []
    assert known(fleet).on
