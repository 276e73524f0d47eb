"""The state of the core as the ledger has it, kept up to date row by row."""

from kite.ledger import Reader
from kite_arbitrator import core
from kite_arbitrator.reading import read
from kite_arbitrator.state import State


class View:
    """A fold of the ledger that goes on where it stopped. Belongs to the thread of its reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.state: State = core.initial()

    def refresh(self) -> State:
        """Fold what was appended since, and return the state."""
        for row in self._reader.rows(self.state.pos + 1):
            self.state = core.evolve(self.state, read(row))
        return self.state
