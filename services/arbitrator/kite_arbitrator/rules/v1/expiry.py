"""Orders that nobody answered: judged in ledger time, on ledger ticks."""

from collections.abc import Iterator

from kite_arbitrator.records import OpenOrder, Row
from kite_arbitrator.rules.draft import Draft, at_most, why
from kite_arbitrator.state import State
from kite_schemas.arbitration import OrderExpired
from kite_schemas.ledger import Tick
from kite_schemas.why import Reason
from kite_schemas.yoco import NodeRegistered


def expire(state: State, row: Row) -> Iterator[Draft]:
    """Give up the orders whose time has passed, and those of a node that has started anew."""
    match row.data:
        case Tick():
            late = [order for order in state.orders.values() if order.expires_us <= state.now_us]
            reason = Reason.EXPIRED
        case NodeRegistered(node=node):
            late = [order for order in state.orders.values() if order.node == node]
            reason = Reason.NODE_REPLACED
        case _:
            return
    for order in sorted(late, key=lambda order: order.id):
        yield _expired(state, row, order, reason)


def _expired(state: State, row: Row, order: OpenOrder, reason: Reason) -> Draft:
    open_us = state.now_us - order.issued_us
    rule = at_most("order.open_us", open_us, order.expires_us - order.issued_us)
    _, service, kind, _ = order.type.split(".")
    data = OrderExpired(
        order=order.id,
        service=service,
        kind=kind,
        target=order.target,
        node=order.node,
        why=why(state, row, reason, rules=[rule]),
    )
    return Draft(f"order/{order.id}", data)
