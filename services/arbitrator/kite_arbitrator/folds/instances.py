"""How reports and orders change nodes and instances."""

from msgspec import structs

from kite_arbitrator.folds.injections import lost
from kite_arbitrator.folds.pressure import without_holds
from kite_arbitrator.state import (
    Instance,
    Node,
    Row,
    State,
    backed_off,
    put,
    with_item,
    without,
)
from kite_schemas.yoco import (
    SHUTDOWN,
    DrainOrdered,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    OrderRequested,
    StartOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

SETTLED = frozenset({Life.READY, Life.ASLEEP})
"""Reaching one of these states forgets earlier failures."""


def node_registered(state: State, row: Row, data: NodeRegistered) -> State:
    """The registration is the whole truth about the node: what it did not find is absent."""
    node = Node(id=data.node, boot=data.boot, devices=data.devices, sleep_modes=data.sleep_modes, pos=row.pos)
    state = put(state, node)
    for instance in [i for i in state.instances.values() if i.node == data.node]:
        gone = structs.replace(
            instance, state=Life.ABSENT, endpoint="", versions=(), summoned=False, asked=False, failures=0, retry_us=0
        )
        state = lost(put(state, gone), instance.id)
    return state


def started(state: State, row: Row, data: StartOrdered) -> State:
    former = state.instances.get(data.instance)
    return put(
        state,
        Instance(
            id=data.instance,
            node=data.node,
            base=data.spec.served_name,
            device=data.device,
            standby=data.standby,
            state=Life.ABSENT,
            failures=former.failures if former else 0,
            retry_us=former.retry_us if former else 0,
            pos=row.pos,
            seen_us=row.ledger_us,
        ),
    )


def wanted(state: State, row: Row, data: OrderRequested) -> State:
    return structs.replace(state, wanted=with_item(state.wanted, row.id, data))


def answered(state: State, request: str | None) -> State:
    """A request for one more instance has its answer: an order, or why not."""
    if request is None or request not in state.wanted:
        return state
    return structs.replace(state, wanted=without(state.wanted, request))


def woken(state: State, _row: Row, data: WakeOrdered) -> State:
    """Whoever asked for it keeps it awake; what was held about the pool's capacity is done."""
    instance = state.instances[data.instance]
    state = without_holds(answered(state, data.request), instance.node, instance.base)
    return put(state, structs.replace(instance, summoned=True, asked=data.request is not None))


def drained(state: State, _row: Row, data: DrainOrdered) -> State:
    """From the order on it gets no new request; a standby is on its way to sleep."""
    return put(state, structs.replace(state.instances[data.instance], summoned=False, asked=False))


def changed(state: State, row: Row, data: InstanceChanged) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    moved = structs.replace(instance, state=data.to_state, pos=row.pos, seen_us=row.ledger_us)
    if data.to_state in SETTLED:
        moved = structs.replace(moved, failures=0, retry_us=0)
    if data.to_state is Life.FAILED:
        moved = backed_off(state, structs.replace(moved, versions=(), endpoint="", summoned=False, asked=False))
    if data.to_state is Life.ABSENT:
        moved = structs.replace(moved, versions=(), endpoint="", summoned=False, asked=False)
    state = put(state, moved)
    if data.code == SHUTDOWN:
        state = structs.replace(state, nodes=without(state.nodes, data.node), feeds=without(state.feeds, data.node))
    return state if moved.state is Life.READY else lost(state, instance.id)


def ready(state: State, row: Row, data: InstanceReady) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    ready = structs.replace(
        instance,
        state=Life.READY,
        endpoint=data.endpoint,
        versions=data.versions,
        noise_micronats=data.noise_micronats,
        failures=0,
        retry_us=0,
        pos=row.pos,
        seen_us=row.ledger_us,
    )
    return put(state, ready)


def order_failed(state: State, row: Row, data: OrderFailed) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    failed = structs.replace(instance, state=data.state, pos=row.pos, seen_us=row.ledger_us)
    if data.state is Life.FAILED:
        failed = structs.replace(failed, versions=(), endpoint="", summoned=False, asked=False)
    if data.state is Life.ASLEEP:
        failed = structs.replace(failed, summoned=False, asked=False)
    state = put(state, _delayed(state, failed, data.order))
    return state if data.state is Life.READY else lost(state, instance.id)


def order_refused(state: State, row: Row, data: OrderRefused) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    refused = structs.replace(instance, summoned=False, asked=False, pos=row.pos, seen_us=row.ledger_us)
    return put(state, _delayed(state, refused, data.order))


def _delayed(state: State, instance: Instance, order: str | None) -> Instance:
    """Back off, unless that was done already when the order was given up: one failure counts once."""
    return instance if order in state.given_up else backed_off(state, instance)
