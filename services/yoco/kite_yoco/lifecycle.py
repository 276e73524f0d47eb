"""The life of an instance: one literal table, and nothing else decides where a step leads."""

from collections.abc import Mapping
from enum import StrEnum

from kite.errors import KiteError
from kite_schemas.yoco import State


class Event(StrEnum):
    """What can happen to an instance."""

    PREWARM = "prewarm"
    HELD = "held"  # the process has done all that needs no weights, and waits
    START = "start"
    ANSWERED = "answered"  # the process answers its health check
    WARMED = "warmed"  # a token came out of the base
    DRAIN = "drain"
    DRAINED = "drained"  # no request runs or waits
    PAUSED = "paused"  # asleep, in whatever mode
    WAKE = "wake"
    PROVEN = "proven"  # awake, every resident loaded and proven
    RETURNED = "returned"  # the wake failed and the instance sleeps again
    UNPROVEN = "unproven"  # an effect is missing
    STOPPED = "stopped"
    FAILED = "failed"


STEPS: Mapping[tuple[State, Event], State] = {
    (State.ABSENT, Event.PREWARM): State.STARTING,
    (State.ABSENT, Event.START): State.STARTING,
    (State.ABSENT, Event.STOPPED): State.ABSENT,
    (State.STARTING, Event.HELD): State.PREWARMED,
    (State.STARTING, Event.ANSWERED): State.WARMING,
    (State.STARTING, Event.STOPPED): State.ABSENT,
    (State.STARTING, Event.FAILED): State.FAILED,
    (State.PREWARMED, Event.HELD): State.PREWARMED,
    (State.PREWARMED, Event.START): State.STARTING,
    (State.PREWARMED, Event.STOPPED): State.ABSENT,
    (State.PREWARMED, Event.FAILED): State.FAILED,
    (State.WARMING, Event.WARMED): State.READY,
    (State.WARMING, Event.UNPROVEN): State.QUARANTINED,
    (State.WARMING, Event.STOPPED): State.ABSENT,
    (State.WARMING, Event.FAILED): State.FAILED,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.READY, Event.UNPROVEN): State.QUARANTINED,
    (State.READY, Event.STOPPED): State.ABSENT,
    (State.READY, Event.FAILED): State.FAILED,
    (State.DRAINING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.DRAINED): State.DRAINING,
    (State.DRAINING, Event.PAUSED): State.ASLEEP,
    (State.DRAINING, Event.STOPPED): State.ABSENT,
    (State.DRAINING, Event.FAILED): State.FAILED,
    (State.ASLEEP, Event.PAUSED): State.ASLEEP,
    (State.ASLEEP, Event.WAKE): State.WAKING,
    (State.ASLEEP, Event.STOPPED): State.ABSENT,
    (State.ASLEEP, Event.FAILED): State.FAILED,
    (State.WAKING, Event.PROVEN): State.READY,
    (State.WAKING, Event.RETURNED): State.ASLEEP,
    (State.WAKING, Event.UNPROVEN): State.QUARANTINED,
    (State.WAKING, Event.STOPPED): State.ABSENT,
    (State.WAKING, Event.FAILED): State.FAILED,
    (State.FAILED, Event.PREWARM): State.STARTING,
    (State.FAILED, Event.START): State.STARTING,
    (State.FAILED, Event.STOPPED): State.ABSENT,
    (State.FAILED, Event.FAILED): State.FAILED,
    (State.QUARANTINED, Event.STOPPED): State.ABSENT,
    (State.QUARANTINED, Event.FAILED): State.FAILED,
}


class WrongState(KiteError):
    """The instance is in a state (`state`) in which `event` cannot happen."""

    code = "wrong_state"

    def __init__(self, instance: str, state: State, event: Event) -> None:
        super().__init__(f"{instance} is {state}: {event} is no step from there", hint="see `kite yoco instances`")
        self.instance = instance
        self.state = state
        self.event = event


def check(instance: str, state: State, event: Event) -> None:
    """Raise WrongState unless the event can happen: asked before an effect that the step will report."""
    if (state, event) not in STEPS:
        raise WrongState(instance, state, event)


def step(instance: str, state: State, event: Event) -> State:
    """Return the state that follows. Raises WrongState."""
    check(instance, state, event)
    return STEPS[state, event]
