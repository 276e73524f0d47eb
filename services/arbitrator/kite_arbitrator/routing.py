"""Where a decision is published: orders and notices go to their worker, everything else to whoever listens."""

from kite.bus import FLEET, dec_subject
from kite_arbitrator.state import Row
from kite_schemas.arbitration import OrderExpired, TransportChanged
from kite_schemas.upcycle import DecaySet
from kite_schemas.why import Order

WINDOWS = "yoco"  # the service that sends them


def destination(decision: Row) -> str:
    """Return the bus subject of a decision."""
    _, family, kind, _ = decision.type.split(".")
    match decision.data:
        case Order(node=node, target=target):
            return dec_subject(family, node, kind, target)
        case OrderExpired(service=service, node=node, target=target):
            return dec_subject(service, node, kind, target)
        case TransportChanged(node=node):
            return dec_subject(WINDOWS, node, kind, f"node/{node}")
        case DecaySet(base=base):
            return dec_subject(family, FLEET, kind, f"base/{base}")
        case _:
            return dec_subject(FLEET, FLEET, kind, decision.subject)
