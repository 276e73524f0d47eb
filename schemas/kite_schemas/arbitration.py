"""Decisions of the arbitrator that belong to no channel."""

from kite_schemas.model import EventId, Name, Text
from kite_schemas.why import Decision


class Held(Decision):
    """Something asked for or due is not done now; `why.reason` says why."""

    TYPE = "kite.arbitration.held.v1"

    detail: Text
    request: EventId | None = None


class OrderExpired(Decision):
    """An order ended without an outcome: its target is free again."""

    TYPE = "kite.arbitration.order_expired.v1"

    order: EventId
    service: Name
    kind: Name
    target: Text
    node: Name
