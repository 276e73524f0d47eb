"""What a message of the bus is: an event, or something to be recorded as refused. Pure."""

from base64 import b64encode

from kite.bus import Message, evt_subject
from kite_schemas.envelope import EVENT_MAX_BYTES, Event, MalformedEvent, decode
from kite_schemas.ledger import REJECTED_BYTES_MAX, Refusal, Rejected

REASON_MAX_CHARS = 500
PRODUCERS = frozenset({"request", "fact"})
"""Kinds that may come from outside; decisions and ledger rows are the arbitrator's own."""


def examine(message: Message) -> Event | Rejected:
    """Return the event in a message, or why there is none that a producer may send on this subject."""
    try:
        event = decode(message.payload)
    except MalformedEvent as error:
        too_large = len(message.payload) > EVENT_MAX_BYTES
        return _rejected(message, Refusal.TOO_LARGE if too_large else Refusal.MALFORMED, str(error))
    header = event.header
    if event.data is not None and event.data.KIND not in PRODUCERS:
        return _rejected(message, Refusal.NOT_FOR_PRODUCERS, f"{header.type} is written by the arbitrator only")
    expected = evt_subject(header.type, header.subject)
    if message.subject != expected:
        return _rejected(message, Refusal.SUBJECT_MISMATCH, f"the event belongs on {expected}")
    return event


def _rejected(message: Message, code: Refusal, reason: str) -> Rejected:
    return Rejected(
        stream=message.stream,
        seq=message.seq,
        bus_subject=message.subject[:REASON_MAX_CHARS],
        code=code,
        message=reason[:REASON_MAX_CHARS],
        content=b64encode(message.payload[:REJECTED_BYTES_MAX]).decode(),
    )
