"""How each type of row changes the state: one small function per type, and one table."""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from kite_arbitrator.folds import arbitration, guard, injections, instances, orders, pressure, telemetry
from kite_arbitrator.state import (
    Row,
    State,
    put,
)
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
    BlendFailed,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    DecaySet,
    Frozen,
    InjectionAdmitted,
    InjectionClosed,
    InjectionDeferred,
    InjectionRequested,
    LoadFailed,
    LoadOrdered,
    RollbackOrdered,
    RolledBack,
    Unfrozen,
    VerificationOrdered,
)
from kite_schemas.why import Decision, Order, Outcome
from kite_schemas.yoco import (
    DrainOrdered,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    OrderRequested,
    PrewarmBlocked,
    PrewarmReleased,
    StartOrdered,
    WakeOrdered,
)


def fold(state: State, row: Row) -> State:
    """Fold one row: an order opens, the type's own fold applies, a last outcome closes its order.

    What an outcome tells of an instance of its node's last boot is in the ledger, and changes nothing.
    """
    data = row.data
    if isinstance(data, Decision):
        state = arbitration.decided(state, row, data)
    if isinstance(data, Order):
        state = put(state, orders.opened(state, row, data))
    if isinstance(data, Outcome) and orders.outdated(state, data):
        return orders.finished(state, data)
    own = FOLDS.get(type(data)) if data is not None else None
    if own is not None:
        state = own(state, row, data)
    return orders.finished(state, data) if isinstance(data, Outcome) else state


def _created(state: State, _row: Row, data: Created) -> State:
    return structs.replace(state, ledger=data.ledger)


def _blend_promoted(state: State, row: Row, data: BlendPromoted) -> State:
    return guard.promoted(injections.promoted(state, row, data), row, data)


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
    OrderRequested: instances.wanted,
    WakeOrdered: instances.woken,
    DrainOrdered: instances.drained,
    InstanceChanged: instances.changed,
    InstanceReady: instances.ready,
    OrderFailed: instances.order_failed,
    OrderRefused: instances.order_refused,
    InjectionRequested: _injection_requested,
    VerificationOrdered: injections.verifying,
    AdapterVerified: injections.verified,
    AdapterRefused: injections.refused,
    InjectionAdmitted: injections.admitted,
    BlendStored: injections.stored,
    BlendFailed: injections.blend_failed,
    LoadOrdered: injections.load_ordered,
    BlendLoaded: injections.loaded,
    EffectProven: injections.proven,
    LoadFailed: injections.load_failed,
    EffectMissing: injections.effect_missing,
    RollbackOrdered: injections.rollback_ordered,
    RolledBack: injections.rolled_back,
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
    InjectionClosed: injections.closed,
    OrderExpired: orders.expired,
}
