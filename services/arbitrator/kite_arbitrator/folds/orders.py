"""How orders open, close and expire."""

from msgspec import structs

from kite_arbitrator.folds import passages, rollbacks, versions
from kite_arbitrator.folds.injections import injection_expired, stuck
from kite_arbitrator.records import OpenOrder, Row
from kite_arbitrator.state import State, backed_off, delayed, put, with_item, without
from kite_schemas.arbitration import OrderExpired
from kite_schemas.guard import ComparisonOrdered, MeasurementOrdered
from kite_schemas.upcycle import (
    DeleteOrdered,
    InjectionAdmitted,
    LoadOrdered,
    RebuildOrdered,
    RetireOrdered,
    RollbackOrdered,
    VerificationOrdered,
)
from kite_schemas.why import Order, Outcome, Reason
from kite_schemas.yoco import (
    DrainOrdered,
    OrderRequested,
    PrewarmOrdered,
    SleepOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

INJECTION_ORDERS = frozenset({VerificationOrdered.TYPE, InjectionAdmitted.TYPE, LoadOrdered.TYPE})
VERSION_ORDERS = frozenset(kind.TYPE for kind in (RollbackOrdered, RetireOrdered, DeleteOrdered, RebuildOrdered))
LIFE_ORDERS = frozenset(
    kind.TYPE for kind in (StartOrdered, PrewarmOrdered, DrainOrdered, SleepOrdered, WakeOrdered, StopOrdered)
)

UNFINISHED = frozenset({StartOrdered.TYPE, PrewarmOrdered.TYPE, WakeOrdered.TYPE})
"""Given up, one of these leaves an instance of which nothing is known: it has failed."""

PROBED_US = 300_000
"""For so long after an order windows may still tell of its requests: an interval, a reading's age, the transport."""

SHIFT_US = 10_000_000
"""After the load of an injection its worker asks once more: how far it moved the answers."""


GIVEN_UP_MAX = 256
"""So many orders that ended without an outcome are remembered, the newest: an outcome that comes later is rare."""


def opened(state: State, row: Row, order: Order) -> OpenOrder:
    node = state.nodes.get(order.node)
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
        boot=node.boot if node else "",
        asks=_asked(order),
        wanted=_wanted(state, order),
        version=_version(order),
    )


def _wanted(state: State, order: Order) -> OrderRequested | None:
    request = state.wanted.get(getattr(order, "request", None) or "")
    return request if isinstance(request, OrderRequested) else None


def _version(order: Order) -> str:
    if isinstance(order, LoadOrdered):
        return order.resident.version
    known = isinstance(order, RollbackOrdered | RetireOrdered | DeleteOrdered | RebuildOrdered)
    return order.version if known else ""


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
    return structs.replace(
        state, orders=without(state.orders, outcome.order), given_up=without(state.given_up, outcome.order)
    )


def outdated(state: State, outcome: Outcome) -> bool:
    """Tell whether an outcome is about an instance as it was before its node started anew.

    Its order was given up then, or earlier; the worker was cut off before it could tell. What the registration found is
    newer, and the orders of the new boot have outcomes of their own.
    """
    order = state.given_up.get(outcome.order or "")
    if order is None or order.instance is None:
        return False
    node = state.nodes.get(order.node)
    return node is None or node.boot != order.boot


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


def expired(state: State, row: Row, data: OrderExpired) -> State:
    """Free the target; what the order was for has failed, and the instance is where it was last seen."""
    order = state.orders.get(data.order)
    state = _probed(state, data.order)
    state = structs.replace(state, orders=without(state.orders, data.order))
    if order is None:
        return state
    state = _given_up(state, order)
    if order.type in INJECTION_ORDERS:
        return injection_expired(state, order, data.why.reason)
    if order.type in VERSION_ORDERS:
        return _version_kept(state, row, order, data.why.reason)
    name = order.instance or ""
    if name not in state.instances or order.type not in LIFE_ORDERS:
        return state
    if data.why.reason is Reason.NODE_REPLACED:
        return state  # what its node found has been taken as it is
    return _without_outcome(state, order, name)


def _version_kept(state: State, row: Row, order: OpenOrder, reason: Reason) -> State:
    """The version is where it was; only what its node's new start ended is ordered again at once."""
    if order.type == RollbackOrdered.TYPE:
        return stuck(state, order.request or "", order.instance or "")
    state = versions.kept(state, row, order.version)
    if reason is Reason.NODE_REPLACED:
        return state
    if order.type == RebuildOrdered.TYPE:
        state = rollbacks.not_restored(state, order.version, f"{order.node} did not answer in time")
    return delayed(state, order.target)


def _without_outcome(state: State, order: OpenOrder, name: str) -> State:
    """Back off; a standby that was to be started for a need is awake no more."""
    state = passages.failed(state, name)
    instance = state.instances[name]
    if order.type in UNFINISHED:
        instance = structs.replace(instance, state=Life.FAILED)
    if order.type == StartOrdered.TYPE:
        instance = structs.replace(instance, summoned=False, asked=False)
    return put(state, backed_off(state, instance))


def _given_up(state: State, order: OpenOrder) -> State:
    """Remember the order, in place of the oldest when there are too many."""
    kept = with_item(state.given_up, order.id, order)
    return structs.replace(state, given_up=without(kept, next(iter(kept))) if len(kept) > GIVEN_UP_MAX else kept)
