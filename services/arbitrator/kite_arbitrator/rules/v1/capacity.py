"""Capacity by need: a standby is woken under pressure or when a blend turns to it, and sleeps when it is quiet."""

from collections.abc import Iterable, Iterator

from msgspec import structs

from kite_arbitrator.records import Instance, Row, pool_subject
from kite_arbitrator.rules.draft import Draft, reached, seen, why, windows
from kite_arbitrator.rules.v1.fleet import drain_order
from kite_arbitrator.rules.v1.handover import against, patience_us, ready_order
from kite_arbitrator.rules.v1.paths import Way, fastest, wake_busy, way
from kite_arbitrator.rules.v1.pressure import pressed_pool, undecided
from kite_arbitrator.state import State, busy, current, instances_of, lost_node, pool_of, put, reachable, stale
from kite_schemas.arbitration import Channel, Held
from kite_schemas.ledger import Tick
from kite_schemas.policy import Pool
from kite_schemas.why import Candidate, Reason, Why
from kite_schemas.yoco import State as Life

OLD = "the node's windows are too old to act on"


def grow(state: State, row: Row) -> Iterator[Draft]:
    """Wake the fastest standby of every pool that needs one and has none awake; hold what cannot be, with the reason.

    Under pressure a prewarmed spare is started when no standby is left.
    """
    for pool, need in _needs(state, row):
        ways = [way(state, i, _reason(state, i, need)) for i in instances_of(state, pool) if i.standby]
        able = [one for one in ways if one.reason is need]
        asleep = [one for one in able if one.instance.state is Life.ASLEEP]
        chosen = fastest(asleep or able)
        candidates = [one.candidate(chosen) for one in ways]
        if stale(state, pool.node):
            unchosen = [one.candidate(None) for one in ways]
            yield _held(state, row, pool, Reason.STALE, OLD, candidates=unchosen)
        elif chosen is None:
            yield _held(state, row, pool, Reason.NO_STANDBY, "no standby is asleep and free", candidates=candidates)
        else:
            inputs = [seen(state, chosen.instance), *windows(state, pool.node)]
            yield _ordered(state, chosen, why(state, row, need, candidates=candidates, inputs=inputs))
            state = put(state, structs.replace(chosen.instance, state=Life.WAKING))  # for the pools that follow


def _ordered(state: State, chosen: Way, account: Why) -> Draft:
    """Return the order: a need is met as fast as it can be, in time or not."""
    deadline_us = patience_us(state, chosen, current(state).yoco.cold_start_deadline_us)
    return ready_order(state, chosen, account, deadline_us=deadline_us)


def shrink(state: State, row: Row) -> Iterator[Draft]:
    """Let a standby that was woken by need drain and sleep when its pool has been quiet for long enough."""
    idle_us = current(state).arbitration.idle_us
    if not isinstance(row.data, Tick) or idle_us is None:
        return
    for pool, instance in _idle(state):
        rule = reached("arbitration.idle_us", state.now_us - _busy_until_us(state, pool, instance), idle_us)
        if not rule.fired:
            continue
        if state.degraded:
            yield _held(state, row, pool, Reason.DEGRADED, "nothing is put to sleep until the gap is acknowledged")
        elif stale(state, pool.node):
            yield _held(state, row, pool, Reason.STALE, OLD)
        else:
            inputs = [seen(state, instance), *windows(state, pool.node)]
            yield drain_order(state, instance, why(state, row, Reason.IDLE, rules=[rule], inputs=inputs))


def _needs(state: State, row: Row) -> Iterator[tuple[Pool, Reason]]:
    """Yield the pools that need a standby awake and have none, and why; a window brings that about by decisions only.

    A base that is on the YOCO channel needs one standby anywhere: the pressure of one of its pools wakes it too.
    """
    if undecided(state, row):
        return
    turned = _on_yoco(state)
    for pool in current(state).fleet.pools if state.pressing else ():
        if (
            pressed_pool(state, pool)
            and not lost_node(state, pool.node)
            and not _awake(state, instances_of(state, pool))
        ):
            if _able(state, pool):
                turned.discard(pool.spec.served_name)
            yield pool, Reason.PRESSURE
    for base in sorted(turned):
        if not _awake(state, (i for i in state.instances.values() if i.base == base)):
            yield from ((pool, Reason.CHANNEL_YOCO) for pool in _first(state, base))


def _awake(state: State, instances: Iterable[Instance]) -> bool:
    """Tell whether one of the instances is a woken standby that can be reached."""
    return any(instance.summoned and not lost_node(state, instance.node) for instance in instances)


def _first(state: State, base: str) -> list[Pool]:
    """Return the first pool of a base that can be reached: fresh and with a standby that can be woken, if there is one.

    It is none when no pool of the base can be reached.
    """
    return sorted(reachable(state, base), key=lambda pool: not _able(state, pool))[:1]


def _able(state: State, pool: Pool) -> bool:
    standbys = (instance for instance in instances_of(state, pool) if instance.standby)
    rests = any(_reason(state, instance, Reason.ASKED) is Reason.ASKED for instance in standbys)
    return rests and not stale(state, pool.node)


def _on_yoco(state: State) -> set[str]:
    """Return the bases with a blend on the YOCO channel."""
    names = (name for name, selected in state.channels.items() if selected.channel is Channel.YOCO)
    return {state.blends[name].base for name in names if name in state.blends}


def _reason(state: State, instance: Instance, need: Reason) -> Reason:
    """Return what stands against making a standby ready, the need itself when nothing does."""
    if need is Reason.PRESSURE and instance.state is Life.PREWARMED and not instance.parked:
        return against(state, instance) or need
    if instance.state is not Life.ASLEEP:
        return Reason.NO_STANDBY
    if instance.parked:
        return Reason.PARKED
    if busy(state, instance.id):
        return Reason.TARGET_BUSY
    if instance.retry_us > state.now_us:
        return Reason.BACKED_OFF
    return Reason.DEVICE_BUSY if wake_busy(state, instance) else need


def _idle(state: State) -> Iterator[tuple[Pool, Instance]]:
    """Yield the woken standbys that nothing needs: nobody asked for them, and no injection counts on them."""
    awake = [i for i in state.instances.values() if i.summoned and not i.asked and i.state is Life.READY]
    if not awake:
        return
    targets = {name for injection in state.injections.values() for name in injection.targets}
    turned = _on_yoco(state)
    for instance in sorted(awake, key=lambda i: i.id):
        pool = pool_of(state, instance.node, instance.base)
        if pool is None or pressed_pool(state, pool) or instance.base in turned:
            continue
        if instance.id not in targets and not busy(state, instance.id):
            yield pool, instance


def _busy_until_us(state: State, pool: Pool, instance: Instance) -> int:
    """Return until when the standby was needed, or was last reported about."""
    base = pool.spec.served_name
    found = state.pressures.get(pool_subject(pool.node, base))
    names = (name for name, blend in state.blends.items() if blend.base == base)
    channels = [state.channels[name].since_us for name in names if name in state.channels]
    return max([instance.seen_us, found.since_us if found else 0, *channels])


def _held(
    state: State, row: Row, pool: Pool, reason: Reason, detail: str, *, candidates: Iterable[Candidate] = ()
) -> Draft:
    account = why(state, row, reason, candidates=candidates, inputs=windows(state, pool.node))
    return Draft(f"capacity/{pool.node}.{pool.spec.served_name}", Held(detail=detail, why=account))
