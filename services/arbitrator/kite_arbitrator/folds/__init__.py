"""How each type of row changes the state: one small function per type, and one table."""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from kite_arbitrator.folds import guard, injections, instances, orders
from kite_arbitrator.state import (
    Row,
    State,
    put,
)
from kite_schemas.arbitration import Held, OrderExpired
from kite_schemas.guard import Compared, ComparisonOrdered
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
from kite_schemas.why import Order, Outcome
from kite_schemas.yoco import (
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    StartOrdered,
    WakeOrdered,
)


def fold(state: State, row: Row) -> State:
    """Fold one row: an order opens, the type's own fold applies, a last outcome closes its order."""
    data = row.data
    if isinstance(data, Order):
        state = put(state, orders.opened(row, data))
    own = FOLDS.get(type(data)) if data is not None else None
    if own is not None:
        state = own(state, row, data)
    return orders.finished(state, data) if isinstance(data, Outcome) else state


def _created(state: State, _row: Row, data: Created) -> State:
    return structs.replace(state, ledger=data.ledger)


def _blend_promoted(state: State, row: Row, data: BlendPromoted) -> State:
    return guard.promoted(injections.promoted(state, row, data), row, data)


def _policy_set(state: State, _row: Row, data: PolicySet) -> State:
    return structs.replace(state, policy=data.policy, policy_digest=data.digest)


Fold = Callable[[State, Row, Any], State]  # Any: each fold takes the one payload type that the table gives it

FOLDS: dict[type[Data], Fold] = {
    Created: _created,
    PolicySet: _policy_set,
    NodeRegistered: instances.node_registered,
    StartOrdered: instances.started,
    WakeOrdered: instances.woken,
    InstanceChanged: instances.changed,
    InstanceReady: instances.ready,
    OrderFailed: instances.order_failed,
    OrderRefused: instances.order_refused,
    InjectionRequested: injections.requested,
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
    Compared: guard.compared,
    Held: guard.held,
    Frozen: guard.frozen,
    Unfrozen: guard.unfrozen,
    InjectionClosed: injections.closed,
    OrderExpired: orders.expired,
}
