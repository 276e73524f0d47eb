"""What goes into a ledger and what comes out of it. Times are microseconds of UTC, positions count from 1."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One row to append. `raw` is the exact bytes of the envelope: they are hashed, and never serialised again.

    `bus_*` say where the message was read, `key_id` and `signature` (64 bytes) who signed it; a row that the arbitrator
    writes itself leaves them empty.
    """

    event_id: str
    type: str
    subject: str
    occurred_us: int
    ledger_us: int
    raw: bytes
    trace_id: str = ""
    bus_stream: str = ""
    bus_epoch: int = 0
    bus_seq: int = 0
    key_id: str = ""
    signature: bytes = b""


@dataclass(slots=True, unsafe_hash=True)
class Row:
    """One row of the ledger, its fields in the order of the columns; `hash` links it to the row before.

    Never altered. It is not `frozen` because that takes 3 µs more to make, a fifth of what an append costs.
    """

    pos: int
    epoch: int
    bus_stream: str
    bus_epoch: int
    bus_seq: int
    event_id: str
    type: str
    subject: str
    occurred_us: int
    ledger_us: int
    trace_id: str
    key_id: str
    signature: bytes
    raw: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a ledger: last position, hash and time (0 and the genesis hash when empty), and the lease's epoch."""

    pos: int
    hash: bytes
    ledger_us: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may write: the `holder` of the `epoch`, empty when it was given back. A holder that lives moves `counter`."""

    epoch: int
    holder: str
    counter: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The last message of one stream that the ledger has consumed: its id and time there, and the stream's creation."""

    stream: str
    bus_epoch: int
    seq: int
    msg_id: str
    created: str
    published_us: int = 0

    @classmethod
    def of(cls, columns: tuple[str, int, int, str, str, int]) -> "Cursor":
        """Return a cursor from its columns, in the order of the fields."""
        stream, bus_epoch, seq, msg_id, created, published_us = columns
        return cls(
            stream=stream, bus_epoch=bus_epoch, seq=seq, msg_id=msg_id, created=created, published_us=published_us
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Asks for one draft of an append to be published: `draft` is its index there, `subject` the subject on the bus.

    What is published is the draft's `raw`, so that the bus can never carry other bytes than the ledger holds.
    """

    draft: int
    subject: str
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """One row of the outbox: what is still to be published, under which subject, and the exact bytes."""

    pos: int
    subject: str
    payload: bytes
    event_id: str
    traceparent: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests for a served name may go: `instance` answers them at `endpoint` when asked for `version`.

    `name` is a blend's or a base's, `channel` the lever that answers it, `pos` the position that made it so.
    """

    name: str
    version: str
    instance: str
    endpoint: str
    channel: str
    pos: int
