"""Capacity on request: one more ready instance, or one taken out of service."""

from dataclasses import dataclass

from kite_cli.asking.following import Closes, Story, Told, ask, make
from kite_cli.asking.request import closes, obstacle
from kite_cli.place import Address
from kite_schemas.arbitration import Held
from kite_schemas.envelope import Event
from kite_schemas.why import Reason
from kite_schemas.yoco import (
    DrainRequested,
    InstanceChanged,
    InstanceReady,
    OrderRefused,
    OrderRequested,
    SleepOrdered,
    StartOrdered,
    State,
    WakeOrdered,
)

HANDOVER_S = 60.0
"""Silence that is still normal; while an order is open it may be as long as the order lives (a start: minutes)."""

DRAINED = frozenset({State.ASLEEP, State.ABSENT, State.FAILED})
"""Where a drain can end."""

STUCK = frozenset({Reason.MODE_UNSUPPORTED, Reason.DEGRADED, Reason.STALE, Reason.NODE_LOST})
"""Why a drained instance stays where it is: nothing more comes of the request until that has changed."""


@dataclass(frozen=True, slots=True)
class Handover:
    """How an order for capacity ended: with `ready`, or with the reason why not. `took_us` is ledger time."""

    story: Story
    ready: InstanceReady | None
    deadline_us: int
    took_us: int
    code: str
    detail: str

    @property
    def ok(self) -> bool:
        """Whether one more instance is ready."""
        return self.ready is not None

    @property
    def expected_us(self) -> int | None:
        """What the fastest path would take, when none meets the deadline; None when that is not why."""
        held = self.story.last(Held)
        if held is None or held.why.reason is not Reason.DEADLINE_UNREACHABLE or self.ok:
            return None
        return next((rule.value for rule in held.why.rules), None)

    @property
    def in_time(self) -> bool:
        """Whether it was ready before its deadline, from the order to the first token, by the ledger's clock."""
        return self.ready is not None and self.took_us <= self.deadline_us


@dataclass(frozen=True, slots=True)
class Drain:
    """How a drain ended: `state` is where the instance is then, `mode` how it sleeps if it does."""

    story: Story
    instance: str
    state: State | None
    mode: str | None
    code: str
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the instance is out of service."""
        return self.state in (State.ASLEEP, State.ABSENT)


async def order(
    fleet: Address,
    base: str,
    *,
    instance: str | None = None,
    deadline_us: int | None = None,
    late: bool = False,
    reason: str = "",
    on_event: Told | None = None,
) -> Handover:
    """Ask for one more ready instance of a base and follow it until its first token.

    None is the policy's deadline; `late` takes the fastest path even if it cannot meet it. Raises what `ask` raises.
    """
    request = make(OrderRequested, reason, base=base, instance=instance, deadline_us=deadline_us, late=late)
    story = await ask(fleet, f"base/{base}", request, answers, limit_s=HANDOVER_S, on_event=on_event)
    ready = story.last(InstanceReady)
    began_us, ended_us = _ordered_us(story), story.at_us(InstanceReady)
    code, said = obstacle(story)
    return Handover(
        story=story,
        ready=ready,
        deadline_us=_deadline_us(story),
        took_us=ended_us - began_us if began_us is not None and ended_us is not None else 0,
        code=code,
        detail=said,
    )


def answers(event: Event) -> bool:
    """Tell whether an event ends an order; when a worker would be late, the arbitrator looks for another one."""
    refused = isinstance(event.data, OrderRefused) and event.data.code == Reason.DEADLINE_UNREACHABLE
    return closes(event) and not refused


def _ordered_us(story: Story) -> int | None:
    """Return when the order that answers the request was decided: a wake, or a start."""
    woken_us = story.at_us(WakeOrdered)
    return story.at_us(StartOrdered) if woken_us is None else woken_us


def _deadline_us(story: Story) -> int:
    """Return the deadline of the order that answers the request, 0 without one."""
    found = story.last(WakeOrdered) or story.last(StartOrdered)
    return (found.deadline_us or 0) if found else 0


async def drain(
    fleet: Address, instance: str, *, force: bool = False, reason: str = "", on_event: Told | None = None
) -> Drain:
    """Take an instance out of service and follow it until it sleeps. Raises what `ask` raises."""
    request = make(DrainRequested, reason, instance=instance, force=force)
    story = await ask(fleet, f"instance/{instance}", request, rested(instance), limit_s=HANDOVER_S, on_event=on_event)
    return _drain(story, instance)


def rested(instance: str) -> Closes:
    """Return what tells the end of a drain: the instance rests, or it is said why it does not."""

    def is_last(event: Event) -> bool:
        match event.data:
            case InstanceChanged(instance=name, to_state=state):
                return name == instance and state in DRAINED
            case Held(why=why, request=request):
                return request == event.header.correlationid or why.reason in STUCK
            case _:
                return closes(event)

    return is_last


def _drain(story: Story, instance: str) -> Drain:
    last, slept = story.facts[-1].event.data, story.last(SleepOrdered)
    code, said = obstacle(story)
    state = last.to_state if isinstance(last, InstanceChanged) else None
    if isinstance(last, InstanceChanged) and state is State.FAILED:
        code, said = last.code, last.message or f"{instance} failed while it was drained"
    mode = slept.mode if slept is not None and state is State.ASLEEP else None
    return Drain(story=story, instance=instance, state=state, mode=mode, code=code, detail=said)
