"""The guard's breaker: compare what should answer alike, stop admissions on a conflict, and end that stop again."""

from collections.abc import Iterator

from kite_arbitrator.folds.guard import blend_of
from kite_arbitrator.records import Blend, Freeze, Instance, Row, Watch
from kite_arbitrator.rules.draft import Draft, age, at_most, seen, why
from kite_arbitrator.rules.v1.comparison import occasion, ordered
from kite_arbitrator.rules.v1.loads import load
from kite_arbitrator.state import State, busy, current, lost_node, members, serving, watch_of
from kite_schemas.arbitration import Held
from kite_schemas.guard import Compared, ComparisonOrdered, MeasurementOrdered
from kite_schemas.upcycle import Frozen, Unfrozen
from kite_schemas.why import Reason, RuleValue

PEERS = 2
COMPARING = frozenset({ComparisonOrdered.TYPE, MeasurementOrdered.TYPE})


def trip(state: State, row: Row) -> Iterator[Draft]:
    """Freeze on a conflict, and have every woken standby load and prove the newest version of every blend again."""
    data = row.data
    if not isinstance(data, Compared) or not current(state).guard.enabled:
        return
    blend = blend_of(state, data.model)
    rule = _rule(state, data.kl_micronats)
    if blend is None or not rule.fired:
        return
    until_us = state.now_us + current(state).guard.freeze_us
    severity = state.freeze.severity + 1 if state.freeze else 1
    account = why(state, row, Reason.SEMANTIC_CONFLICT, rules=[rule])
    yield Draft(f"blend/{blend}", Frozen(blend=blend, until_us=until_us, severity=severity, why=account))
    yield from _reload(state, row)


def _reload(state: State, row: Row) -> Iterator[Draft]:
    """One load per instance: what else it lacks follows as repairs."""
    for instance in sorted(state.instances.values(), key=lambda i: i.id):
        newest = [state.blends[name].resident for name in sorted(state.blends) if _holds(instance, state.blends[name])]
        heard = not lost_node(state, instance.node)
        if instance.standby and serving(instance) and heard and newest and not busy(state, instance.id):
            yield load(state, row, instance, newest[0], None)


def _holds(instance: Instance, blend: Blend) -> bool:
    return blend.base == instance.base and blend.resident.version in instance.versions


def watch(state: State, row: Row) -> Iterator[Draft]:
    """Compare the blend that is due first: after its promotion, at the end of a freeze, and at every interval."""
    if not current(state).guard.enabled or _comparing(state):
        return
    due = [known for name in sorted(state.blends) if (known := watch_of(state, name)).due_us <= state.now_us]
    for known in sorted(due, key=lambda known: known.due_us):
        blend = state.blends[known.blend]
        peers = _peers(state, blend)
        if len(peers) >= PEERS:
            yield _compare(state, row, blend, peers)
            return  # one at a time: the others are due still
        if not known.lonely:
            detail = f"no two ready instances hold {blend.resident.version}"
            yield Draft(f"blend/{known.blend}", Held(detail=detail, why=why(state, row, Reason.NO_PEER)))


def _peers(state: State, blend: Blend) -> list[Instance]:
    """Return the ready instances to compare, two where there are two that hold the promoted version.

    Those of one node are preferred, and as the second a woken standby: it is what a conflict has loaded anew.
    """
    found = [i for i in members(state, blend.base) if serving(i) and _holds(i, blend) and not lost_node(state, i.node)]
    holders = sorted(found, key=lambda i: (i.standby, i.id))
    for holder in holders:
        mates = [other for other in holders if other.node == holder.node]
        if len(mates) >= PEERS:
            return [mates[0], mates[-1]]
    return [holders[0], holders[-1]] if len(holders) >= PEERS else holders


def _compare(state: State, row: Row, blend: Blend, peers: list[Instance]) -> Draft:
    (first, second), version = peers, blend.resident.version
    account = why(state, row, occasion(state, version), inputs=[seen(state, first), seen(state, second)])
    return ordered(state, first, second, version, account)


def thaw(state: State, row: Row) -> Iterator[Draft]:
    """End a freeze whose time has passed: with the verdict that followed it, or without one when none can be had."""
    freeze = state.freeze
    if freeze is None or state.now_us < freeze.until_us or _comparing(state):
        return
    known = watch_of(state, freeze.blend)
    if current(state).guard.enabled and known.ordered_us < freeze.until_us and not known.lonely:
        return  # the comparison at its end has not been ordered yet
    yield _unfrozen(state, row, freeze, known)


def _unfrozen(state: State, row: Row, freeze: Freeze, known: Watch) -> Draft:
    agreed = known.verdict_us >= freeze.until_us
    account = why(
        state,
        row,
        Reason.AGREEMENT if agreed else Reason.NO_VERDICT,
        rules=[_rule(state, known.kl_micronats)] if agreed else [],
        inputs=[age(state, f"comparison/{freeze.blend}", known.pos, known.verdict_us)] if agreed else [],
    )
    return Draft(
        f"blend/{freeze.blend}",
        Unfrozen(blend=freeze.blend, lasted_us=state.now_us - freeze.since_us, why=account),
    )


def _rule(state: State, kl_micronats: int) -> RuleValue:
    return at_most("guard.kl_max_micronats", kl_micronats, current(state).guard.kl_max_micronats)


def _comparing(state: State) -> bool:
    return any(order.type in COMPARING for order in state.orders.values())
