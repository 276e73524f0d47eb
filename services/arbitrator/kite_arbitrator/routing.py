"""Where a decision is published: orders and notices go to their worker, everything else to whoever listens."""

from kite.bus import FLEET, dec_subject
from kite_arbitrator.records import Row
from kite_schemas.arbitration import OrderExpired, TransportChanged
from kite_schemas.upcycle import DecaySet, ResidentsSet
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
        case ResidentsSet(node=node, instance=instance):
            return dec_subject(family, node, kind, f"instance/{instance}")
        case DecaySet(base=base):
            return dec_subject(family, FLEET, kind, f"base/{base}")
        case _:
            return announced(decision.type, decision.subject)


def announced(event_type: str, subject: str) -> str:
    """Return the bus subject of what is for whoever listens."""
    return dec_subject(FLEET, FLEET, event_type.split(".")[2], subject)
