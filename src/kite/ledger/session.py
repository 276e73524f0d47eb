"""Sessions on PostgreSQL: how KITE connects, what it sets, and what a refusal means.

Connect to the server itself: what is set here belongs to a session, which a pooler by transaction does not keep.
"""

from contextlib import suppress
from typing import Final

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from kite.errors import KiteError, UsageError
from kite.ledger.address import PostgresAddress
from kite.ledger.errors import LedgerMissing, LedgerUnreachable, LedgerUnwritable

Session = psycopg.Connection[TupleRow]

CONNECT_TIMEOUT_S = 3
"""How long an attempt to connect to one host may take."""

KEEPALIVE_IDLE_S = 2
KEEPALIVE_INTERVAL_S = 1
KEEPALIVE_PROBES = 3
TCP_USER_TIMEOUT_MS = 5_000
"""How soon a peer that went without a word is noticed: by probes while idle, and with bytes under way."""

LOCK_TIMEOUT_MS = 3_000
"""How long a statement waits for a lock; there is one writer, so only a take-over or a migration can be in the way."""

IDLE_TIMEOUT_MS = 15_000
"""After how long the server ends a session that stopped in mid-transaction, with the lease's row locked."""

ENCODING = "UTF8"

_LIBPQ = {
    "connect_timeout": str(CONNECT_TIMEOUT_S),
    "keepalives": "1",
    "keepalives_idle": str(KEEPALIVE_IDLE_S),
    "keepalives_interval": str(KEEPALIVE_INTERVAL_S),
    "keepalives_count": str(KEEPALIVE_PROBES),
    "tcp_user_timeout": str(TCP_USER_TIMEOUT_MS),
    "client_encoding": ENCODING,
    "application_name": "kite",
}
_SETTINGS = {
    "synchronous_commit": "on",
    "lock_timeout": f"{LOCK_TIMEOUT_MS}ms",
    "idle_in_transaction_session_timeout": f"{IDLE_TIMEOUT_MS}ms",
    "default_transaction_isolation": "read committed",
}
_SET: Final = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted(name, value)"
_ENCODING: Final = "SELECT getdatabaseencoding()"


def connect(address: PostgresAddress, *, readonly: bool = False) -> Session:
    """Open a session that commits each statement by itself.

    Raises LedgerMissing when the server has no such database, LedgerUnreachable when nothing answers or lets us in,
    LedgerUnwritable when the database is not in UTF-8, and UsageError for a parameter that libpq does not know.
    """
    session = _open(address)
    settings = {**_SETTINGS, "default_transaction_read_only": "on" if readonly else "off"}
    try:
        session.execute(_SET, (list(settings), list(settings.values())))
        encoding = session.execute(_ENCODING).fetchone()
    except psycopg.Error as error:
        session.close()
        raise fault(address.place, session, error) from error
    if encoding != (ENCODING,):
        session.close()
        raise LedgerUnwritable(address.place, f"its encoding is {encoding and encoding[0]} and must be {ENCODING}")
    return session


def fault(place: str, session: Session, error: psycopg.Error) -> KiteError:
    """Return what `error` means for the ledger at `place`: the session broke, or the database refused."""
    detail = _line(error)
    return LedgerUnreachable(place, detail) if session.closed else LedgerUnwritable(place, detail)


def _open(address: PostgresAddress) -> Session:
    try:
        return psycopg.connect(make_conninfo("", **{**_LIBPQ, **address.parameters}), autocommit=True)
    except psycopg.OperationalError as error:
        # A failed connection has no SQLSTATE, only text.
        if f'database "{address.parameters["dbname"]}" does not exist' in str(error):
            raise LedgerMissing(address.place) from error
        raise LedgerUnreachable(address.place, _line(error)) from error
    except psycopg.Error as error:
        raise UsageError(f"{address.place}: {_line(error)}", hint="see PostgreSQL's connection parameters") from error


def _line(error: psycopg.Error) -> str:
    """Return the first line of what the server or libpq says: what follows is context."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def close(session: Session) -> None:
    """End a session in whatever state it is."""
    with suppress(psycopg.Error):
        session.close()
