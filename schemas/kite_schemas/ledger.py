"""Rows that the arbitrator itself writes: the ledger's birth, its clock, and what could not be taken in."""

from enum import StrEnum

from pydantic import Field

from kite_schemas.model import Count, EventId, Name, Text, Us
from kite_schemas.why import LedgerRow

REJECTED_BYTES_MAX = 4_096


class Created(LedgerRow):
    """The first row."""

    TYPE = "kite.ledger.created.v1"

    ledger: EventId
    format: Count


class LeaseTaken(LedgerRow):
    """An arbitrator has begun to write; `epoch` counts how often that happened."""

    TYPE = "kite.ledger.lease_taken.v1"

    epoch: Count
    holder: Text


class Tick(LedgerRow):
    """Time has passed: the row's own ledger time is the news."""

    TYPE = "kite.ledger.tick.v1"


class Refusal(StrEnum):
    """Why a message of the bus did not become a row of its own."""

    MALFORMED = "malformed"
    SUBJECT_MISMATCH = "subject_mismatch"
    NOT_FOR_PRODUCERS = "not_for_producers"
    TOO_LARGE = "too_large"


class Rejected(LedgerRow):
    """A message that is no valid event; `content` is its first 4 096 bytes in base64."""

    TYPE = "kite.ledger.rejected.v1"

    stream: Name
    seq: Count
    bus_subject: Text
    code: Refusal
    message: Text
    content: str = Field(max_length=REJECTED_BYTES_MAX * 2)


class EventIdConflict(LedgerRow):
    """A second event under an id that the ledger has, with other bytes."""

    TYPE = "kite.ledger.event_id_conflict.v1"

    stream: Name
    seq: Count
    event_id: EventId


class BusGap(LedgerRow):
    """Messages of the bus that can no longer be read."""

    TYPE = "kite.ledger.bus_gap.v1"

    stream: Name
    first: Count
    last: Count


class DeadlineMissed(LedgerRow):
    """Decisions at positions `first` to `last` were durable too long after their event had come."""

    TYPE = "kite.ledger.deadline_missed.v1"

    first: Count
    last: Count
    took_us: Us
    deadline_us: Us
