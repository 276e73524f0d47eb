"""The bus: a thin client over NATS JetStream, and an embedded server. The only part of KITE that imports `nats`."""

from kite.bus.client import Bus
from kite.bus.consume import Work
from kite.bus.errors import (
    BusClosed,
    BusDirectoryInUse,
    BusDirectoryUnusable,
    BusFull,
    BusGap,
    BusNotDurable,
    BusPortTaken,
    BusServerMissing,
    BusStartFailed,
    BusUnreachable,
    PublishFailed,
    PublishUnanswered,
    StreamChanged,
    StreamMissing,
    StreamRefused,
)
from kite.bus.mark import FILL_ALARM_PPM, Mark, StreamState
from kite.bus.message import Message
from kite.bus.monitor import require_sync, sync_always
from kite.bus.publish import Outcome, Outgoing, PubAck
from kite.bus.server import EmbeddedServer
from kite.bus.subjects import (
    DEC,
    EVT,
    FLEET,
    TEL,
    dec_filters,
    dec_subject,
    escape,
    evt_subject,
    stream_of,
    tel_subject,
    unescape,
)

__all__ = [
    "DEC",
    "EVT",
    "FILL_ALARM_PPM",
    "FLEET",
    "TEL",
    "Bus",
    "BusClosed",
    "BusDirectoryInUse",
    "BusDirectoryUnusable",
    "BusFull",
    "BusGap",
    "BusNotDurable",
    "BusPortTaken",
    "BusServerMissing",
    "BusStartFailed",
    "BusUnreachable",
    "EmbeddedServer",
    "Mark",
    "Message",
    "Outcome",
    "Outgoing",
    "PubAck",
    "PublishFailed",
    "PublishUnanswered",
    "StreamChanged",
    "StreamMissing",
    "StreamRefused",
    "StreamState",
    "Work",
    "dec_filters",
    "dec_subject",
    "escape",
    "evt_subject",
    "require_sync",
    "stream_of",
    "sync_always",
    "tel_subject",
    "unescape",
]
