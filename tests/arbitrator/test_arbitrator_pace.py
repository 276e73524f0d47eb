"""The pace of the ledger's clock: fast exactly while something is pending that only time can bring about."""

import pytest
from msgspec import structs

from kite_arbitrator import core, pace
from kite_arbitrator.records import Freeze, Hold, OpenOrder, Pressure, Turn
from kite_arbitrator.state import State, current, put
from kite_arbitrator.testing import BASE, NODE, Story
from kite_schemas.why import Reason

FAST_US = 100_000
IDLE_US = 1_000_000
WINDOW_US = 137_000


@pytest.fixture
def quiet() -> State:
    """A pool that is up, and of which nothing is expected."""
    story = Story().up()
    story.wait(10 * IDLE_US)
    return structs.replace(story.state, holds={})


def at(state: State, us: int) -> int:
    return pace.tick_us(structs.replace(state, now_us=us))


def test_a_quiet_fleet_ticks_every_second(quiet: State):
    assert pace.tick_us(quiet) == IDLE_US


def test_before_the_first_policy_the_pace_is_the_slow_one():
    assert pace.tick_us(core.initial()) == IDLE_US
    assert pace.look_us(core.initial()) == IDLE_US


def test_the_pace_is_looked_at_as_often_as_it_can_be_fast(quiet: State):
    assert pace.look_us(quiet) == FAST_US


def test_a_policy_without_a_fast_tick_keeps_the_slow_one(quiet: State):
    policy = current(quiet)
    slow = policy.model_copy(update={"arbitration": policy.arbitration.model_copy(update={"tick_us": None})})
    pressed = put(structs.replace(quiet, policy=slow), Pressure(node=NODE, base=BASE, on=True))
    assert pace.tick_us(pressed) == IDLE_US


@pytest.mark.parametrize(
    ("pressure", "expected_us"),
    [
        (Pressure(node=NODE, base=BASE, on=True), FAST_US),
        (Pressure(node=NODE, base=BASE, on=True, below_us=5), FAST_US),
        (Pressure(node=NODE, base=BASE, above_us=5), FAST_US),
        (Pressure(node=NODE, base=BASE, below_us=5), IDLE_US),
    ],
    ids=["on", "about to end", "about to begin", "calm"],
)
def test_pressure_and_what_may_become_it_are_watched_closely(quiet: State, pressure: Pressure, expected_us: int):
    assert pace.tick_us(put(quiet, pressure)) == expected_us


def test_what_is_held_waits_for_its_cause_at_the_slow_pace(quiet: State):
    held = put(quiet, Hold(subject="channel/risk", reason=Reason.INPUT_ABSENT, pos=1, since_us=1))
    assert pace.tick_us(held) == IDLE_US


def test_what_was_discarded_is_taken_again_at_the_first_tick_after_the_window(quiet: State):
    begun_us = quiet.now_us
    turned = put(quiet, Turn(target="pressure/x", up=True, at_us=begun_us, pos=1))
    assert pace.tick_us(turned) == IDLE_US
    turned = put(quiet, Turn(target="pressure/x", up=True, at_us=begun_us, pos=1, discarded=True))
    assert at(turned, begun_us + WINDOW_US - 1) == FAST_US
    assert at(turned, begun_us + WINDOW_US + FAST_US - 1) == FAST_US, "the tick that takes it again is still to come"
    assert at(turned, begun_us + WINDOW_US + FAST_US) == IDLE_US


def order(expires_us: int) -> OpenOrder:
    return OpenOrder(
        id="o",
        type="kite.yoco.wake_ordered.v1",
        target="instance/a",
        node=NODE,
        instance="a",
        device=None,
        request=None,
        issued_us=0,
        expires_us=expires_us,
    )


def test_an_order_about_to_expire_and_one_that_has_are_watched_closely(quiet: State):
    due_us = quiet.now_us + 10 * IDLE_US
    ordered = put(quiet, order(due_us))
    assert at(ordered, due_us - IDLE_US - 1) == IDLE_US
    assert at(ordered, due_us - IDLE_US) == FAST_US
    assert at(ordered, due_us + 10 * IDLE_US) == FAST_US, "until the rule has ended it"


def test_a_freeze_about_to_end_is_watched_closely(quiet: State):
    due_us = quiet.now_us + 10 * IDLE_US
    frozen = structs.replace(quiet, freeze=Freeze(blend="risk", since_us=1, until_us=due_us, severity=1))
    assert at(frozen, due_us - IDLE_US - 1) == IDLE_US
    assert at(frozen, due_us - IDLE_US) == FAST_US


def test_a_back_off_is_watched_closely_about_its_end_only(quiet: State):
    due_us = quiet.now_us + 10 * IDLE_US
    instance = structs.replace(next(iter(quiet.instances.values())), retry_us=due_us)
    waiting = put(quiet, instance)
    assert at(waiting, due_us - IDLE_US - 1) == IDLE_US
    assert at(waiting, due_us - IDLE_US) == FAST_US
    assert at(waiting, due_us + FAST_US - 1) == FAST_US
    assert at(waiting, due_us + FAST_US) == IDLE_US


def test_with_very_slow_ticks_a_timer_is_seen_before_the_one_that_would_miss_it(quiet: State):
    policy = current(quiet)
    slower = policy.arbitration.model_copy(update={"idle_tick_us": 5 * IDLE_US})
    due_us = quiet.now_us + 10 * IDLE_US
    ordered = put(structs.replace(quiet, policy=policy.model_copy(update={"arbitration": slower})), order(due_us))
    assert at(ordered, due_us - 5 * IDLE_US - 1) == 5 * IDLE_US
    assert at(ordered, due_us - 5 * IDLE_US) == FAST_US
