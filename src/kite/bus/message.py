"""A stored message, its id, and how to read one from what the server sends: pure."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kite.clock import NS_PER_US, parse_us
from kite.trust import SIGNATURE

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
STATUS = "Status"
DESCRIPTION = "Description"
DIGEST_CHARS = 16

_STREAM, _SUBJECT, _SEQ, _TIME = "Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"
_DIRECT = frozenset({_STREAM, _SUBJECT, _SEQ, _TIME})
_DELIVERY_PREFIX = "$JS.ACK."
_SHORT_TOKENS = 9  # $JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<ns>.<pending>
_DOMAIN_TOKENS = 2  # longer ones carry <domain>.<account> after $JS.ACK


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the stream stores it. `published_us` is the server's clock, `seq` starts at 1."""

    stream: str
    seq: int
    subject: str
    payload: bytes
    headers: Mapping[str, str]
    published_us: int

    @property
    def msg_id(self) -> str:
        """The id by which the bus tells messages apart: see `msg_id`; "" when the publisher gave none."""
        return self.headers.get(MSG_ID, "")

    @property
    def event_id(self) -> str:
        """The id of the event in it, as the publisher says; "" when it said none."""
        return self.msg_id.partition(".")[0]

    @property
    def signature(self) -> str:
        """The text of the signature's header, for `kite.trust.parse`; "" when it is not signed."""
        return self.headers.get(SIGNATURE, "")


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the reply subject of a delivered message says. `delivered` counts from 1."""

    stream: str
    seq: int
    delivered: int
    published_us: int


def msg_id(event_id: str, payload: bytes) -> str:
    """Return the id under which the bus stores a payload once: of the event, and of these very bytes.

    With the id of the event alone, whoever publishes it first keeps the genuine message out of the bus.

    >>> msg_id("019a", b"{}")
    '019a.44136fa355b3678a'
    """
    return f"{event_id}.{hashlib.sha256(payload).hexdigest()[:DIGEST_CHARS]}"


def is_delivery(reply: str) -> bool:
    """Tell a stored message from a status line of the server, which has no such reply subject."""
    return reply.startswith(_DELIVERY_PREFIX)


def parse_delivery(reply: str) -> Delivery:
    """Read the reply subject of a delivered message.

    >>> parse_delivery("$JS.ACK.KITE_EVT.c1.2.70.9.1700000000123456789.0")
    Delivery(stream='KITE_EVT', seq=70, delivered=2, published_us=1700000000123456)
    """
    tokens = reply.split(".")
    skip = 2 if len(tokens) == _SHORT_TOKENS else 2 + _DOMAIN_TOKENS
    stream, _, delivered, seq, _, time_ns = tokens[skip : skip + 6]
    return Delivery(stream, int(seq), int(delivered), int(time_ns) // NS_PER_US)


def from_delivery(subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None) -> Message:
    """Build a message from a consumer's delivery."""
    found = parse_delivery(reply)
    return Message(found.stream, found.seq, subject, payload, MappingProxyType(dict(headers or {})), found.published_us)


def is_direct(headers: Mapping[str, str]) -> bool:
    """Tell a message from a status line in the answer to a direct get."""
    return _SEQ in headers


def from_direct(payload: bytes, headers: Mapping[str, str]) -> Message:
    """Build a message from the answer to a direct get, whose place is in extra headers."""
    own = MappingProxyType({key: value for key, value in headers.items() if key not in _DIRECT})
    published_us = parse_us(headers[_TIME])
    return Message(headers[_STREAM], int(headers[_SEQ]), headers[_SUBJECT], payload, own, published_us)
