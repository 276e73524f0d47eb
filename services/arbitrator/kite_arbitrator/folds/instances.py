"""How reports and orders change nodes and instances."""

from msgspec import structs

from kite_arbitrator.folds import passages
from kite_arbitrator.folds.injections import lost
from kite_arbitrator.folds.pressure import without_holds
from kite_arbitrator.records import Instance, Node, OpenOrder, Row, pool_subject
from kite_arbitrator.state import State, backed_off, instance_id, pool_of, put, quarantined, with_item, without
from kite_schemas.why import Reason
from kite_schemas.yoco import (
    SHUTDOWN,
    DrainOrdered,
    DrainRequested,
    Found,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    OrderRequested,
    PrewarmOrdered,
    SleepOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

SETTLED = frozenset({Life.READY, Life.ASLEEP, Life.PREWARMED})
"""Reaching one of these states forgets earlier failures."""

WITHOUT_PROCESS = frozenset({Life.ABSENT, Life.FAILED})

PASSING = frozenset({Life.STARTING, Life.WARMING, Life.WAKING})
"""What a yoco that began anew cannot go on with: the order was given up with it, and is given again."""

SLEEPING = frozenset({Life.DRAINING, Life.ASLEEP, Life.WAKING})
"""While an instance is in one of these states, how it sleeps is known."""

UNREACHABLE = Reason.DEADLINE_UNREACHABLE.value
"""Code of a refusal: the instance would be ready, but not in time."""


def node_registered(state: State, row: Row, data: NodeRegistered) -> State:
    """The registration is the whole truth about the node: what it did not find is absent, what it found goes on."""
    node = Node(
        id=data.node,
        boot=data.boot,
        devices=data.devices,
        sleep_modes=data.sleep_modes,
        pos=row.pos,
        offers=data.engines,
    )
    state = put(state, node)
    found = {one.instance: one for one in data.instances}
    for instance in [i for i in state.instances.values() if i.node == data.node and i.id not in found]:
        gone = structs.replace(_ended(instance), state=Life.ABSENT, failures=0, retry_us=0)
        state = lost(put(passages.failed(state, instance.id), gone), instance.id)
    for one in data.instances:
        state = _adopted(state, row, data.node, one)
    return state


def _adopted(state: State, row: Row, node: str, found: Found) -> State:
    """Take an instance as it was found running; what was ready is ready, with no moment between.

    One in the middle of a step has failed: its order was given up, and a start ends what is left of it.
    """
    known = state.instances.get(found.instance) or _unknown(state, node, found)
    state = passages.failed(state, known.id)
    if found.state in PASSING | WITHOUT_PROCESS:
        gone = structs.replace(_ended(known), state=Life.FAILED, failures=0, retry_us=0, pos=row.pos)
        return lost(put(state, structs.replace(gone, seen_us=row.ledger_us)), known.id)
    adopted = structs.replace(
        known,
        state=found.state,
        endpoint=found.endpoint,
        versions=found.versions,
        noise_micronats=known.noise_micronats if found.noise_micronats is None else found.noise_micronats,
        mode=found.mode if found.state in SLEEPING else None,
        called=None,
        failures=0,
        retry_us=0,
        pos=row.pos,
        seen_us=row.ledger_us,
    )
    if found.state is Life.QUARANTINED and known.state is not Life.QUARANTINED:
        adopted = quarantined(state, adopted)
    state = put(state, adopted)
    return state if found.state is Life.READY else lost(state, known.id)


def _unknown(state: State, node: str, found: Found) -> Instance:
    """Return an instance that was never ordered here; what no pool has is nothing that answers requests."""
    base = found.base or ""
    pool = pool_of(state, node, base)
    ready = {instance_id(pool, number) for number in range(pool.ready)} if pool else frozenset[str]()
    return Instance(
        id=found.instance,
        node=node,
        base=base,
        device=found.device or "",
        standby=found.instance not in ready,
        state=found.state,
    )


def _ended(instance: Instance) -> Instance:
    """Return an instance without what was true of its process only."""
    return structs.replace(
        instance,
        versions=(),
        endpoint="",
        summoned=False,
        asked=False,
        mode=None,
        called=None,
        slots=(),
        slots_taken=None,
        poisoned=(),
        told=None,
        drifted=(),
        quarantined_us=0,
    )


def started(state: State, row: Row, data: StartOrdered) -> State:
    """A new process: nothing is known of it. One that answers a need is awake from the beginning."""
    former = state.instances.get(data.instance)
    if data.standby and data.deadline_us is None and refilled(state, data.instance):
        state = _paced(state, row, data.node, data.spec.served_name)
    needed = data.standby and data.deadline_us is not None
    fresh = Instance(
        id=data.instance,
        node=data.node,
        base=data.spec.served_name,
        device=data.device,
        standby=data.standby,
        state=former.state if former and former.state is Life.PREWARMED else Life.ABSENT,
        failures=former.failures if former else 0,
        retry_us=former.retry_us if former else 0,
        summoned=needed,
        asked=needed and data.request is not None,
        called=passages.called(state, data),
        pos=row.pos,
        seen_us=row.ledger_us,
    )
    if needed:
        state = without_holds(state, fresh.node, fresh.base)
    return put(answered(state, data.request), fresh)


def refilled(state: State, name: str) -> bool:
    """Tell whether an instance was ordered or found since its node registered: its next start is no first fill."""
    instance = state.instances.get(name)
    node = state.nodes.get(instance.node) if instance else None
    return instance is not None and node is not None and instance.pos >= node.pos


def prewarmed(state: State, row: Row, data: PrewarmOrdered) -> State:
    former = state.instances.get(data.instance)
    fresh = Instance(
        id=data.instance,
        node=data.node,
        base=data.spec.served_name,
        device=data.device,
        standby=True,
        state=Life.ABSENT,
        failures=former.failures if former else 0,
        retry_us=former.retry_us if former else 0,
        pos=row.pos,
        seen_us=row.ledger_us,
    )
    return put(_paced(state, row, data.node, data.spec.served_name), fresh)


def _paced(state: State, row: Row, node: str, base: str) -> State:
    times_us = with_item(state.prewarmed_us, pool_subject(node, base), row.ledger_us)
    return structs.replace(state, prewarmed_us=times_us)


def wanted(state: State, row: Row, data: OrderRequested | DrainRequested) -> State:
    return structs.replace(state, wanted=with_item(state.wanted, row.id, data))


def answered(state: State, request: str | None) -> State:
    """A request for one instance more or less has its answer: an order, or why not."""
    if request is None or request not in state.wanted:
        return state
    return structs.replace(state, wanted=without(state.wanted, request))


def woken(state: State, _row: Row, data: WakeOrdered) -> State:
    """Whoever asked for it keeps it awake; what was held about the pool's capacity is done."""
    call = passages.called(state, data)
    instance = state.instances[data.instance]
    state = without_holds(answered(state, data.request), instance.node, instance.base)
    asked = data.request is not None
    return put(state, structs.replace(instance, summoned=instance.standby, asked=asked, called=call))


def drained(state: State, _row: Row, data: DrainOrdered) -> State:
    """From the order on it gets no new request; a standby is on its way to sleep, as is what somebody wants to rest."""
    state = answered(state, data.request)
    instance = state.instances[data.instance]
    parked = instance.parked or data.request is not None
    return put(state, structs.replace(instance, summoned=False, asked=False, parked=parked))


def sent_to_sleep(state: State, _row: Row, data: SleepOrdered) -> State:
    """Remember how it will sleep: that is the path on which it wakes."""
    return put(state, structs.replace(state.instances[data.instance], mode=data.mode))


def changed(state: State, row: Row, data: InstanceChanged) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    if data.to_state in WITHOUT_PROCESS:
        state = passages.failed(state, instance.id)
        instance = _ended(state.instances[instance.id])
    moved = structs.replace(instance, state=data.to_state, pos=row.pos, seen_us=row.ledger_us)
    if data.to_state in SETTLED:
        moved = structs.replace(moved, failures=0, retry_us=0)
    if data.to_state not in SLEEPING:
        moved = structs.replace(moved, mode=None)
    if data.to_state is Life.FAILED or _stopped(state, data):
        moved = backed_off(state, moved)
    if data.to_state is Life.QUARANTINED:
        moved = quarantined(state, moved)
    state = put(state, moved)
    if data.code == SHUTDOWN:
        state = structs.replace(state, nodes=without(state.nodes, data.node), feeds=without(state.feeds, data.node))
    return state if moved.state is Life.READY else lost(state, instance.id)


def _stopped(state: State, data: InstanceChanged) -> bool:
    """Tell whether the process of a quarantined instance was ended by order: its next one waits, as after a failure."""
    order, former = state.orders.get(data.order or ""), state.instances[data.instance]
    stops = order is not None and order.type == StopOrdered.TYPE
    return stops and data.to_state is Life.ABSENT and former.state is Life.QUARANTINED


def ready(state: State, row: Row, data: InstanceReady) -> State:
    """It answers requests. What it listed before it slept it lists still: a wake tells only what it has proven."""
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    ready = structs.replace(
        instance,
        state=Life.READY,
        endpoint=data.endpoint,
        versions=tuple(dict.fromkeys((*instance.versions, *data.versions))),
        noise_micronats=data.noise_micronats,
        mode=None,
        parked=False,
        called=None,
        path=data.path,
        failures=0,
        retry_us=0,
        pos=row.pos,
        seen_us=row.ledger_us,
    )
    return put(passages.arrived(state, instance, data), ready)


def order_failed(state: State, row: Row, data: OrderFailed) -> State:
    state = passages.failed(state, data.instance)
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    failed = structs.replace(instance, state=data.state, pos=row.pos, seen_us=row.ledger_us)
    if data.state is Life.FAILED:
        failed = _ended(failed)
    if data.state is Life.ASLEEP:
        failed = structs.replace(failed, summoned=False, asked=False)
    if data.state is Life.QUARANTINED and instance.state is not Life.QUARANTINED:
        failed = quarantined(state, failed)
    state = put(state, _delayed(state, failed, data.order))
    return state if data.state is Life.READY else lost(state, instance.id)


def order_refused(state: State, row: Row, data: OrderRefused) -> State:
    """Back off; a request that would not have been answered in time has no answer yet."""
    state = passages.failed(state, data.instance)
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    refused = structs.replace(instance, summoned=False, asked=False, pos=row.pos, seen_us=row.ledger_us)
    order = state.orders.get(data.order or "")
    state = put(state, _delayed(state, refused, data.order))
    return _reopened(state, order) if data.code == UNREACHABLE and order else state


def _reopened(state: State, order: OpenOrder) -> State:
    if order.wanted is None or order.request is None:
        return state
    return structs.replace(state, wanted=with_item(state.wanted, order.request, order.wanted))


def _delayed(state: State, instance: Instance, order: str | None) -> Instance:
    """Back off, unless that was done already when the order was given up: one failure counts once."""
    return instance if order in state.given_up else backed_off(state, instance)
