"""How orders open, close and expire."""

from msgspec import structs

from kite_arbitrator.folds.injections import injection_expired
from kite_arbitrator.state import (
    OpenOrder,
    Row,
    State,
    backed_off,
    put,
    without,
)
from kite_schemas.arbitration import OrderExpired
from kite_schemas.upcycle import (
    InjectionAdmitted,
    LoadOrdered,
    VerificationOrdered,
)
from kite_schemas.why import Order, Outcome, Reason
from kite_schemas.yoco import (
    DrainOrdered,
    SleepOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

INJECTION_ORDERS = frozenset({VerificationOrdered.TYPE, InjectionAdmitted.TYPE, LoadOrdered.TYPE})
LIFE_ORDERS = frozenset({StartOrdered.TYPE, DrainOrdered.TYPE, SleepOrdered.TYPE, WakeOrdered.TYPE, StopOrdered.TYPE})


def opened(row: Row, order: Order) -> OpenOrder:
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


def finished(state: State, outcome: Outcome) -> State:
    """Close the order whose last outcome this is."""
    if not outcome.done or outcome.order is None:
        return state
    return structs.replace(state, orders=without(state.orders, outcome.order))


def expired(state: State, _row: Row, data: OrderExpired) -> State:
    """Free the target; what the order was for has failed, and the instance is where it was last seen."""
    order = state.orders.get(data.order)
    state = structs.replace(state, orders=without(state.orders, data.order))
    if order is None:
        return state
    if order.type in INJECTION_ORDERS:
        return injection_expired(state, order)
    instance = state.instances.get(order.instance or "")
    if instance is None or order.type not in LIFE_ORDERS:
        return state
    unfinished = {StartOrdered.TYPE: Life.FAILED, WakeOrdered.TYPE: Life.FAILED}.get(order.type, instance.state)
    if instance.state is Life.ABSENT and data.why.reason is Reason.NODE_REPLACED:
        return state
    return put(state, backed_off(state, structs.replace(instance, state=unfinished)))
