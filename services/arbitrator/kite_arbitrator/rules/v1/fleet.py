"""The desired fleet: start what is missing, put standbys to sleep, load what an instance should hold, and only that."""

from collections.abc import Iterable, Iterator

from kite_arbitrator.folds.instances import refilled
from kite_arbitrator.records import Instance, Row, pool_subject
from kite_arbitrator.rules.draft import Draft, asked, at_least, at_most, reached, seen, why, within
from kite_arbitrator.rules.v1.loads import load, rollback
from kite_arbitrator.rules.v1.memory import STARTABLE, fits, free_bytes, needed_bytes
from kite_arbitrator.rules.v1.paths import device_busy, offer_of
from kite_arbitrator.rules.v1.slots import full
from kite_arbitrator.state import (
    State,
    busy,
    current,
    instance_id,
    instances_of,
    lost_node,
    put,
    serving,
    spares,
    stale,
)
from kite_schemas.arbitration import Held
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.policy import Pool
from kite_schemas.upcycle import Resident
from kite_schemas.why import Candidate, Reason, RuleValue, Why
from kite_schemas.yoco import Device, DrainOrdered, EngineSpec, SleepMode, SleepOrdered, StartOrdered, StopOrdered
from kite_schemas.yoco import State as Life

RESTLESS = frozenset({Life.READY, Life.DRAINING})
"""Where a standby that nobody needs does not stay."""

KEPT = frozenset({Life.ABSENT, Life.FAILED, Life.QUARANTINED})
"""An instance that no pool wants is stopped, unless it is in one of these states."""

Obstacle = tuple[Reason, str, tuple[RuleValue, ...]]
"""Why something is not done, in words, and by which rules."""


def start(state: State, row: Row) -> Iterator[Draft]:
    """Start every instance that the policy wants and the node lacks, one at a time per device."""
    for pool in asked(state, row):
        if lost_node(state, pool.node):
            continue
        for number in range(pool.ready + pool.standbys):
            draft = _start(state, row, pool, number)
            if draft is not None:
                yield draft
                state = _with_planned(state, draft.data)


def _start(state: State, row: Row, pool: Pool, number: int) -> Draft | None:
    name = instance_id(pool, number)
    known = state.instances.get(name)
    if known is not None and not startable(state, known):
        return None
    if busy(state, name):
        return None
    device = device_of(state, pool, name)
    if device_busy(state, pool.node, device.id):
        return None
    standby = number >= pool.ready
    found = obstacle(state, pool, device, standby=standby) or (_paced(state, pool, name) if standby else None)
    if found is not None:
        return held(state, row, name, found)
    account = why(
        state,
        row,
        Reason.INSTANCE_MISSING,
        rules=[at_least("fleet.instances", _running(state, pool), pool.ready + pool.standbys)],
        candidates=[Candidate(id=device.id, chosen=True, reason=Reason.INSTANCE_MISSING)],
    )
    return start_order(state, pool, name, device, account, standby=standby)


def startable(state: State, instance: Instance) -> bool:
    """Tell whether an instance has no process with weights, was not parked, and has waited after its failures."""
    return instance.state in STARTABLE and not instance.parked and instance.retry_us <= state.now_us


def held(state: State, row: Row, name: str, found: Obstacle) -> Draft:
    """Return what says that nothing is done about an instance."""
    reason, detail, rules = found
    return Draft(f"instance/{name}", Held(detail=detail, why=why(state, row, reason, rules=rules)))


def start_order(
    state: State,
    pool: Pool,
    name: str,
    device: Device,
    account: Why,
    *,
    standby: bool,
    request: str | None = None,
    deadline_us: int | None = None,
) -> Draft:
    """Return the order to start an instance; one with a deadline answers a need, and stays awake for it."""
    paced = current(state).yoco.prewarm_interval_us is not None
    return Draft(
        f"instance/{name}",
        StartOrdered(
            node=pool.node,
            target=f"instance/{name}",
            **within(state, current(state).expiry.start_us),
            instance=name,
            device=device.id,
            standby=standby,
            spec=spec_on(pool, device),
            request=request,
            deadline_us=deadline_us,
            residents=residents(state, pool.spec.served_name) if paced else None,
            why=account,
        ),
    )


def residents(state: State, base: str) -> tuple[Resident, ...]:
    """Return what every instance of a base holds before it is ready: its promoted blends, by name."""
    found = (blend.resident for blend in state.blends.values() if blend.base == base)
    return tuple(sorted(found, key=lambda resident: resident.blend))


def spec_on(pool: Pool, device: Device) -> EngineSpec:
    """Return the configuration of an engine of a pool on a device."""
    return pool.spec.model_copy(update={"base_path": pool.base_path, "cpus": core_of(device)})


def obstacle(state: State, pool: Pool, device: Device, *, standby: bool) -> Obstacle | None:
    """Return why nothing is started on a device now, None when something can be."""
    if stale(state, pool.node):
        return Reason.STALE, f"the windows of {pool.node} are too old to act on", ()
    if standby and pool.node in state.blocks:
        return Reason.PREWARM_BLOCKED, f"{pool.node} sheds: no standby is started there", ()
    needed = needed_bytes(state, pool.node, pool.spec.served_name)
    if needed is None:
        return None
    free = free_bytes(state, pool.node, device)
    rule = at_most("yoco.reserve_bytes", needed, free)
    detail = f"{device.id} has {free} bytes left in one piece, an instance takes {needed}"
    return (Reason.MEMORY, detail, (rule,)) if rule.fired else None


def _paced(state: State, pool: Pool, name: str) -> Obstacle | None:
    """Return why a standby is not started again yet; a first fill is not held up."""
    return recent(state, pool) if refilled(state, name) else None


def recent(state: State, pool: Pool) -> Obstacle | None:
    """Return why nothing is started ahead of demand in a pool now: that was done less than an interval ago."""
    yoco, last_us = current(state).yoco, state.prewarmed_us.get(pool_subject(pool.node, pool.spec.served_name))
    if yoco.prewarm_interval_us is None or last_us is None:
        return None
    key, interval_us = "yoco.prewarm_interval_us", yoco.prewarm_interval_us
    if pool.critical and yoco.prewarm_interval_critical_us is not None:
        key, interval_us = "yoco.prewarm_interval_critical_us", yoco.prewarm_interval_critical_us
    rule = reached(key, state.now_us - last_us, interval_us)
    detail = f"the pool of {pool.spec.served_name} on {pool.node} had its last one {rule.value} us ago"
    return None if rule.fired else (Reason.PREWARM_RECENT, detail, (rule,))


def device_of(state: State, pool: Pool, name: str) -> Device:
    """Return the device that a prewarmed process is on, else the one with the fewest other instances.

    Those with room come first, and the first among equals.
    """
    known = state.instances.get(name)
    if known is not None and known.state is Life.PREWARMED:
        placed = [device for device in state.nodes[pool.node].devices if device.id == known.device]
        if placed:
            return placed[0]
    others = [i.device for i in state.instances.values() if i.node == pool.node and i.id != name]

    def order(device: Device) -> tuple[bool, int, str]:
        return not fits(state, pool, device), others.count(device.id), device.id

    return min(state.nodes[pool.node].devices, key=order)


def core_of(device: Device) -> str:
    """Return the core that a device is, empty for a GPU."""
    return device.id.removeprefix("cpu") if device.kind == "cpu" else ""


def _running(state: State, pool: Pool) -> int:
    extra = spares(pool)
    return sum(i.state not in STARTABLE and i.id not in extra for i in instances_of(state, pool))


def _with_planned(state: State, data: Data) -> State:
    """Count what was just ordered: the rule's own view of the state does not see its decisions."""
    if not isinstance(data, StartOrdered):
        return state
    planned = Instance(
        id=data.instance,
        node=data.node,
        base=data.spec.served_name,
        device=data.device,
        standby=data.standby,
        state=Life.STARTING,
    )
    return put(state, planned)


def settle(state: State, row: Row) -> Iterator[Draft]:
    """Drain a standby that has started, and what is parked; put it to sleep when it is drained, or stop a spare.

    Nothing of it after a gap in the bus.
    """
    if state.degraded:
        return
    for pool, instance in concerned(state, row):
        idle = instance.parked or (instance.standby and not instance.summoned)
        if not idle or instance.state not in RESTLESS or _waits(state, instance):
            continue
        inputs = [seen(state, instance)]
        if instance.state is Life.READY:
            reason = Reason.PARKED if instance.parked else Reason.STANDBY_STARTED
            yield drain_order(state, instance, why(state, row, reason, inputs=inputs))
        elif instance.id in spares(pool):
            yield stop_order(state, instance, why(state, row, Reason.STANDBY_DRAINED, inputs=inputs))
        else:
            yield _sleep(state, row, pool, instance)


def clear(state: State, row: Row) -> Iterator[Draft]:
    """Stop what runs and no pool wants, as a node found it or as the fleet has shrunk: what answers drains first.

    Only where the node tells of its engines, as one does that finds any; not after a gap in the bus.
    """
    if state.degraded or not isinstance(row.data, Tick):
        return
    wanted = {name for pool in current(state).fleet.pools for name in names(pool)}
    for instance in state.instances.values():
        node = state.nodes.get(instance.node)
        if instance.id in wanted or instance.state in KEPT or node is None or not node.offers:
            continue
        if lost_node(state, instance.node) or _waits(state, instance):
            continue
        account = why(state, row, Reason.UNWANTED, inputs=[seen(state, instance)])
        yield (drain_order if serving(instance) else stop_order)(state, instance, account)


def names(pool: Pool) -> tuple[str, ...]:
    """Return the names of all instances that a pool wants, spares included."""
    return (*(instance_id(pool, number) for number in range(pool.ready + pool.standbys)), *spares(pool))


def drain_order(state: State, instance: Instance, account: Why, request: str | None = None) -> Draft:
    """Return the order to give an instance no new request and wait for those it has."""
    return Draft(
        f"instance/{instance.id}",
        DrainOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, current(state).expiry.drain_us),
            instance=instance.id,
            request=request,
            why=account,
        ),
    )


def stop_order(state: State, instance: Instance, account: Why) -> Draft:
    """Return the order to end the process of an instance."""
    return Draft(
        f"instance/{instance.id}",
        StopOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, current(state).expiry.sleep_us),
            instance=instance.id,
            why=account,
        ),
    )


def _sleep(state: State, row: Row, pool: Pool, instance: Instance) -> Draft:
    """Put a drained instance to sleep as the pool wants it, else in the first other mode that its engine has here."""
    modes, candidates = _modes(state, pool)
    if not modes:
        detail = f"{instance.id} stays drained: {_lacks(state, pool)}"
        account = why(state, row, Reason.MODE_UNSUPPORTED, candidates=candidates)
        return Draft(f"instance/{instance.id}", Held(detail=detail, why=account))
    account = why(
        state,
        row,
        Reason.STANDBY_DRAINED,
        candidates=[c.model_copy(update={"chosen": c.id == modes[0]}) for c in candidates],
        inputs=[seen(state, instance)],
    )
    return Draft(
        f"instance/{instance.id}",
        SleepOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, current(state).expiry.sleep_us),
            instance=instance.id,
            mode=modes[0],
            why=account,
        ),
    )


def _modes(state: State, pool: Pool) -> tuple[list[SleepMode], list[Candidate]]:
    """Return the modes in which an instance can sleep, the pool's own first, and what is said of each.

    A node that does not tell what its engines can do has one list for all of them, and the pool's own mode only.
    """
    node = state.nodes[pool.node]
    offer = offer_of(node, pool.spec.kind)
    if offer is None and not node.offers:
        return [mode for mode in (pool.standby_mode,) if mode in node.sleep_modes], []
    offered = offer.modes if offer else ()
    wanted = dict.fromkeys((pool.standby_mode, *SleepMode))
    reasons = {mode: Reason.STANDBY_DRAINED if mode in offered else Reason.MODE_UNSUPPORTED for mode in wanted}
    candidates = [Candidate(id=mode, chosen=False, reason=reason) for mode, reason in reasons.items()]
    return [mode for mode in wanted if mode in offered], candidates


def _lacks(state: State, pool: Pool) -> str:
    offer = offer_of(state.nodes[pool.node], pool.spec.kind)
    told: Iterable[str] = (f"{lack.mode}: {lack.reason}" for lack in offer.lacks) if offer else ()
    return "; ".join(told) or f"{pool.node} tells of no way to put {pool.spec.kind} to sleep"


def repair(state: State, row: Row) -> Iterator[Draft]:
    """Load every promoted version that a serving instance lacks, one at a time per instance; not where it is full."""
    for _, instance in concerned(state, row):
        missing = _missing(state, instance) if serving(instance) else []
        if missing and not _waits(state, instance):
            if full(state, instance):
                detail = f"{instance.id} has no slot for {missing[0].version}"
                yield held(state, row, instance.id, (Reason.SLOTS_FULL, detail, ()))
            else:
                yield load(state, row, instance, missing[0], None)


def withdraw(state: State, row: Row) -> Iterator[Draft]:
    """Take out what came by a load that was given up, and that no blend means; nothing after a gap in the bus."""
    if state.degraded:
        return
    for _, instance in concerned(state, row):
        strays = [mark for mark in instance.strays if mark[0] in instance.versions]
        if strays and instance.state is Life.READY and not _waits(state, instance):
            version, request = strays[0]
            account = why(state, row, Reason.EXPIRED, inputs=[seen(state, instance)])
            yield rollback(state, instance, version, request, account)


def _missing(state: State, instance: Instance) -> list[Resident]:
    """Return the promoted versions that an instance lacks, by blend; not those whose files are gone."""
    lacking = (
        b for b in state.blends.values() if b.base == instance.base and b.resident.version not in instance.versions
    )
    damaged = {stored.version for stored in state.versions.values() if stored.damaged}
    found = (blend.resident for blend in lacking if blend.resident.version not in damaged)
    return sorted(found, key=lambda resident: resident.blend)


def concerned(state: State, row: Row) -> Iterator[tuple[Pool, Instance]]:
    """Yield the instances of the pools that the row is about and that can be reached, by pool and number."""
    for pool in asked(state, row):
        if not lost_node(state, pool.node):
            yield from ((pool, instance) for instance in instances_of(state, pool))


def _waits(state: State, instance: Instance) -> bool:
    return busy(state, instance.id) or instance.retry_us > state.now_us
