"""The table of an instance's life: every state times every event."""

from itertools import product

import pytest

from kite_schemas.yoco import State
from kite_yoco.lifecycle import STEPS, Event, WrongState, step

LIVE = [state for state in State if state is not State.ABSENT]


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_every_event_either_leads_somewhere_or_is_refused(state: State, event: Event) -> None:
    if (state, event) in STEPS:
        assert step("a", state, event) is STEPS[state, event]
    else:
        with pytest.raises(WrongState, match=f"a is {state}: {event}") as caught:
            step("a", state, event)
        assert (caught.value.state, caught.value.event) == (state, event)


def test_an_instance_can_be_stopped_from_every_state() -> None:
    assert {step("a", state, Event.STOPPED) for state in State} == {State.ABSENT}


@pytest.mark.parametrize("state", LIVE)
def test_an_instance_can_fail_in_every_state_but_absence(state: State) -> None:
    assert step("a", state, Event.FAILED) is State.FAILED


def test_a_standby_goes_from_nothing_to_sleep_and_back() -> None:
    state = State.ABSENT
    for event in (
        Event.START,
        Event.ANSWERED,
        Event.WARMED,
        Event.DRAIN,
        Event.DRAINED,
        Event.PAUSED,
        Event.WAKE,
        Event.PROVEN,
    ):
        state = step("a", state, event)
    assert state is State.READY


def test_only_what_is_drained_sleeps_and_only_what_sleeps_wakes() -> None:
    assert [state for state in State if (state, Event.PAUSED) in STEPS] == [State.DRAINING]
    assert [state for state in State if (state, Event.WAKE) in STEPS] == [State.ASLEEP]


def test_drained_is_a_step_onto_itself() -> None:
    assert step("a", State.DRAINING, Event.DRAINED) is State.DRAINING


def test_every_state_can_be_reached() -> None:
    assert set(STEPS.values()) == set(State)
