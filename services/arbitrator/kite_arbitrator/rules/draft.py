"""What a rule returns, and the parts that every decision has in common."""

from collections.abc import Callable, Iterable
from typing import TypedDict

from msgspec import Struct

from kite_arbitrator.records import Feed, Instance, Row
from kite_arbitrator.state import State, current
from kite_schemas.guard import ComparisonRequested
from kite_schemas.model import Data
from kite_schemas.policy import Pool
from kite_schemas.telemetry import Window
from kite_schemas.why import Candidate, Fact, InputAge, Reason, RuleValue, Why
from kite_schemas.yoco import DrainRequested, InstanceChanged, InstanceReady, NodeRegistered, OrderRequested

CANDIDATES_SHOWN_MAX = 64


class Draft(Struct, frozen=True):
    """A decision without its place in the ledger."""

    subject: str
    data: Data


class Limits(TypedDict):
    """The time limits of an order."""

    expires_us: int
    ttl_us: int


Rule = Callable[[State, Row], Iterable[Draft]]
Gate = Callable[[State, Row, Draft], Draft | None]


class Rules(Struct, frozen=True, kw_only=True):
    """One version: the rules to ask at a window, at every other row, and what their drafts have to pass."""

    on_window: tuple[Rule, ...]
    on_all_else: tuple[Rule, ...]
    admit: Gate


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


def within(state: State, span_us: int) -> Limits:
    """Return the time limits of an order that may take `span_us`: in ledger time, and in age by the broker's clock."""
    return {"expires_us": state.now_us + span_us, "ttl_us": span_us}


def at_most(name: str, value: int, threshold: int) -> RuleValue:
    """Return a rule that fires when the value is above its threshold; the margin is what is left."""
    return RuleValue(id=name, value=value, threshold=threshold, margin=threshold - value, fired=value > threshold)


def at_least(name: str, value: int, threshold: int) -> RuleValue:
    """Return a rule that fires when the value is below its threshold; the margin is what is above."""
    return RuleValue(id=name, value=value, threshold=threshold, margin=value - threshold, fired=value < threshold)


def reached(name: str, value: int, threshold: int) -> RuleValue:
    """Return a rule that fires when the value has reached its threshold; the margin is what is missing."""
    return RuleValue(id=name, value=value, threshold=threshold, margin=threshold - value, fired=value >= threshold)


def asked(state: State, row: Row) -> tuple[Pool, ...]:
    """Return the pools that a row may change something for: those of the node that a fact is about, else all.

    What a fact changes for other nodes follows at the next tick: so it costs the same in any fleet. A request for one
    instance or one comparison has a rule of its own.
    """
    match row.data:
        case Fact() as fact:
            return state.pools.get(_node(state, fact), ())
        case OrderRequested() | DrainRequested() | ComparisonRequested():
            return ()
        case _:
            return current(state).fleet.pools


def _node(state: State, fact: Fact) -> str:
    if isinstance(fact, Window | NodeRegistered | InstanceChanged | InstanceReady):
        return fact.node
    instance = state.instances.get(getattr(fact, "instance", ""))
    return instance.node if instance else ""


def bases(state: State, node: str) -> frozenset[str]:
    """Return the bases that the pools of a node serve."""
    return frozenset(pool.spec.served_name for pool in state.pools.get(node, ()))


def seen(state: State, instance: Instance) -> InputAge:
    """Return the report about an instance that a decision read, with its age."""
    return age(state, f"instance/{instance.id}", instance.pos, instance.seen_us)


def heard(state: State, feed: Feed) -> InputAge:
    """Return the newest window of a node that a decision read, with its age since it was sampled."""
    return age(state, f"window/{feed.node}", feed.pos, feed.seen_us - feed.lag_us - feed.held_us)


def windows(state: State, node: str) -> list[InputAge]:
    """Return the newest window of a node as the input of a decision; none when it has sent none."""
    feed = state.feeds.get(node)
    return [heard(state, feed)] if feed and feed.pos else []


def age(state: State, name: str, pos: int, at_us: int) -> InputAge:
    """Return a fact that a decision read, with its age in ledger time."""
    return InputAge(id=name, pos=pos, age_us=max(0, state.now_us - at_us))
