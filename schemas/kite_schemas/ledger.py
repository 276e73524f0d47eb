"""Rows that the arbitrator itself writes: the ledger's birth, its clock, and what could not be taken in; and the keys
that it is to trust.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from kite_schemas.model import Count, Digest, EventId, Name, Text, Us
from kite_schemas.why import LedgerRow, Request

REJECTED_BYTES_MAX = 4_096

KeyId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
"""The first 16 hex digits of sha256 over a public key."""
PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""An Ed25519 public key in hex."""
Signature = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
"""An Ed25519 signature in hex."""
Source = Annotated[str, StringConstraints(pattern=r"^kite/[a-z]+/[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
"""Who speaks, as in the envelope: `kite/<service>/<node or name>`."""


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
    UNSIGNED = "unsigned"
    KEY_UNKNOWN = "key_unknown"
    SIGNATURE_WRONG = "signature_wrong"
    NOT_OF_PRODUCER = "not_of_producer"


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


class EpochEnd(StrEnum):
    """How a bus turned out not to be the one that was read."""

    CREATED_ANEW = "created_anew"
    SHORTER = "shorter"
    OTHER_MESSAGE = "other_message"
    MESSAGE_MISSING = "message_missing"


class BusEpochChanged(LedgerRow):
    """The stream is not the one that was read up to `seq`: it is read again from its start as `bus_epoch`."""

    TYPE = "kite.ledger.bus_epoch_changed.v1"

    stream: Name
    bus_epoch: Count
    why: EpochEnd
    seq: Count
    msg_id: Text
    created: Text
    found: Text


class ClockStepped(LedgerRow):
    """The wall clock jumped by `by_us`; the ledger's time goes on as if it had not."""

    TYPE = "kite.ledger.clock_stepped.v1"

    by_us: int = Field(strict=True)


class Checkpointed(LedgerRow):
    """The arbitrator signs that this ledger's row at `pos` has `hash`: a tail cut off later is noticed."""

    TYPE = "kite.ledger.checkpointed.v1"

    ledger: EventId
    pos: Count
    hash: Digest
    key_id: KeyId
    signature: Signature = Field(description="Ed25519 over `<ledger>/<pos>/<hash>`")


def sealed(ledger: str, pos: int, digest: str) -> bytes:
    """Return the bytes that a checkpoint signs."""
    return f"{ledger}/{pos}/{digest}".encode()


class ProducerKeyAdded(Request):
    """From here on `public_key` speaks for `source`. Taken only when the operator's key signed it."""

    TYPE = "kite.ledger.producer_key_added.v1"

    source: Source
    public_key: PublicKey


class DeadlineMissed(LedgerRow):
    """Decisions at positions `first` to `last` were durable too long after their event had come."""

    TYPE = "kite.ledger.deadline_missed.v1"

    first: Count
    last: Count
    took_us: Us
    deadline_us: Us
