"""How windows and decisions change the pressure of pools, channels, decays and blocks."""

from msgspec import structs

from kite_arbitrator.folds.samples import missed_ppm
from kite_arbitrator.records import Feed, Load, Pressure, Row, Selected, pool_subject
from kite_arbitrator.state import State, limit_us, put, serving, stale, with_item, without
from kite_schemas.arbitration import ChannelSelected, PressureChanged
from kite_schemas.policy import Pool
from kite_schemas.upcycle import DecaySet, InjectionRequested
from kite_schemas.yoco import PrewarmBlocked, PrewarmReleased

RATE_SPAN_US = 60_000_000
"""The rate of injections is that of the last minute."""

REQUESTED_MAX = 1_024
"""How many of them are remembered."""


def press(state: State, feed: Feed) -> State:
    """Hold the concurrency of the node's pools against its limit; a stale window says nothing about it."""
    if state.policy is None or state.policy.arbitration.concurrency_max is None or stale(state, feed.node):
        return state
    limit = state.policy.arbitration.concurrency_max
    for pool in state.pools.get(feed.node, ()):
        state = _pressed(state, feed, pool, limit)
    return state


def _pressed(state: State, feed: Feed, pool: Pool, limit: int) -> State:
    """Take in what the pool has in flight. Of an instance that is silent it is not known: the sum is the least then."""
    loads = serving_loads(state, feed, pool.spec.served_name)
    known = [load.in_flight for load in loads if load.in_flight is not None]
    in_flight, now_us = sum(known), state.now_us
    if not known or (in_flight <= limit and len(known) < len(loads)):
        return state
    former = _resumed(state, feed, pressure_of(state, pool))
    if in_flight > limit:
        jumps = (former.jump_ppm, missed_ppm(loads, now_us))
        moved = structs.replace(
            former,
            in_flight=in_flight,
            heard_us=now_us,
            above_us=now_us if former.above_us is None else former.above_us,
            below_us=None,
            jump_ppm=max((jump for jump in jumps if jump is not None), default=None),
        )
    else:
        below_us = now_us if former.below_us is None else former.below_us
        moved = structs.replace(
            former, in_flight=in_flight, heard_us=now_us, above_us=None, below_us=below_us, jump_ppm=None
        )
    return put(state, moved)


def _resumed(state: State, feed: Feed, former: Pressure) -> Pressure:
    """Take the time in which nothing fresh was heard off what has lasted: it does not extend a condition."""
    limit, unheard_us = limit_us(state, feed), state.now_us - former.heard_us
    if limit is None or unheard_us <= 2 * feed.interval_us + limit:
        return former
    above_us, below_us = former.above_us, former.below_us
    return structs.replace(
        former,
        above_us=None if above_us is None else above_us + unheard_us,
        below_us=None if below_us is None else below_us + unheard_us,
    )


def broken(state: State, node: str) -> State:
    """Forget how long the pools of a node have been above or below their limit: the node was lost, or began anew."""
    for pool in state.pools.get(node, ()):
        found = state.pressures.get(pool_subject(node, pool.spec.served_name))
        if found is not None:
            state = put(state, structs.replace(found, above_us=None, below_us=None, jump_ppm=None))
    return state


def serving_loads(state: State, feed: Feed, base: str) -> list[Load]:
    """Return what the node's ready instances of a base do."""
    found = ((state.instances.get(name), load) for name, load in feed.loads.items())
    return [load for instance, load in found if instance is not None and instance.base == base and serving(instance)]


def pressure_of(state: State, pool: Pool) -> Pressure:
    """Return the pressure of a pool, at first none."""
    known = state.pressures.get(pool_subject(pool.node, pool.spec.served_name))
    return known or Pressure(node=pool.node, base=pool.spec.served_name, heard_us=state.now_us)


def changed(state: State, row: Row, data: PressureChanged) -> State:
    fresh = Pressure(node=data.node, base=data.base)
    former = state.pressures.get(fresh.id, fresh)
    state = without_holds(state, fresh.node, fresh.base)
    others = tuple(known for known in state.pressing if known != fresh.id)
    pressing = (*others, fresh.id) if data.on else others
    state = structs.replace(state, pressing=pressing, holds=without(state.holds, f"reserve/{fresh.node}.{fresh.base}"))
    return put(state, structs.replace(former, on=data.on, since_us=row.ledger_us, jump_ppm=None))


def without_holds(state: State, node: str, base: str) -> State:
    """Forget what was held about the capacity of a pool: its need is another one now."""
    subject = f"capacity/{node}.{base}"
    return structs.replace(state, holds=without(state.holds, subject)) if subject in state.holds else state


def selected(state: State, row: Row, data: ChannelSelected) -> State:
    """Take the channel; one that is only said again, after it was held, goes on since it was first selected."""
    former, blend = state.channels.get(data.blend), state.blends.get(data.blend)
    if former is not None and former.channel is data.channel:
        return put(state, structs.replace(former, pos=row.pos))
    if blend is not None:
        for node in state.pools:
            state = without_holds(state, node, blend.base)
    return put(state, Selected(blend=data.blend, channel=data.channel, since_us=row.ledger_us, pos=row.pos))


def decay_set(state: State, _row: Row, data: DecaySet) -> State:
    """The policy's own factor needs no record."""
    if state.policy is not None and data.decay_ppm == state.policy.upcycle.weight_decay_ppm:
        return structs.replace(state, decays=without(state.decays, data.base))
    return structs.replace(state, decays=with_item(state.decays, data.base, data.decay_ppm))


def blocked(state: State, row: Row, data: PrewarmBlocked) -> State:
    return structs.replace(state, blocks=with_item(state.blocks, data.node, row.ledger_us))


def released(state: State, _row: Row, data: PrewarmReleased) -> State:
    return structs.replace(state, blocks=without(state.blocks, data.node))


def injection_requested(state: State, row: Row, data: InjectionRequested) -> State:
    """Count it, and forget those of more than a minute ago."""
    if data.dry_run:
        return state
    kept = tuple(at_us for at_us in state.requested_us if at_us > row.ledger_us - RATE_SPAN_US)
    return structs.replace(state, requested_us=(*kept, row.ledger_us)[-REQUESTED_MAX:])
