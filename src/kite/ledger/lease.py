"""The lease of a ledger on PostgreSQL: one row, changed by compare-and-set only.

Every write moves the counter in its own transaction, so the row is locked from the beginning of a write to its end: a
take-over comes before a write, which then fails, or behind it, and then it sees another counter and fails itself.
"""

from typing import Final

from psycopg.errors import LockNotAvailable

from kite.ledger.errors import LeaseLost, LedgerHeld
from kite.ledger.rows import Lease
from kite.ledger.session import Session

EVICT_TIMEOUT_MS = 1_000
"""How long to wait for a session of the former holder to be gone."""

_READ: Final = "SELECT epoch, holder, counter FROM lease"
_CLAIM: Final = """UPDATE lease SET epoch = epoch + 1, holder = %s, counter = counter + 1
                   WHERE epoch = %s AND counter = %s RETURNING epoch"""
_FREE: Final = "UPDATE lease SET holder = '', counter = counter + 1 WHERE epoch = %s AND counter = %s"
_MOVE: Final = "UPDATE lease SET counter = counter + 1 WHERE epoch = %s AND holder = %s"
_RELEASE: Final = "UPDATE lease SET holder = '', counter = counter + 1 WHERE epoch = %s AND holder = %s"
_EVICT: Final = """SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity
                   WHERE datname = current_database() AND application_name = %s AND xact_start IS NOT NULL"""
_NAME: Final = "SELECT set_config('application_name', %s, false)"


def read(session: Session) -> Lease:
    """Return the lease as it is committed now."""
    (found,) = session.execute(_READ).fetchall()
    return Lease(*found)


def claim(session: Session, place: str, holder: str, seen: Lease | None) -> int:
    """Take the lease inside the caller's transaction and return its new epoch.

    It must be free, or still be what the caller has `seen` standing still. Raises LedgerHeld.
    """
    found = _takeable(session, place, seen)
    try:
        claimed = session.execute(_CLAIM, (holder, found.epoch, found.counter)).fetchone()
    except LockNotAvailable as error:
        raise LedgerHeld(place, found.holder or "one that is taking it") from error
    if claimed is None:
        raise LedgerHeld(place, read(session).holder)
    (epoch,) = claimed
    session.execute(_NAME, (name(epoch),))
    return epoch


def free(session: Session, place: str, seen: Lease | None) -> None:
    """Keep the lease free until the caller's transaction ends. Raises LedgerHeld as `claim` does."""
    found = _takeable(session, place, seen)
    if not session.execute(_FREE, (found.epoch, found.counter)).rowcount:
        raise LedgerHeld(place, read(session).holder)


def move(session: Session, place: str, epoch: int, holder: str) -> None:
    """Move the counter as the holder of `epoch`. Raises LeaseLost when the lease is another's by now."""
    if not session.execute(_MOVE, (epoch, holder)).rowcount:
        raise LeaseLost(place, epoch, read(session))


def release(session: Session, epoch: int, holder: str) -> None:
    """Give the lease back, when it is still the holder's of `epoch`."""
    session.execute(_RELEASE, (epoch, holder))


def name(epoch: int) -> str:
    """Return the name under which the session of an epoch's holder runs."""
    return f"kite-ledger-{epoch}"


def _takeable(session: Session, place: str, seen: Lease | None) -> Lease:
    found = read(session)
    if not found.holder:
        return found
    if seen is None or (seen.epoch, seen.counter) != (found.epoch, found.counter):
        raise LedgerHeld(place, found.holder)
    # One that stopped in mid-transaction would keep the row locked. One that stopped elsewhere may stay connected: it
    # learns from LeaseLost what happened.
    session.execute(_EVICT, (EVICT_TIMEOUT_MS, name(found.epoch)))
    return found
