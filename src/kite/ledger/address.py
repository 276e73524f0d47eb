"""Where a ledger is and which database keeps it: its URL, as SQLAlchemy writes them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from kite.errors import UsageError

_HINT = (
    "a ledger's URL is sqlite:////absolute/path, or postgresql://user@host:port/database (a unix socket: "
    "postgresql:///database?host=/folder); a password is better kept in the file that PGPASSFILE names"
)
_DRIVERS = frozenset({"postgresql", "postgresql+psycopg"})
_SECRET = re.compile(r":.*@")


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A database on a PostgreSQL server: how libpq is to reach it, and `place`, which messages may show."""

    place: str
    parameters: dict[str, str] = field(repr=False)
    """libpq's connection parameters by name, a password among them when the URL has one."""


def parse(url: str) -> Path | PostgresAddress:
    """Return where `url` leads: an SQLite file or a PostgreSQL database. Raises UsageError for any other."""
    parsed = _parse(url)
    return postgres_address(url) if parsed.get_backend_name() == "postgresql" else sqlite_path(url)


def sqlite_path(url: str) -> Path:
    """Return the absolute path, links followed, of the SQLite file that `url` names; raises UsageError for other URLs.

    A database in memory is refused: it could be neither shared with a reader nor kept.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() != "sqlite" or parsed.host:
        raise UsageError(f"{parsed.render_as_string()} is neither an SQLite file nor on PostgreSQL", hint=_HINT)
    if not parsed.database or parsed.database == ":memory:" or parsed.query:
        raise UsageError(f"{parsed.render_as_string()} names no plain file", hint=_HINT)
    return Path(parsed.database).resolve()


def postgres_address(url: str) -> PostgresAddress:
    """Return the PostgreSQL database that `url` names; raises UsageError for other URLs.

    What the URL has behind `?` goes to libpq as it stands (`host`, `sslmode`, `target_session_attrs`).
    """
    parsed = _parse(url)
    if parsed.drivername not in _DRIVERS:
        raise UsageError(f"{parsed.drivername} is no driver of the ledger", hint=_HINT)
    if not parsed.database:
        raise UsageError(f"{_place(parsed)} names no database", hint=_HINT)
    return PostgresAddress(_place(parsed), _parameters(parsed))


def _parse(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError) as error:
        raise UsageError(f"{_SECRET.sub(':***@', url)!r} is no database URL", hint=_HINT) from error


def _place(parsed: URL) -> str:
    """Leave out the password, and all of the query but the host: a password may stand there too."""
    query = {name: value for name, value in parsed.query.items() if name == "host"}
    bare = URL.create("postgresql", parsed.username, None, parsed.host, parsed.port, parsed.database, query)
    return bare.render_as_string()


def _parameters(parsed: URL) -> dict[str, str]:
    named = {
        "user": parsed.username,
        "password": parsed.password,
        "host": parsed.host,
        "port": str(parsed.port) if parsed.port else None,
        "dbname": parsed.database,
    }
    query = {name: value if isinstance(value, str) else ",".join(value) for name, value in parsed.query.items()}
    return {name: value for name, value in named.items() if value} | query
