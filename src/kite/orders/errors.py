"""What can go wrong with a worker's journal, as typed errors."""

from pathlib import Path

from kite.errors import Fault, KiteError


class JournalHeld(KiteError):
    """Another process works from this journal. It goes away when that process ends."""

    code = "journal_held"
    fault = Fault.OPERATOR
    retryable = True

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"the journal {path} is in use by another worker",
            hint="one process works for a service and node; stop the other one, or use another state folder",
        )
        self.path = path


class JournalTooNew(KiteError):
    """The journal was written by a later KITE."""

    code = "journal_too_new"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, found: int, known: int) -> None:
        super().__init__(
            f"the journal {path} has schema {found}, this version of KITE knows {known}",
            hint="install the version that wrote it, or a later one",
        )
        self.path = path
        self.found = found
        self.known = known


class NotAJournal(KiteError):
    """The file is there and is something else."""

    code = "not_a_journal"
    fault = Fault.USER

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(
            f"{path} is not a journal of orders: {detail}", hint="use another state folder, or move the file away"
        )
        self.path = path
        self.detail = detail


class JournalUnwritable(KiteError):
    """The journal cannot be made or written, so no order may be begun."""

    code = "journal_unwritable"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(
            f"the journal {path} cannot be written: {detail}", hint="its folder must be writable and have room"
        )
        self.path = path
        self.detail = detail
