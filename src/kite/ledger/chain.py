"""The hash chain, without a database: each row's hash covers the row and the hash before it.

It is sha256 over the previous hash, a header with every integer column and the length of every other one, then those
others. A header of fixed size that comes first makes the framing unambiguous. Bytes are hashed as they came: to
serialise them again would cost 60 times as much, and could differ.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter

from kite.ledger.errors import ChainBroken, DraftRefused
from kite.ledger.rows import Draft, Head, Row

Columns = tuple[int, int, str, int, int, str, str, str, int, int, str, str, bytes, bytes]
"""A row without its hash, in the order of `Row`."""

GENESIS = bytes(32)
"""What the first row is linked to."""

RAW_LIMIT_BYTES = 8 * 1024 * 1024
"""The largest envelope in a row: NATS's own upper bound for one message. Larger drafts are refused."""

_HEADER = struct.Struct(">6q8Q")

columns_of: Callable[[Row], Columns] = attrgetter(
    "pos",
    "epoch",
    "bus_stream",
    "bus_epoch",
    "bus_seq",
    "event_id",
    "type",
    "subject",
    "occurred_us",
    "ledger_us",
    "trace_id",
    "key_id",
    "signature",
    "raw",
)


def digest(previous: bytes, columns: Columns) -> bytes:
    """Return the hash (32 bytes) of a row that follows one whose hash is `previous`.

    Raises struct.error for an integer beyond 64 bits and UnicodeEncodeError for text that UTF-8 cannot hold.
    """
    # Spelled out: every row passes here, and a loop over the columns takes half as long again.
    pos, epoch, stream, bus_epoch, bus_seq, event_id, kind, subject = columns[:8]
    occurred_us, ledger_us, trace_id, key_id, signature, raw = columns[8:]
    a, b, c = stream.encode(), event_id.encode(), kind.encode()
    d, e, f = subject.encode(), trace_id.encode(), key_id.encode()
    lengths = (len(a), len(b), len(c), len(d), len(e), len(f), len(signature), len(raw))
    header = _HEADER.pack(pos, epoch, bus_epoch, bus_seq, occurred_us, ledger_us, *lengths)
    return sha256(b"".join((previous, header, a, b, c, d, e, f, signature, raw))).digest()


def seal(head: Head, drafts: Sequence[Draft]) -> list[Row]:
    """Return the rows that `drafts` become after `head`: dense positions, the head's epoch, linked hashes.

    Raises DraftRefused for a draft that no ledger can hold: time that runs backwards, an envelope past
    RAW_LIMIT_BYTES, an integer beyond 64 bits, text that is no UTF-8 or has a NUL (PostgreSQL has none).
    """
    rows: list[Row] = []
    last_us, previous = head.ledger_us, head.hash
    for index, draft in enumerate(drafts):
        if draft.ledger_us < last_us:
            raise DraftRefused(index, f"ledger_us {draft.ledger_us} is before {last_us}")
        if len(draft.raw) > RAW_LIMIT_BYTES:
            raise DraftRefused(index, f"{len(draft.raw)} bytes are more than {RAW_LIMIT_BYTES}")
        if "\0" in _texts(draft):
            raise DraftRefused(index, "its text has a NUL character, which not every database can hold")
        row = _link(previous, _place(draft, head.pos + 1 + index, head.epoch), index)
        rows.append(row)
        last_us, previous = row.ledger_us, row.hash
    return rows


def verify(rows: Iterable[Row], *, after: int = 0, previous: bytes = GENESIS) -> Iterator[Row]:
    """Yield `rows` as they prove to be the rows after position `after`, whose hash is `previous`.

    Raises ChainBroken at the first position that is missing or altered.
    """
    for pos, row in enumerate(rows, after + 1):
        if row.pos != pos:
            raise ChainBroken(pos, f"missing; the next row is {row.pos}")
        if digest(previous, columns_of(row)) != row.hash:
            raise ChainBroken(pos, "its hash does not match its content")
        yield row
        previous = row.hash


def rehash(rows: Iterable[Row], *, previous: bytes = GENESIS) -> Iterator[Row]:
    """Yield `rows` with hashes that fit again, as one who alters a recorded decision would leave them."""
    for row in rows:
        fitting = replace(row, hash=digest(previous, columns_of(row)))
        yield fitting
        previous = fitting.hash


def _place(draft: Draft, pos: int, epoch: int) -> Columns:
    return (
        pos,
        epoch,
        draft.bus_stream,
        draft.bus_epoch,
        draft.bus_seq,
        draft.event_id,
        draft.type,
        draft.subject,
        draft.occurred_us,
        draft.ledger_us,
        draft.trace_id,
        draft.key_id,
        draft.signature,
        draft.raw,
    )


def _texts(draft: Draft) -> str:
    return f"{draft.event_id}{draft.type}{draft.subject}{draft.trace_id}{draft.bus_stream}{draft.key_id}"


def _link(previous: bytes, columns: Columns, index: int) -> Row:
    try:
        return Row(*columns, digest(previous, columns))
    except (struct.error, UnicodeEncodeError) as error:
        raise DraftRefused(index, str(error)) from error
