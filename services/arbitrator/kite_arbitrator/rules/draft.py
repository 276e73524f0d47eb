"""What a rule returns, and the parts that every decision has in common."""

from collections.abc import Callable, Iterable

from msgspec import Struct

from kite_arbitrator.state import Instance, Row, State
from kite_schemas.model import Data
from kite_schemas.why import Candidate, InputAge, Reason, RuleValue, Why

CANDIDATES_SHOWN_MAX = 64


class Draft(Struct, frozen=True):
    """A decision without its place in the ledger."""

    subject: str
    data: Data


Rule = Callable[[State, Row], Iterable[Draft]]


def why(
    state: State,
    row: Row,
    reason: Reason,
    *,
    rules: Iterable[RuleValue] = (),
    candidates: Iterable[Candidate] = (),
    inputs: Iterable[InputAge] = (),
) -> Why:
    """Return the account of one decision: its cause is the row, its policy the one in force."""
    return Why(
        reason=reason,
        rules=tuple(rules),
        candidates=tuple(candidates)[:CANDIDATES_SHOWN_MAX],
        causes=(row.pos,),
        inputs=tuple(inputs),
        policy=state.policy_digest or None,
    )


def within(state: State, span_us: int) -> dict[str, int]:
    """Return the time limits of an order that may take `span_us`: in ledger time, and in age by the broker's clock."""
    return {"expires_us": state.now_us + span_us, "ttl_us": span_us}


def at_most(name: str, value: int, threshold: int) -> RuleValue:
    """Return a rule that fires when the value is above its threshold; the margin is what is left."""
    return RuleValue(id=name, value=value, threshold=threshold, margin=threshold - value, fired=value > threshold)


def at_least(name: str, value: int, threshold: int) -> RuleValue:
    """Return a rule that fires when the value is below its threshold; the margin is what is above."""
    return RuleValue(id=name, value=value, threshold=threshold, margin=value - threshold, fired=value < threshold)


def seen(state: State, instance: Instance) -> InputAge:
    """Return the report about an instance that a decision read, with its age."""
    return age(state, f"instance/{instance.id}", instance.pos, instance.seen_us)


def age(state: State, name: str, pos: int, at_us: int) -> InputAge:
    """Return a fact that a decision read, with its age in ledger time."""
    return InputAge(id=name, pos=pos, age_us=max(0, state.now_us - at_us))
