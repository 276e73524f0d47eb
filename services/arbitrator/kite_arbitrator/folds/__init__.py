"""How each type of row changes the state: one small function per type, and one table."""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from kite_arbitrator.folds import (
    accounts,
    arbitration,
    guard,
    injections,
    instances,
    orders,
    pressure,
    rollbacks,
    telemetry,
    versions,
)
from kite_arbitrator.records import Row
from kite_arbitrator.state import State, put
from kite_schemas.arbitration import (
    ChannelSelected,
    Discarded,
    GapAcknowledged,
    Held,
    ModeChanged,
    OrderExpired,
    PressureChanged,
    TransportChanged,
)
from kite_schemas.guard import Compared, ComparisonOrdered, DistributionMeasured, MeasurementOrdered
from kite_schemas.ledger import BusEpochChanged, BusGap, Created, LeaseTaken
from kite_schemas.model import Data
from kite_schemas.policy import PolicySet, Pool
from kite_schemas.probes import Registered
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.telemetry import NodeFound, NodeLost, Window
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendDeleted,
    BlendFailed,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    BlendUnloaded,
    DecaySet,
    DeleteFailed,
    DeleteOrdered,
    DriftObserved,
    Frozen,
    InjectionAdmitted,
    InjectionClosed,
    InjectionDeferred,
    InjectionRequested,
    LoadFailed,
    LoadOrdered,
    RebuildOrdered,
    ResidentsSet,
    RetireFailed,
    RetireOrdered,
    RollbackClosed,
    RollbackFailed,
    RollbackOrdered,
    RollbackRequested,
    RolledBack,
    Unfrozen,
    VerificationOrdered,
)
from kite_schemas.why import Decision, Order, Outcome
from kite_schemas.yoco import (
    DrainOrdered,
    DrainRequested,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    OrderRequested,
    PrewarmBlocked,
    PrewarmOrdered,
    PrewarmReleased,
    SleepOrdered,
    StartOrdered,
    WakeOrdered,
)


def fold(state: State, row: Row) -> State:
    """Fold one row: an order opens, the type's own fold applies, a last outcome closes its order.

    What an outcome tells of an instance of its node's last boot is in the ledger, and changes nothing.
    """
    data, former = row.data, state
    if isinstance(data, Decision):
        state = arbitration.decided(state, row, data)
    if isinstance(data, Order):
        state = put(state, orders.opened(state, row, data))
    if isinstance(data, Outcome) and orders.outdated(state, data):
        return orders.finished(state, data)
    own = FOLDS.get(type(data)) if data is not None else None
    if own is not None:
        state = own(state, row, data)
    state = _settled(former, state, row)
    return orders.finished(state, data) if isinstance(data, Outcome) else state


def _settled(former: State, state: State, row: Row) -> State:
    """Let what follows from where versions are follow: those that nobody lists are released, and accounted for."""
    if state.versions is not former.versions or state.instances is not former.instances:
        state = versions.released(state, row)
    if state.versions is former.versions and state.pools is former.pools:
        return state
    return accounts.accounted(state)


def _created(state: State, _row: Row, data: Created) -> State:
    return structs.replace(state, ledger=data.ledger)


def _blend_promoted(state: State, row: Row, data: BlendPromoted) -> State:
    state = versions.promoted(state, row, data)
    return guard.promoted(injections.promoted(state, row, data), row, data)


def _injection_closed(state: State, row: Row, data: InjectionClosed) -> State:
    return injections.closed(versions.closed(state, row, data), row, data)


def _stored(state: State, row: Row, data: BlendStored) -> State:
    return versions.stored(injections.stored(state, row, data), row, data)


def _blend_failed(state: State, row: Row, data: BlendFailed) -> State:
    """What was to be made again did not fail the injection that brought it."""
    order = state.orders.get(data.order or "")
    if order is not None and order.type == RebuildOrdered.TYPE:
        state = rollbacks.not_restored(state, order.version, f"{data.code}: {data.message}")
        return versions.failed(state, row, data)
    return injections.blend_failed(state, row, data)


def _load_ordered(state: State, row: Row, data: LoadOrdered) -> State:
    state = rollbacks.load_ordered(injections.load_ordered(state, row, data), row, data)
    return versions.untold(state, data.instance)


def _loaded(state: State, row: Row, data: BlendLoaded) -> State:
    return versions.loaded(injections.loaded(state, row, data), row, data)


def _proven(state: State, row: Row, data: EffectProven) -> State:
    state = rollbacks.proven(injections.proven(state, row, data), row, data)
    return versions.proven(state, row, data)


def _load_failed(state: State, row: Row, data: LoadFailed) -> State:
    state = rollbacks.missed(injections.load_failed(state, row, data), row, data)
    return versions.load_failed(state, row, data)


def _effect_missing(state: State, row: Row, data: EffectMissing) -> State:
    state = rollbacks.missed(injections.effect_missing(state, row, data), row, data)
    return versions.effect_missing(state, row, data)


def _rollback_ordered(state: State, row: Row, data: RollbackOrdered) -> State:
    state = rollbacks.undone(injections.rollback_ordered(state, row, data), row, data)
    return versions.untold(state, data.instance)


def _rolled_back(state: State, row: Row, data: RolledBack) -> State:
    return versions.rolled_back(injections.rolled_back(state, row, data), row, data)


def _policy_set(state: State, _row: Row, data: PolicySet) -> State:
    """Take the policy; its pools by node are what every window of that node asks for."""
    pools: dict[str, tuple[Pool, ...]] = {}
    for pool in data.policy.fleet.pools:
        pools[pool.node] = (*pools.get(pool.node, ()), pool)
    return structs.replace(state, policy=data.policy, policy_digest=data.digest, pools=pools)


def _node_registered(state: State, row: Row, data: NodeRegistered) -> State:
    return telemetry.registered(instances.node_registered(state, row, data), row, data)


def _injection_requested(state: State, row: Row, data: InjectionRequested) -> State:
    return pressure.injection_requested(injections.requested(state, row, data), row, data)


def _held(state: State, row: Row, data: Held) -> State:
    return arbitration.held(guard.held(instances.answered(state, data.request), row, data), row, data)


Fold = Callable[[State, Row, Any], State]  # Any: each fold takes the one payload type that the table gives it

FOLDS: dict[type[Data], Fold] = {
    Created: _created,
    PolicySet: _policy_set,
    NodeRegistered: _node_registered,
    Window: telemetry.window,
    NodeLost: telemetry.lost,
    NodeFound: telemetry.found,
    TransportChanged: telemetry.transport_changed,
    LeaseTaken: telemetry.leased,
    BusGap: arbitration.gap,
    BusEpochChanged: arbitration.gap,
    GapAcknowledged: arbitration.acknowledged,
    ModeChanged: arbitration.mode_changed,
    Discarded: arbitration.discarded,
    PressureChanged: pressure.changed,
    ChannelSelected: pressure.selected,
    DecaySet: pressure.decay_set,
    PrewarmBlocked: pressure.blocked,
    PrewarmReleased: pressure.released,
    StartOrdered: instances.started,
    PrewarmOrdered: instances.prewarmed,
    OrderRequested: instances.wanted,
    DrainRequested: instances.wanted,
    WakeOrdered: instances.woken,
    DrainOrdered: instances.drained,
    SleepOrdered: instances.sent_to_sleep,
    InstanceChanged: instances.changed,
    InstanceReady: instances.ready,
    OrderFailed: instances.order_failed,
    OrderRefused: instances.order_refused,
    InjectionRequested: _injection_requested,
    VerificationOrdered: injections.verifying,
    AdapterVerified: injections.verified,
    AdapterRefused: injections.refused,
    InjectionAdmitted: injections.admitted,
    BlendStored: _stored,
    BlendFailed: _blend_failed,
    LoadOrdered: _load_ordered,
    BlendLoaded: _loaded,
    EffectProven: _proven,
    LoadFailed: _load_failed,
    EffectMissing: _effect_missing,
    RollbackOrdered: _rollback_ordered,
    RolledBack: _rolled_back,
    BlendPromoted: _blend_promoted,
    InjectionDeferred: injections.deferred,
    ComparisonOrdered: guard.ordered,
    MeasurementOrdered: guard.ordered,
    DistributionMeasured: guard.measured,
    Registered: guard.probes_registered,
    Compared: guard.compared,
    Held: _held,
    Frozen: guard.frozen,
    Unfrozen: guard.unfrozen,
    InjectionClosed: _injection_closed,
    RollbackRequested: rollbacks.requested,
    RollbackClosed: rollbacks.closed,
    RollbackFailed: injections.rollback_failed,
    RetireOrdered: versions.retire_ordered,
    BlendUnloaded: versions.unloaded,
    RetireFailed: versions.failed,
    DeleteOrdered: versions.delete_ordered,
    BlendDeleted: versions.deleted,
    DeleteFailed: versions.failed,
    ResidentsSet: versions.told,
    DriftObserved: versions.drifted,
    OrderExpired: orders.expired,
}
