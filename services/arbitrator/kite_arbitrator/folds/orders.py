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
from kite_schemas.guard import ComparisonOrdered, MeasurementOrdered
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

PROBED_US = 300_000
"""For so long after an order windows may still tell of its requests: an interval, a reading's age, the transport."""

SHIFT_US = 10_000_000
"""After the load of an injection its worker asks once more: how far it moved the answers."""


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
        asks=_asked(order),
    )


def _asked(order: Order) -> tuple[str, ...]:
    if isinstance(order, ComparisonOrdered):
        return tuple(side.instance for side in order.sides)
    if isinstance(order, MeasurementOrdered):
        return (order.side.instance,)
    return (order.instance,) if isinstance(order, LoadOrdered | WakeOrdered | StartOrdered) else ()


def finished(state: State, outcome: Outcome) -> State:
    """Close the order whose last outcome this is."""
    if not outcome.done or outcome.order is None:
        return state
    state = _probed(state, outcome.order)
    return structs.replace(state, orders=without(state.orders, outcome.order))


def _probed(state: State, order: str) -> State:
    """Remember until when what an order asks of its instances may be told by windows."""
    closed = state.orders.get(order)
    for name in closed.asks if closed else ():
        if closed is not None and name in state.instances:
            instance = state.instances[name]
            moved = closed.type == LoadOrdered.TYPE and closed.request is not None
            until_us = state.now_us + (SHIFT_US if moved else PROBED_US)
            until_us = max(until_us, instance.probed_until_us)
            state = put(state, structs.replace(instance, probed_until_us=until_us))
    return state


def expired(state: State, _row: Row, data: OrderExpired) -> State:
    """Free the target; what the order was for has failed, and the instance is where it was last seen."""
    order = state.orders.get(data.order)
    state = _probed(state, data.order)
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
