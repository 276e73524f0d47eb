"""The schema's revision: where the migrations lie, bringing a database up to date, refusing one from the future."""

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from kite.ledger.errors import LedgerTooNew, MigrationsMissing, NotALedger
from kite.ledger.tables import REVISIONS

if TYPE_CHECKING:
    from alembic.config import Config

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE / "migrations", _HERE.parents[2] / "migrations")
"""In an installed wheel, and in a checkout."""

_ALEMBIC = Lock()
"""Alembic keeps what it works on in globals of its own, so one thread at a time."""

_OURS = frozenset({"ledger", "alembic_version"})


def locate(places: tuple[Path, ...] = _PLACES) -> Path:
    """Return the folder of the Alembic scripts, in a checkout or in a wheel; raises MigrationsMissing."""
    for place in places:
        if (place / "env.py").is_file():
            return place
    raise MigrationsMissing(places)


def upgrade(connection: Connection, place: str) -> None:
    """Bring the database at `place` to this code's schema, in the transaction that `connection` is in.

    Raises LedgerTooNew, NotALedger for a database of somebody else's, and MigrationsMissing.
    """
    tables = inspect(connection).get_table_names()
    if tables and not _OURS.issubset(tables):
        raise NotALedger(place, "it has other tables")
    _refuse_unknown(connection, place)
    if revision(connection) == REVISIONS[-1]:
        return
    from alembic import command

    with _ALEMBIC:
        command.upgrade(_config(connection), "head")


def require(connection: Connection, place: str) -> None:
    """Check that the database at `place` is a ledger that this code can read. Raises LedgerTooNew or NotALedger."""
    if not _OURS.issubset(inspect(connection).get_table_names()):
        raise NotALedger(place, "it has no ledger table")
    _refuse_unknown(connection, place)


def revision(connection: Connection) -> str | None:
    """Return the schema revision of a database, None when it was never migrated."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _refuse_unknown(connection: Connection, place: str) -> None:
    found = revision(connection)
    if found is not None and found not in REVISIONS:
        raise LedgerTooNew(place, found)


def _config(connection: Connection) -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(locate()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
