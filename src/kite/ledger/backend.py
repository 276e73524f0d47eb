"""Opening a ledger, whatever database its URL names; the drivers are imported here, one only where it is needed."""

import os
import socket

from kite.ledger.address import PostgresAddress, parse
from kite.ledger.port import Source, Store
from kite.ledger.rows import Lease


def open_store(url: str, holder: str, seen: Lease | None) -> Store:
    """Open the read-write side of the ledger at `url` for `holder`, migrated; `take` it next. See `Ledger.open`."""
    address = parse(url)
    if isinstance(address, PostgresAddress):
        from kite.ledger.postgres import PostgresStore

        return PostgresStore.open(address, holder, seen)
    from kite.ledger.sqlite import SqliteStore

    return SqliteStore.open(address, holder)


def open_source(url: str) -> Source:
    """Open the read-only side of the ledger at `url`. See `Reader.open`."""
    address = parse(url)
    if isinstance(address, PostgresAddress):
        from kite.ledger import postgres

        return postgres.source(address)
    from kite.ledger import sqlite

    return sqlite.source(address)


def is_shared(url: str) -> bool:
    """Tell whether several arbitrators may have this ledger, one leading and the others waiting. Raises UsageError."""
    return isinstance(parse(url), PostgresAddress)


def here() -> str:
    """Return the name of this process as the holder of a lease: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"
