"""Where a ledger is: its URL, as SQLAlchemy writes them."""

from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from kite.errors import UsageError

_HINT = "a ledger's URL is sqlite:///relative/path or sqlite:////absolute/path"


def sqlite_path(url: str) -> Path:
    """Return the absolute path, links followed, of the SQLite file that `url` names; raises UsageError for other URLs.

    A database in memory is refused: it could be neither shared with a reader nor kept.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise UsageError(f"{url!r} is no database URL", hint=_HINT) from error
    if parsed.get_backend_name() != "sqlite" or parsed.host:
        raise UsageError(f"{parsed.render_as_string()} is no SQLite file", hint=_HINT)
    if not parsed.database or parsed.database == ":memory:" or parsed.query:
        raise UsageError(f"{url!r} names no plain file", hint=_HINT)
    return Path(parsed.database).resolve()
