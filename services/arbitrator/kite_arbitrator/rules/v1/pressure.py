"""Pressure of a pool, and what it does to the weights of new injections; shedding when memory fragments meanwhile."""

from bisect import bisect_right
from collections.abc import Iterator

from kite_arbitrator.folds.pressure import RATE_SPAN_US
from kite_arbitrator.records import Pressure, Row, pool_subject
from kite_arbitrator.rules.draft import Draft, asked, at_least, at_most, reached, why, windows
from kite_arbitrator.rules.v1.gate import said
from kite_arbitrator.state import State, current, decay_of, lost_node, pool_of, pressing, stale
from kite_schemas.arbitration import Held, PressureChanged
from kite_schemas.model import PPM
from kite_schemas.policy import Pool
from kite_schemas.telemetry import Window
from kite_schemas.upcycle import DecaySet
from kite_schemas.why import Reason, RuleValue
from kite_schemas.yoco import PATHS, Path, PrewarmBlocked, PrewarmReleased

UNHEARD_US = 60_000_000
"""Pressure of which nothing was heard for so long is over: what is not known cannot go on for ever."""

HYSTERESIS_PPM = 50_000
"""How far below its limit fragmentation has to fall until shedding ends."""

PER_MINUTE_MILLI = 1_000 * RATE_SPAN_US // 60_000_000


def press(state: State, row: Row) -> Iterator[Draft]:
    """Say that a pool is under pressure: long above its concurrency, and missing its cache more than before."""
    for pool in asked(state, row):
        found = state.pressures.get(pool_subject(pool.node, pool.spec.served_name))
        if found is None or found.on or found.above_us is None or stale(state, pool.node):
            continue
        rules = _rules_on(state, found, found.above_us)
        if rules and all(rule.fired for rule in rules):
            lasted_us = state.now_us - found.above_us
            yield _changed(state, row, found, Reason.SUSTAINED, rules, lasted_us=lasted_us, on=True)


def relax(state: State, row: Row) -> Iterator[Draft]:
    """End the pressure that is over, or of which nothing can be known any more; of the others say what reserve is."""
    for found in _pressing(state, row):
        reason, rules = _relief(state, found)
        if reason is None:
            yield from _reserve(state, row, found)
        else:
            lasted_us = state.now_us - found.since_us
            yield _changed(state, row, found, reason, rules, lasted_us=lasted_us, on=False)


def shed(state: State, row: Row) -> Iterator[Draft]:
    """Start no standby while memory is fragmented and injections come fast; their weights decay as under pressure."""
    limits = _shed_limits(state)
    if limits is None or _rate_milli(state) <= limits[1]:
        return
    for node in sorted({pool.node for pool in asked(state, row)} - state.blocks.keys()):
        rules = _shed_rules(state, node)
        if rules and not stale(state, node) and all(rule.fired for rule in rules):
            account = why(state, row, Reason.SHEDDING, rules=rules, inputs=windows(state, node))
            yield Draft(f"node/{node}", PrewarmBlocked(node=node, why=account))


def release(state: State, row: Row) -> Iterator[Draft]:
    """Start standbys again when memory has room with a margin, injections are slow, or nothing is known of the node."""
    for node in _blocked(state, row):
        rules = _shed_rules(state, node, HYSTERESIS_PPM)
        if rules and rules[1].fired and (rules[0].fired or stale(state, node)):
            continue  # a stale window says nothing about memory
        account = why(state, row, _why_released(state, rules), rules=rules, inputs=windows(state, node))
        lasted_us = state.now_us - state.blocks[node]
        yield Draft(f"node/{node}", PrewarmReleased(node=node, lasted_us=lasted_us, why=account))


def decay(state: State, row: Row) -> Iterator[Draft]:
    """Set the factor on free members of each base to the one of pressure, and back."""
    if undecided(state, row):
        return
    for base in _decaying(state):
        wanted, reason = _wanted(state, base)
        former = decay_of(state, base)
        if wanted != former:
            account = why(state, row, reason, rules=[at_least("upcycle.weight_decay_ppm", wanted, former)])
            yield Draft(f"base/{base}", DecaySet(base=base, decay_ppm=wanted, why=account))


def undecided(state: State, row: Row) -> bool:
    """Tell whether the row is a window about which nothing was decided: what follows from decisions is as it was."""
    return isinstance(row.data, Window) and state.pos == row.pos


def shedding(state: State, base: str) -> bool:
    """Tell whether a node with a pool of the base sheds."""
    return any(pool.spec.served_name == base for node in state.blocks for pool in state.pools.get(node, ()))


def pressed_pool(state: State, pool: Pool) -> bool:
    """Tell whether a pool is under pressure."""
    found = state.pressures.get(pool_subject(pool.node, pool.spec.served_name))
    return found is not None and found.on


def pressed(state: State, base: str) -> bool:
    """Tell whether a pool of the base is under pressure."""
    return any(state.pressures[subject].base == base for subject in state.pressing)


def _pressing(state: State, row: Row) -> list[Pressure]:
    """Return the pressures that are on, by id: at a window those of its node."""
    found = pressing(state)
    return [one for one in found if one.node == row.data.node] if isinstance(row.data, Window) else found


def _blocked(state: State, row: Row) -> list[str]:
    """Return the nodes that shed, by name: at a window only its own."""
    if isinstance(row.data, Window):
        return [row.data.node] if row.data.node in state.blocks else []
    return sorted(state.blocks)


def _why_released(state: State, rules: list[RuleValue]) -> Reason:
    if rules:
        return Reason.CALM
    return Reason.POLICY_CHANGED if _shed_limits(state) is None else Reason.INPUT_ABSENT


def _decaying(state: State) -> list[str]:
    """Return the bases whose factor may have to change, by name: those under pressure, that shed, or that did."""
    pressed_by = {found.base for found in pressing(state)}
    shed_by = {pool.spec.served_name for node in state.blocks for pool in state.pools.get(node, ())}
    return sorted(pressed_by | shed_by | set(state.decays))


def _rules_on(state: State, found: Pressure, above_us: int) -> list[RuleValue]:
    """Return the rules of pressure; none when a limit is unset or the jump is not known."""
    limits = current(state).arbitration
    if limits.concurrency_max is None or limits.sustained_us is None or limits.miss_jump_ppm is None:
        return []
    if found.jump_ppm is None:
        return []
    return [
        at_most("arbitration.concurrency_max", found.in_flight, limits.concurrency_max),
        reached("arbitration.sustained_us", state.now_us - above_us, limits.sustained_us),
        at_most("arbitration.miss_jump_ppm", found.jump_ppm, limits.miss_jump_ppm),
    ]


def _relief(state: State, found: Pressure) -> tuple[Reason | None, list[RuleValue]]:
    """Return why a pressure is over, None while it goes on."""
    limits = current(state).arbitration
    if limits.concurrency_max is None or limits.sustained_us is None or pool_of(state, found.node, found.base) is None:
        return Reason.POLICY_CHANGED, []
    if lost_node(state, found.node):
        return Reason.NODE_LOST, []
    unheard_us = state.now_us - found.heard_us
    if unheard_us >= UNHEARD_US:
        return Reason.INPUT_ABSENT, [reached("pressure.unheard_us", unheard_us, UNHEARD_US)]
    below_us = 0 if found.below_us is None else state.now_us - found.below_us
    if below_us < limits.sustained_us or stale(state, found.node):
        return None, []
    concurrency = at_most("arbitration.concurrency_max", found.in_flight, limits.concurrency_max)
    if concurrency.fired:  # the limit is another one than that which was kept
        return None, []
    return Reason.CALM, [concurrency, reached("arbitration.sustained_us", below_us, limits.sustained_us)]


def _changed(
    state: State, row: Row, found: Pressure, reason: Reason, rules: list[RuleValue], *, lasted_us: int, on: bool
) -> Draft:
    account = why(state, row, reason, rules=rules, inputs=windows(state, found.node))
    return Draft(found.id, PressureChanged(node=found.node, base=found.base, on=on, lasted_us=lasted_us, why=account))


def _reserve(state: State, row: Row, found: Pressure) -> Iterator[Draft]:
    """Say how many standbys are to be on the hot path, where the pool has them sleep on it: then all are already."""
    subject = f"reserve/{found.node}.{found.base}"
    share_ppm, pool = current(state).yoco.reserve_pressure_ppm, pool_of(state, found.node, found.base)
    if share_ppm is None or pool is None or not pool.standbys or PATHS[pool.standby_mode] is not Path.HOT:
        return
    if said(state, subject, Reason.ALREADY_HOT):
        return
    wanted = -(-pool.standbys * share_ppm // PPM)
    rule = at_least("yoco.reserve_pressure_ppm", pool.standbys, wanted)
    detail = f"{wanted} of {pool.standbys} standbys are to be on the hot path, and all are"
    account = why(state, row, Reason.ALREADY_HOT, rules=[rule])
    yield Draft(subject, Held(detail=detail, why=account))


def _shed_limits(state: State) -> tuple[int, int] | None:
    limits = current(state).arbitration
    if limits.fragmentation_max_ppm is None or limits.injection_rate_max_milli is None:
        return None
    return limits.fragmentation_max_ppm, limits.injection_rate_max_milli


def _shed_rules(state: State, node: str, margin_ppm: int = 0) -> list[RuleValue]:
    """Return the two rules of shedding, both fired while it is due; none when a limit or the value is not known."""
    limits, feed = _shed_limits(state), state.feeds.get(node)
    if limits is None or feed is None or feed.fragmentation_ppm is None:
        return []
    fragmentation_max_ppm, rate_max_milli = limits
    threshold_ppm = max(0, fragmentation_max_ppm - margin_ppm)
    return [
        at_most("arbitration.fragmentation_max_ppm", feed.fragmentation_ppm, threshold_ppm),
        at_most("arbitration.injection_rate_max_milli", _rate_milli(state), rate_max_milli),
    ]


def _rate_milli(state: State) -> int:
    """Return how many injections are asked for in 1 000 minutes, at the pace of the last one."""
    times_us = state.requested_us
    return (len(times_us) - bisect_right(times_us, state.now_us - RATE_SPAN_US)) * PER_MINUTE_MILLI


def _wanted(state: State, base: str) -> tuple[int, Reason]:
    upcycle = current(state).upcycle
    if upcycle.weight_decay_pressure_ppm is not None:
        if pressed(state, base):
            return upcycle.weight_decay_pressure_ppm, Reason.PRESSURE
        if shedding(state, base):
            return upcycle.weight_decay_pressure_ppm, Reason.SHEDDING
    return upcycle.weight_decay_ppm, Reason.CALM
