"""How each type of row changes the state: one small function per type, and one table."""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from kite_arbitrator.state import (
    Blend,
    Injection,
    Instance,
    Node,
    OpenOrder,
    Phase,
    Row,
    State,
    current,
    put,
    without,
)
from kite_schemas.arbitration import OrderExpired
from kite_schemas.ledger import Created
from kite_schemas.model import Data
from kite_schemas.policy import PolicySet
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendFailed,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    InjectionRequested,
    LoadFailed,
    LoadOrdered,
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
)
from kite_schemas.why import Order, Outcome, Reason
from kite_schemas.yoco import (
    SHUTDOWN,
    DrainOrdered,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    SleepOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

SETTLED = frozenset({Life.READY, Life.ASLEEP})
"""Reaching one of these states forgets earlier failures."""


def fold(state: State, row: Row) -> State:
    """Fold one row: an order opens, a last outcome closes its order, and the type's own fold applies."""
    data = row.data
    if isinstance(data, Order):
        state = put(state, _opened(row, data))
    own = FOLDS.get(type(data)) if data is not None else None
    if own is not None:
        state = own(state, row, data)
    if isinstance(data, Outcome) and data.done and data.order is not None:
        state = structs.replace(state, orders=without(state.orders, data.order))
    return state


def _opened(row: Row, order: Order) -> OpenOrder:
    return OpenOrder(
        id=row.id,
        type=row.type,
        target=order.target,
        node=order.node,
        instance=getattr(order, "instance", None),
        device=getattr(order, "device", None),
        request=getattr(order, "request", None),
        issued_us=row.ledger_us,
        expires_us=order.expires_us,
    )


def _created(state: State, _row: Row, data: Created) -> State:
    return structs.replace(state, ledger=data.ledger)


def _policy_set(state: State, _row: Row, data: PolicySet) -> State:
    return structs.replace(state, policy=data.policy, policy_digest=data.digest)


# --- nodes and instances


def _node_registered(state: State, row: Row, data: NodeRegistered) -> State:
    """The registration is the whole truth about the node: what it did not find is absent."""
    node = Node(id=data.node, boot=data.boot, devices=data.devices, sleep_modes=data.sleep_modes, pos=row.pos)
    state = put(state, node)
    for instance in [i for i in state.instances.values() if i.node == data.node]:
        gone = structs.replace(
            instance, state=Life.ABSENT, endpoint="", versions=(), summoned=False, failures=0, retry_us=0
        )
        state = _lost(put(state, gone), instance.id)
    return state


def _started(state: State, row: Row, data: StartOrdered) -> State:
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


def _woken(state: State, _row: Row, data: WakeOrdered) -> State:
    return put(state, structs.replace(state.instances[data.instance], summoned=True))


def _changed(state: State, row: Row, data: InstanceChanged) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    moved = structs.replace(instance, state=data.to_state, pos=row.pos, seen_us=row.ledger_us)
    if data.to_state in SETTLED:
        moved = structs.replace(moved, failures=0, retry_us=0)
    if data.to_state is Life.FAILED:
        moved = _backed_off(state, structs.replace(moved, versions=(), endpoint="", summoned=False))
    if data.to_state is Life.ABSENT:
        moved = structs.replace(moved, versions=(), endpoint="", summoned=False)
    state = put(state, moved)
    if data.code == SHUTDOWN:
        state = structs.replace(state, nodes=without(state.nodes, data.node))
    return state if moved.state is Life.READY else _lost(state, instance.id)


def _ready(state: State, row: Row, data: InstanceReady) -> State:
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


def _order_failed(state: State, row: Row, data: OrderFailed) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    failed = structs.replace(instance, state=data.state, pos=row.pos, seen_us=row.ledger_us)
    if data.state is Life.FAILED:
        failed = structs.replace(failed, versions=(), endpoint="", summoned=False)
    if data.state is Life.ASLEEP:
        failed = structs.replace(failed, summoned=False)
    state = put(state, _backed_off(state, failed))
    return state if data.state is Life.READY else _lost(state, instance.id)


def _order_refused(state: State, row: Row, data: OrderRefused) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    refused = structs.replace(instance, summoned=False, pos=row.pos, seen_us=row.ledger_us)
    return put(state, _backed_off(state, refused))


def _backed_off(state: State, instance: Instance) -> Instance:
    """Double the wait with every failure in a row: the same order is not repeated until its cause may have passed."""
    yoco = current(state).yoco
    wait_us = min(yoco.start_backoff_us << min(instance.failures, 32), yoco.start_backoff_max_us)
    return structs.replace(instance, failures=instance.failures + 1, retry_us=state.now_us + wait_us)


def _lost(state: State, instance: str) -> State:
    """An instance that stops being ready fails the injections that were loading into it."""
    for injection in list(state.injections.values()):
        if injection.phase is Phase.LOADING and instance in injection.targets:
            touched = tuple(name for name in injection.touched if name != instance)
            state = put(state, _failing(structs.replace(injection, touched=touched), Reason.INSTANCE_LOST))
    return state


# --- injections


def _requested(state: State, row: Row, data: InjectionRequested) -> State:
    return put(state, Injection(id=row.id, pos=row.pos, request=data))


def _verifying(state: State, _row: Row, data: VerificationOrdered) -> State:
    return _advanced(state, data.request, phase=Phase.VERIFYING)


def _verified(state: State, row: Row, data: AdapterVerified) -> State:
    return _advanced(
        state,
        data.request,
        when=Phase.VERIFYING,
        phase=Phase.VERIFIED,
        share_ppm=data.share_ppm,
        fact_pos=row.pos,
        fact_us=row.ledger_us,
    )


def _refused(state: State, row: Row, data: AdapterRefused) -> State:
    return _advanced(
        state,
        data.request,
        when=Phase.VERIFYING,
        phase=Phase.REFUSED,
        ending=Ending.REFUSED,
        reason=Reason.ADAPTER_REFUSED,
        fact_pos=row.pos,
        fact_us=row.ledger_us,
    )


def _admitted(state: State, _row: Row, data: InjectionAdmitted) -> State:
    return _advanced(
        state,
        data.request,
        phase=Phase.BLENDING,
        members=data.members,
        base_weight_ppm=data.base_weight_ppm,
        targets=data.instances,
    )


def _stored(state: State, row: Row, data: BlendStored) -> State:
    return _advanced(
        state,
        data.request,
        when=Phase.BLENDING,
        phase=Phase.LOADING,
        resident=data.resident,
        fact_pos=row.pos,
        fact_us=row.ledger_us,
    )


def _blend_failed(state: State, _row: Row, data: BlendFailed) -> State:
    injection = state.injections.get(data.request)
    return state if injection is None else put(state, _failing(injection, Reason.BLEND_FAILED))


def _load_ordered(state: State, _row: Row, data: LoadOrdered) -> State:
    injection = _loading(state, data.resident.version)
    if injection is None:
        return state
    return put(state, structs.replace(injection, touched=_added(injection.touched, data.instance)))


def _loaded(state: State, row: Row, data: BlendLoaded) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = _added(instance.versions, data.version)
    return put(state, structs.replace(instance, versions=versions, pos=row.pos, seen_us=row.ledger_us))


def _proven(state: State, row: Row, data: EffectProven) -> State:
    injection = _loading(state, data.version)
    if injection is None or injection.resident is None:
        return state
    resident = injection.resident.model_copy(update={"effect_print": data.effect_print})
    proven = _added(injection.proven, data.instance)
    return put(
        state,
        structs.replace(injection, resident=resident, proven=proven, fact_pos=row.pos, fact_us=row.ledger_us),
    )


def _load_failed(state: State, _row: Row, data: LoadFailed) -> State:
    injection = _loading(state, data.version)
    if injection is not None:
        return put(state, _failing(injection, Reason.LOAD_FAILED))
    instance = state.instances.get(data.instance)
    return state if instance is None else put(state, _backed_off(state, instance))


def _effect_missing(state: State, _row: Row, data: EffectMissing) -> State:
    """A new version is at fault itself; when an already proven one fails, the instance is."""
    injection = _loading(state, data.version)
    if injection is not None:
        return put(state, _failing(injection, Reason.EFFECT_MISSING))
    instance = state.instances.get(data.instance)
    return state if instance is None else put(state, structs.replace(instance, state=Life.QUARANTINED))


def _rolled_back(state: State, _row: Row, data: RolledBack) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = tuple(version for version in instance.versions if version != data.version)
    return put(state, structs.replace(instance, versions=versions))


def _rollback_ordered(state: State, _row: Row, data: RollbackOrdered) -> State:
    injection = state.injections.get(data.request)
    if injection is None:
        return state
    touched = tuple(name for name in injection.touched if name != data.instance)
    return put(state, structs.replace(injection, phase=Phase.ROLLING_BACK, touched=touched))


def _promoted(state: State, row: Row, data: BlendPromoted) -> State:
    return put(
        state,
        Blend(
            name=data.blend,
            base=data.base,
            resident=data.resident,
            members=data.members,
            base_weight_ppm=data.base_weight_ppm,
            pos=row.pos,
        ),
    )


def _closed(state: State, _row: Row, data: InjectionClosed) -> State:
    return structs.replace(state, injections=without(state.injections, data.request))


def _expired(state: State, _row: Row, data: OrderExpired) -> State:
    """Free the target; what the order was for has failed, and the instance is where it was last seen."""
    order = state.orders.get(data.order)
    state = structs.replace(state, orders=without(state.orders, data.order))
    if order is None:
        return state
    if order.type in INJECTION_ORDERS:
        return _injection_expired(state, order)
    instance = state.instances.get(order.instance or "")
    if instance is None or order.type not in LIFE_ORDERS:
        return state
    unfinished = {StartOrdered.TYPE: Life.FAILED, WakeOrdered.TYPE: Life.FAILED}.get(order.type, instance.state)
    if instance.state is Life.ABSENT and data.why.reason is Reason.NODE_REPLACED:
        return state
    return put(state, _backed_off(state, structs.replace(instance, state=unfinished)))


def _injection_expired(state: State, order: OpenOrder) -> State:
    injection = state.injections.get(order.request or "")
    if injection is None or injection.phase not in (Phase.VERIFYING, Phase.BLENDING, Phase.LOADING):
        return state
    return put(state, structs.replace(_failing(injection, Reason.EXPIRED), ending=Ending.EXPIRED))


def _loading(state: State, version: str) -> Injection | None:
    """Return the injection that is bringing this version, if one is."""
    for injection in state.injections.values():
        if injection.resident is not None and injection.resident.version == version:
            return injection
    return None


def _failing(injection: Injection, reason: Reason) -> Injection:
    """The first failure counts: what follows while it is undone changes neither the reason nor the phase."""
    if injection.phase in (Phase.FAILING, Phase.ROLLING_BACK):
        return injection
    return structs.replace(injection, phase=Phase.FAILING, reason=reason)


def _advanced(state: State, request: str, *, when: Phase | None = None, **changes: object) -> State:
    """Move an injection on; a fact that comes too late, after its order was given up, changes nothing."""
    injection = state.injections.get(request)
    if injection is None or (when is not None and injection.phase is not when):
        return state
    return put(state, structs.replace(injection, **changes))


def _added(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return names if name in names else (*names, name)


Fold = Callable[[State, Row, Any], State]  # Any: each fold takes the one payload type that the table gives it

FOLDS: dict[type[Data], Fold] = {
    Created: _created,
    PolicySet: _policy_set,
    NodeRegistered: _node_registered,
    StartOrdered: _started,
    WakeOrdered: _woken,
    InstanceChanged: _changed,
    InstanceReady: _ready,
    OrderFailed: _order_failed,
    OrderRefused: _order_refused,
    InjectionRequested: _requested,
    VerificationOrdered: _verifying,
    AdapterVerified: _verified,
    AdapterRefused: _refused,
    InjectionAdmitted: _admitted,
    BlendStored: _stored,
    BlendFailed: _blend_failed,
    LoadOrdered: _load_ordered,
    BlendLoaded: _loaded,
    EffectProven: _proven,
    LoadFailed: _load_failed,
    EffectMissing: _effect_missing,
    RollbackOrdered: _rollback_ordered,
    RolledBack: _rolled_back,
    BlendPromoted: _promoted,
    InjectionClosed: _closed,
    OrderExpired: _expired,
}

INJECTION_ORDERS = frozenset({VerificationOrdered.TYPE, InjectionAdmitted.TYPE, LoadOrdered.TYPE})
LIFE_ORDERS = frozenset({StartOrdered.TYPE, DrainOrdered.TYPE, SleepOrdered.TYPE, WakeOrdered.TYPE, StopOrdered.TYPE})
