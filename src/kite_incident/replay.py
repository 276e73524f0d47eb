"""Replay: decide again from the recorded inputs, and compare with the recorded decisions."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from pydantic_core import from_json

from kite.errors import KiteError
from kite.ledger import Reader
from kite.ledger import Row as LedgerRow
from kite_arbitrator import core
from kite_arbitrator.reading import read
from kite_arbitrator.records import Row
from kite_arbitrator.state import State
from kite_schemas.registry import TYPES

PROGRESS_ROWS = 1_000
"""How often a replay reports how far it is."""


class NothingToReplay(KiteError):
    """The range has no decision: that is a failure, not a success."""

    code = "nothing_to_replay"

    def __init__(self, first: int, last: int) -> None:
        super().__init__(
            f"positions {first} to {last} hold no decision to compare",
            hint="widen the range, or see `kite timeline` for where decisions are",
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a decision's payload (dotted path, or `type` or `subject`) that differs."""

    field: str
    recorded: object
    replayed: object


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which the ledger and the replay disagree."""

    pos: int
    kind: Literal["different", "missing", "unexpected"]
    cause_pos: int
    type: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay found between two positions, both included."""

    first: int
    last: int
    inputs: int
    decisions: int
    divergence: Divergence | None

    @property
    def identical(self) -> bool:
        """Whether every recorded decision came out again."""
        return self.divergence is None


def verify(
    reader: Reader, first: int = 1, last: int | None = None, on_progress: Callable[[int], None] | None = None
) -> Verdict:
    """Check the chain and replay `first` to `last` (default: all). Raises ChainBroken and NothingToReplay.

    `on_progress` gets the position every PROGRESS_ROWS rows.
    """
    end = min(last or reader.head.pos, reader.head.pos)
    reader.verify_chain(1, end)
    replay = _Replay(first)
    for row in reader.rows(1, end):
        replay.feed(row)
        if replay.divergence is not None:
            break
        if on_progress is not None and row.pos % PROGRESS_ROWS == 0:
            on_progress(row.pos)
    replay.finish(end)
    if replay.divergence is None and replay.decisions == 0:
        raise NothingToReplay(first, end)
    return Verdict(first, end, replay.inputs, replay.decisions, replay.divergence)


def state_at(rows: Iterable[LedgerRow]) -> State:
    """Fold rows from the first on into the state after the last of them."""
    state = core.initial()
    for row in rows:
        state = core.evolve(state, read(row))
    return state


def is_decision(kind: str) -> bool:
    """Tell whether an event type is a decision of the arbitrator."""
    model = TYPES.get(kind)
    return model is not None and model.KIND == "decision"


class _Replay:
    """Follows the ledger row by row; the state is always that of the recorded rows."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._state = core.initial()
        self._expected: deque[Row] = deque()
        self._cause = 0
        self.inputs = 0
        self.decisions = 0
        self.divergence: Divergence | None = None

    def feed(self, row: LedgerRow) -> None:
        known = read(row)
        if is_decision(row.type):
            self._decision(row)
            self._state = core.evolve(self._state, known)
        else:
            self._missed(row.pos)
            self._input(known)

    def finish(self, last: int) -> None:
        """The last input's decisions may lie beyond the range; at the ledger's end none may be missing."""
        if self._expected and self._cause >= self._first and self.divergence is None:
            self._missed(last + 1)

    def _input(self, row: Row) -> None:
        if row.pos < self._first:
            self._state = core.evolve(self._state, row)
            self._cause = row.pos
            return
        _, decisions = core.step(self._state, row)
        self._state = core.evolve(self._state, row)
        self._expected = deque(decisions)
        self._cause = row.pos
        self.inputs += 1

    def _decision(self, row: LedgerRow) -> None:
        if self._cause < self._first:
            return
        if not self._expected:
            self.divergence = Divergence(row.pos, "unexpected", self._cause, row.type, ())
            return
        differences = tuple(compare(row, self._expected.popleft()))
        self.decisions += 1
        if differences:
            self.divergence = Divergence(row.pos, "different", self._cause, row.type, differences)

    def _missed(self, pos: int) -> None:
        if self._expected:
            self.divergence = Divergence(pos, "missing", self._cause, self._expected[0].type, ())


def compare(recorded: LedgerRow, replayed: Row) -> Iterator[Difference]:
    """Yield what differs between a recorded decision and the replayed one: type, subject and payload, nothing else."""
    if recorded.type != replayed.type:
        yield Difference("type", recorded.type, replayed.type)
    if recorded.subject != replayed.subject:
        yield Difference("subject", recorded.subject, replayed.subject)
    assert replayed.data is not None  # noqa: S101 # the core makes typed decisions
    yield from _diff("", from_json(recorded.raw)["data"], replayed.data.model_dump(mode="json", exclude_none=True))


def _diff(path: str, recorded: object, replayed: object) -> Iterator[Difference]:
    left, right = _object(recorded), _object(replayed)
    if left is None or right is None:
        if recorded != replayed:
            yield Difference(path, recorded, replayed)
        return
    for key in sorted(left.keys() | right.keys()):
        yield from _diff(f"{path}.{key}" if path else key, left.get(key), right.get(key))


def _object(value: object) -> Mapping[str, object] | None:
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else None
