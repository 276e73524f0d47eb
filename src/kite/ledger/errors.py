"""What can go wrong with a ledger, as typed errors."""

from pathlib import Path

from kite.errors import Fault, KiteError, MissingPath, Unreachable
from kite.ledger.rows import Lease


class LedgerMissing(MissingPath):
    """There is no ledger to read at this place."""

    code = "ledger_missing"

    def __init__(self, place: str) -> None:
        super().__init__(
            f"no ledger at {place}",
            hint="`kite up` creates one; check the ledger's URL (on PostgreSQL the database itself must be there)",
        )
        self.place = place


class LedgerUnreachable(Unreachable):
    """The database server does not answer, or the connection broke. What was being appended may be in the ledger.

    Close it, open it again, and read the head: the append is there as a whole or not at all.
    """

    code = "ledger_unreachable"

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(
            f"the ledger {place} does not answer: {detail}",
            hint="check that PostgreSQL runs there and lets this user in; a password belongs into PGPASSFILE's file",
        )
        self.place = place
        self.detail = detail


class LedgerHeld(KiteError):
    """Another process is the writer of this ledger. It goes away when that process ends.

    On PostgreSQL the lease of one that ended badly stays: it may be taken by who saw its counter stand still.
    """

    code = "ledger_held"
    fault = Fault.OPERATOR
    retryable = True

    def __init__(self, place: str, holder: str) -> None:
        super().__init__(
            f"the ledger {place} is held by {holder}",
            hint="one arbitrator writes a ledger; stop that one, or give this one another ledger",
        )
        self.place = place
        self.holder = holder


class LeaseLost(KiteError):
    """Another process has taken the lease. Nothing of the write is in the ledger, and this writer can write no more."""

    code = "lease_lost"
    fault = Fault.OPERATOR
    retryable = True

    def __init__(self, place: str, epoch: int, present: Lease) -> None:
        by = f"held by {present.holder}" if present.holder else "free"
        super().__init__(
            f"the lease of the ledger {place} is lost: this was epoch {epoch}, it is now {by} in epoch {present.epoch}",
            hint="close the ledger and stand by; a leader that was paused or cut off for 3 s is replaced",
        )
        self.place = place
        self.epoch = epoch
        self.present = present


class LedgerTooNew(KiteError):
    """The database was migrated by a later KITE."""

    code = "ledger_too_new"
    fault = Fault.OPERATOR

    def __init__(self, place: str, revision: str) -> None:
        super().__init__(
            f"the ledger {place} has schema {revision}, which this version of KITE does not know",
            hint="install the version that wrote it, or a later one; a ledger is never migrated backwards",
        )
        self.place = place
        self.revision = revision


class LedgerTooOld(KiteError):
    """The database was not migrated yet, and what was asked for came later."""

    code = "ledger_too_old"
    fault = Fault.OPERATOR

    def __init__(self, place: str, revision: str, needed: str) -> None:
        super().__init__(
            f"the ledger {place} has schema {revision}, and this needs {needed}",
            hint="`kite up` migrates it; a reader never does",
        )
        self.place = place
        self.revision = revision
        self.needed = needed


class NotALedger(KiteError):
    """The file is there and is something else."""

    code = "not_a_ledger"
    fault = Fault.USER

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(f"{place} is not a KITE ledger: {detail}", hint="check the ledger's URL")
        self.place = place
        self.detail = detail


class LedgerUnwritable(KiteError):
    """The database refused a write. What was being appended is not in the ledger; close it and open it again."""

    code = "ledger_unwritable"
    fault = Fault.OPERATOR

    def __init__(self, place: str, detail: str) -> None:
        super().__init__(
            f"the ledger {place} cannot be written: {detail}",
            hint="it must exist, be writable and have room; nothing else may write the database",
        )
        self.place = place
        self.detail = detail


class SqliteTooOld(KiteError):
    """The SQLite library in use can corrupt a database in WAL mode."""

    code = "sqlite_too_old"
    fault = Fault.OPERATOR

    def __init__(self, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
        super().__init__(
            f"SQLite {_dotted(found)} is older than {_dotted(needed)} and can corrupt a ledger",
            hint="install pysqlite3>=0.6.1, which brings its own SQLite",
        )
        self.found = found
        self.needed = needed


class MigrationsMissing(KiteError):
    """The Alembic scripts were found neither beside the source nor in the installed package."""

    code = "migrations_missing"

    def __init__(self, tried: tuple[Path, ...]) -> None:
        super().__init__(
            f"the ledger's migrations are in none of {', '.join(map(str, tried))}",
            hint="install KITE again; the folder `migrations` belongs to it",
        )
        self.tried = tried


class DuplicateEvent(KiteError):
    """An append held an event id that the ledger, or the same append, already has. Nothing of it was written."""

    code = "duplicate_event"

    def __init__(self, event_id: str) -> None:
        super().__init__(
            f"event {event_id} is already in the ledger", hint="drop what `known` returns before appending"
        )
        self.event_id = event_id


class DraftRefused(KiteError):
    """An append that can never be right. Nothing of it was written. `index` is the draft's place in the append."""

    code = "draft_refused"

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"draft {index} of the append is refused: {why}")
        self.index = index
        self.why = why


class ChainBroken(KiteError):
    """The ledger is not what was appended: the row at `pos` is missing or altered."""

    code = "chain_broken"
    fault = Fault.OPERATOR

    def __init__(self, pos: int, what: str) -> None:
        super().__init__(
            f"the ledger's chain breaks at position {pos}: {what}",
            hint="rows before this position are intact; restore the ledger from a copy",
        )
        self.pos = pos
        self.what = what


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
