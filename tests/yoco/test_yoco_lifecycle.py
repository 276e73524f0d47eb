"""The table of an instance's life: every state times every event."""

from itertools import product

import pytest

from kite_schemas.yoco import State
from kite_yoco import diagram
from kite_yoco.lifecycle import STEPS, Event, WrongState, step


def step_of(state: State, event: Event) -> State | None:
    return STEPS.get((state, event))


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
    assert [state for state in State if step_of(state, Event.PAUSED) not in (None, state)] == [State.DRAINING]
    assert [state for state in State if (state, Event.WAKE) in STEPS] == [State.ASLEEP]


def test_a_prewarmed_spare_is_held_before_it_is_started() -> None:
    state = State.ABSENT
    for event in (Event.PREWARM, Event.HELD, Event.START, Event.ANSWERED, Event.WARMED):
        state = step("a", state, event)
    assert state is State.READY
    assert [one for one in State if step_of(one, Event.PREWARM)] == [State.ABSENT, State.FAILED]


def test_an_effect_that_is_missing_quarantines_what_would_be_ready() -> None:
    found = {state for state in State if step_of(state, Event.UNPROVEN) is State.QUARANTINED}
    assert found == {State.WARMING, State.READY, State.WAKING}


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.DRAINING, Event.DRAINED),
        (State.ASLEEP, Event.PAUSED),
        (State.PREWARMED, Event.HELD),
        (State.ABSENT, Event.STOPPED),
    ],
)
def test_what_is_so_already_is_a_step_onto_itself(state: State, event: Event) -> None:
    assert step("a", state, event) is state


def test_every_state_can_be_reached() -> None:
    assert set(STEPS.values()) == set(State)


def test_the_diagram_has_every_state_and_every_step_that_leads_on() -> None:
    text = diagram.page()
    assert set(diagram.MEANINGS) == set(State)
    drawn = {line.strip() for line in text.splitlines() if " --> " in line}
    led = {f"{a} --> {b}: {e}" for (a, e), b in STEPS.items() if a is not b and e not in diagram.ENDS}
    assert drawn == led | {"[*] --> absent"}
    assert all(f"| `{event}` |" in text for event in Event)
