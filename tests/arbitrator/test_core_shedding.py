"""Coordinated shedding: memory that fragments while injections come fast stops prewarming and admissions, and ends."""

from typing import Any

import pytest

from kite_arbitrator.records import Phase
from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, of, pool
from kite_schemas.arbitration import Held
from kite_schemas.upcycle import DecaySet, InjectionAdmitted, InjectionDeferred
from kite_schemas.why import Reason
from kite_schemas.yoco import PrewarmBlocked, PrewarmReleased, StartOrdered

READY, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1"
FRAGMENTED, RELEASED = 350_000, 300_000
"""The limit, and where shedding ends."""

RATE_MILLI = 2_000
"""Two injections a minute are not too many, three are."""

LIMITS = ("arbitration.fragmentation_max_ppm", "arbitration.injection_rate_max_milli")


def asked(injections: int = 3) -> Story:
    """A fleet that has been asked for so many injections in the last second."""
    fleet = Story().up()
    fleet.amend({"arbitration.injection_rate_max_milli": RATE_MILLI})
    fleet.windows(SECOND_US)
    for number in range(injections):
        fleet.inject("credit", blend=f"blend-{number}")
    return fleet


def shedding() -> Story:
    fleet = asked()
    assert len(of(fleet.windows(SECOND_US, fragmentation_ppm=FRAGMENTED + 1), PrewarmBlocked)) == 1
    return fleet


def released(fleet: Story, us: int, **fields: Any) -> list[Reason]:
    return [data.why.reason for data in of(fleet.windows(us, **fields), PrewarmReleased)]


@pytest.mark.parametrize(("injections", "blocked"), [(2, 0), (3, 1)])
def test_it_needs_more_injections_than_the_limit(injections: int, blocked: int):
    fleet = asked(injections)
    assert len(of(fleet.windows(SECOND_US, fragmentation_ppm=900_000), PrewarmBlocked)) == blocked


@pytest.mark.parametrize(("ppm", "blocked"), [(FRAGMENTED, 0), (FRAGMENTED + 1, 1)])
def test_it_needs_more_fragmentation_than_the_limit(ppm: int, blocked: int):
    fleet = asked()
    found = of(fleet.windows(SECOND_US, fragmentation_ppm=ppm), PrewarmBlocked)
    assert len(found) == blocked
    for data in found:
        assert [(rule.value, rule.threshold, rule.fired) for rule in data.why.rules] == [
            (FRAGMENTED + 1, FRAGMENTED, True),
            (3_000, RATE_MILLI, True),
        ]


def test_fragmentation_first_and_then_the_injections():
    fleet = asked(2)
    fleet.windows(SECOND_US, fragmentation_ppm=900_000)
    fleet.inject("credit", blend="blend-2")
    assert len(of(fleet.last, PrewarmBlocked)) == 1


def test_a_dry_run_is_no_injection():
    fleet = asked(2)
    for number in range(5):
        fleet.inject("mood", blend=f"dry-{number}", dry_run=True)
    assert of(fleet.windows(SECOND_US, fragmentation_ppm=900_000), PrewarmBlocked) == []


def test_injections_are_those_of_the_last_minute():
    fleet = asked(2)
    fleet.windows(60 * SECOND_US)
    fleet.inject("credit", blend="blend-2")
    assert of(fleet.windows(SECOND_US, fragmentation_ppm=900_000), PrewarmBlocked) == []


@pytest.mark.parametrize("key", LIMITS)
def test_without_one_of_its_limits_nothing_is_shed(key: str):
    fleet = asked()
    fleet.amend({key: None})
    assert of(fleet.windows(SECOND_US, fragmentation_ppm=900_000), PrewarmBlocked) == []


def test_absent_fragmentation_is_not_too_much():
    fleet = asked()
    assert of(fleet.windows(SECOND_US, fragmentation_ppm=None), PrewarmBlocked) == []


def test_stale_fragmentation_is_not_acted_on():
    fleet = asked()
    assert of(fleet.windows(3 * SECOND_US, fragmentation_ppm=900_000, lag_us=50_000), PrewarmBlocked) == []
    assert len(of(fleet.windows(SECOND_US, fragmentation_ppm=900_000), PrewarmBlocked)) == 1


# --- what it does


def test_weights_decay_as_under_pressure_until_it_ends():
    fleet = asked()
    rows = fleet.windows(SECOND_US, fragmentation_ppm=900_000)
    assert [(data.decay_ppm, data.why.reason) for data in of(rows, DecaySet)] == [(710_000, Reason.SHEDDING)]
    rows = fleet.windows(SECOND_US)
    assert [(data.decay_ppm, data.why.reason) for data in of(rows, DecaySet)] == [(930_000, Reason.CALM)]


def test_admissions_are_deferred_until_it_ends():
    fleet = shedding()
    request = next(iter(fleet.state.injections))
    fleet.verified(request)
    (deferred,) = of(fleet.last, InjectionDeferred)
    assert deferred.why.reason is Reason.SHEDDING
    fleet.windows(10 * SECOND_US, fragmentation_ppm=900_000)
    assert fleet.state.injections[request].phase is Phase.DEFERRED
    fleet.windows(SECOND_US)
    assert [data.request for data in of(fleet.decided, InjectionAdmitted)] == [request]


def test_a_standby_is_not_started_and_a_ready_instance_is():
    fleet = shedding()
    fleet.amend({"fleet.pools": [pool(NODE, 1, 2)]})
    assert [data.why.reason for data in of(fleet.last, Held)] == [Reason.PREWARM_BLOCKED]
    fleet.change(READY, "ready", "failed", "engine_died")
    fleet.windows(6 * SECOND_US, fragmentation_ppm=FRAGMENTED)
    assert [start.instance for start in of(fleet.decided, StartOrdered)][-1] == READY
    fleet.ready(READY)
    assert f"{NODE}-{BASE}-2" not in fleet.state.instances
    fleet.windows(2 * SECOND_US)
    assert [start.instance for start in of(fleet.decided, StartOrdered)][-1] == f"{NODE}-{BASE}-2"


# --- its end


@pytest.mark.parametrize(("ppm", "ends"), [(RELEASED + 1, []), (RELEASED, [Reason.CALM])])
def test_it_ends_when_memory_has_room_with_a_margin(ppm: int, ends: list[Reason]):
    fleet = shedding()
    assert released(fleet, 5 * SECOND_US, fragmentation_ppm=ppm) == ends


def test_it_ends_when_injections_are_slow_again():
    fleet = shedding()
    first_us = fleet.state.requested_us[0]
    assert released(fleet, 50 * SECOND_US, fragmentation_ppm=900_000) == []
    assert released(fleet, 10 * SECOND_US, fragmentation_ppm=900_000) == [Reason.CALM]
    (data,) = of(fleet.decided, PrewarmReleased)
    assert first_us + 60 * SECOND_US <= fleet.now_us
    assert data.lasted_us > 50 * SECOND_US


def test_it_ends_when_fragmentation_is_not_known_any_more():
    assert released(shedding(), SECOND_US, fragmentation_ppm=None) == [Reason.INPUT_ABSENT]


def test_it_ends_when_the_node_is_lost():
    fleet = shedding()
    fleet.wait(5 * SECOND_US)
    assert [data.why.reason for data in of(fleet.last, PrewarmReleased)] == [Reason.INPUT_ABSENT]


@pytest.mark.parametrize("key", LIMITS)
def test_it_ends_when_one_of_its_limits_is_unset(key: str):
    fleet = shedding()
    fleet.amend({key: None})
    assert [data.why.reason for data in of(fleet.last, PrewarmReleased)] == [Reason.POLICY_CHANGED]


def test_a_stale_window_does_not_end_it():
    fleet = shedding()
    assert released(fleet, 5 * SECOND_US, fragmentation_ppm=0, lag_us=50_000) == []
    assert released(fleet, SECOND_US, fragmentation_ppm=0) == [Reason.CALM]


def test_a_limit_below_the_margin_ends_it_without_any_fragmentation():
    fleet = asked()
    fleet.amend({"arbitration.fragmentation_max_ppm": 10_000})
    fleet.windows(SECOND_US, fragmentation_ppm=20_000)
    assert released(fleet, 5 * SECOND_US, fragmentation_ppm=1) == []
    assert released(fleet, SECOND_US, fragmentation_ppm=0) == [Reason.CALM]
