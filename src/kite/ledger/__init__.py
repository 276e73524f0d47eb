"""The ledger: the append-only, hash-chained record of every event in the order it was applied.

`Ledger` is the one writer of a database (an SQLite file, or on PostgreSQL), `AsyncLedger` the same on a thread of its
own, `Reader` looks at it while the writer runs. With `kite.orders` this is the only package that opens a database.
"""

from kite.ledger.backend import is_shared
from kite.ledger.chain import GENESIS, digest, rehash, verify
from kite.ledger.errors import (
    ChainBroken,
    DraftRefused,
    DuplicateEvent,
    LeaseLost,
    LedgerHeld,
    LedgerMissing,
    LedgerTooNew,
    LedgerTooOld,
    LedgerUnreachable,
    LedgerUnwritable,
    MigrationsMissing,
    NotALedger,
    SqliteTooOld,
)
from kite.ledger.ledger import Ledger
from kite.ledger.reader import Reader
from kite.ledger.rows import Cursor, Draft, Head, Lease, Outgoing, Route, Row, Send
from kite.ledger.thread import AsyncLedger

__all__ = [
    "GENESIS",
    "AsyncLedger",
    "ChainBroken",
    "Cursor",
    "Draft",
    "DraftRefused",
    "DuplicateEvent",
    "Head",
    "Lease",
    "LeaseLost",
    "Ledger",
    "LedgerHeld",
    "LedgerMissing",
    "LedgerTooNew",
    "LedgerTooOld",
    "LedgerUnreachable",
    "LedgerUnwritable",
    "MigrationsMissing",
    "NotALedger",
    "Outgoing",
    "Reader",
    "Route",
    "Row",
    "Send",
    "SqliteTooOld",
    "digest",
    "is_shared",
    "rehash",
    "verify",
]
