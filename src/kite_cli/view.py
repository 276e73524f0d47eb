"""The state of the core at the end of the ledger, kept up to date row by row.

Nine of ten rows are windows and ticks. What a window says is forgotten after a minute, so that a look at the end of a
ledger folds those of the last minute only: replay is what folds all of them.
"""

from collections.abc import Iterator

from kite.ledger import Reader
from kite_arbitrator import core
from kite_arbitrator.reading import LASTING, read
from kite_arbitrator.records import Row
from kite_arbitrator.state import State

RECENT_US = 70_000_000
"""Windows before it say nothing any more: the floor of the lag reaches back for the last minute in steps of 10 s."""

RECENT_ROWS = 20_000
"""Never more of them than these: a hundred nodes send so many in 20 s, and folding them takes about a second."""


class View:
    """A fold of the ledger that goes on where it stopped. Belongs to the thread of its reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.state: State = core.initial()

    def refresh(self) -> State:
        """Fold what was appended since, and return the state."""
        for row in telling(self._reader, self.state.pos + 1):
            self.state = core.evolve(self.state, row)
        return self.state


def latest(reader: Reader) -> State:
    """Return the state at the end of the ledger; what windows and ticks say is that of the last minute."""
    return View(reader).refresh()


def telling(reader: Reader, first: int = 1) -> Iterator[Row]:
    """Yield the rows from `first` to the end that say something about now, of the windows the recent only."""
    head = reader.head
    recent = max(since(reader, head.ledger_us - RECENT_US, first, head.pos), head.pos - RECENT_ROWS)
    if first < recent:
        yield from map(read, reader.find(types=LASTING, first=first, last=recent - 1))
    yield from map(read, reader.rows(recent, head.pos))


def since(reader: Reader, at_us: int, first: int, last: int) -> int:
    """Return the first position from `first` to `last` at or after a moment of ledger time, `last` + 1 without one."""
    low, high = first, last + 1
    while low < high:
        middle = (low + high) // 2
        row = reader.row(middle)
        assert row is not None  # noqa: S101 # positions are dense, and the head is at `last` or behind it
        if row.ledger_us < at_us:
            low = middle + 1
        else:
            high = middle
    return low
