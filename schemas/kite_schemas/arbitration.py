"""Decisions of the arbitrator about load: channels, pressure, modes, transport, and what is not done."""

from enum import StrEnum

from kite_schemas.model import EventId, Name, Text, Us
from kite_schemas.why import Decision, Request


class Channel(StrEnum):
    """Which lever answers the requests of a served name: the loaded blend on every instance, or the woken standby."""

    UPCYCLE = "upcycle"
    YOCO = "yoco"


class Mode(StrEnum):
    """How decisions are made: by the static rules, or without any that destroys, after a gap in the bus."""

    STATIC = "static"
    DEGRADED = "degraded"


class Transport(StrEnum):
    """How windows travel: without waiting, or acknowledged and retried."""

    FAST = "fast"
    RELIABLE = "reliable"


class Held(Decision):
    """Something asked for or due is not done now; `why.reason` says why. A repeat of the same skip is not written."""

    TYPE = "kite.arbitration.held.v1"

    detail: Text
    request: EventId | None = None


class Discarded(Decision):
    """A decision that would have undone the last one for its target too soon; it is taken again after the window."""

    TYPE = "kite.arbitration.discarded.v1"

    decision: Text
    target: Text
    request: EventId | None = None


class ChannelSelected(Decision):
    """From here this channel answers the requests of the blend."""

    TYPE = "kite.arbitration.channel_selected.v1"

    blend: Name
    channel: Channel


class PressureChanged(Decision):
    """A pool is under pressure, or no longer; `lasted_us` is how long the condition held, or the pressure."""

    TYPE = "kite.arbitration.pressure_changed.v1"

    node: Name
    base: Name
    on: bool
    lasted_us: Us


class ModeChanged(Decision):
    """From here decisions are made in this mode."""

    TYPE = "kite.arbitration.mode_changed.v1"

    mode: Mode


class TransportChanged(Decision):
    """The windows of a node travel in this way from here, until its yoco starts anew."""

    TYPE = "kite.arbitration.transport_changed.v1"

    node: Name
    boot: EventId
    transport: Transport


class GapAcknowledged(Request):
    """Somebody has looked at what the bus lost: decisions may destroy again."""

    TYPE = "kite.arbitration.gap_acknowledged.v1"


class OrderExpired(Decision):
    """An order ended without an outcome: its target is free again."""

    TYPE = "kite.arbitration.order_expired.v1"

    order: EventId
    service: Name
    kind: Name
    target: Text
    node: Name
