"""Why a decision was taken: its rules, candidates and inputs, what caused it and what came of it."""

from dataclasses import dataclass
from itertools import islice

from kite.errors import Fault, KiteError
from kite.ledger import Reader
from kite.ledger import Row as LedgerRow
from kite_incident.replay import is_decision
from kite_incident.timeline import UNTOLD, detail
from kite_schemas.envelope import Header, decode
from kite_schemas.registry import TYPES
from kite_schemas.telemetry import Window
from kite_schemas.why import Decision, RuleValue

FOLLOWERS_ROWS = 10_000
"""How far behind a decision its consequences are looked for, in rows that could be one."""

FOLLOWING = frozenset(TYPES) - UNTOLD
DECIDING = frozenset(kind for kind in TYPES if is_decision(kind))

ID_PREFIX_MIN_CHARS = 6


class NoSuchDecision(KiteError):
    """Nothing in the ledger answers to that name."""

    code = "no_such_decision"
    fault = Fault.USER

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"no decision {name!r}: {why}", hint="`kite timeline` lists decisions by position and id")
        self.name = name


class Untraced(KiteError):
    """An event that belongs to no trace: nobody asked for it, as for a tick or a window."""

    code = "untraced"
    fault = Fault.USER

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(
            f"{name} is {kind}, which belongs to no trace", hint="`kite timeline` shows the trace of each entry"
        )
        self.name = name
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Event:
    """A row of the ledger by what a person calls it."""

    pos: int
    id: str
    type: str
    subject: str
    at_us: int
    trace_id: str


@dataclass(frozen=True, slots=True)
class Input:
    """What a decision read: the row, its age then, and what it said; a window's age counts from its sampling."""

    event: Event
    age_us: int
    said: str

    @property
    def sampled(self) -> bool:
        """Whether the age counts from the sampling at the node, not from the row."""
        return self.event.type == Window.TYPE


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision with everything it was taken from, and what it brought about."""

    event: Event
    decision: Decision
    header: Header
    causes: tuple[Event, ...]
    inputs: tuple[Input, ...]
    consequences: tuple[Event, ...]

    @property
    def decisive(self) -> RuleValue | None:
        """The rule with the least margin: the smallest change that would have flipped the decision is in it."""
        return min(self.decision.why.rules, key=_relative_margin, default=None)


def explain(reader: Reader, name: str) -> Explanation:
    """Explain a decision, named by its position, its id, or the first characters of it. Raises NoSuchDecision."""
    row = find(reader, name)
    event = decode(row.raw)
    if not isinstance(event.data, Decision):
        raise NoSuchDecision(name, f"position {row.pos} is {row.type}, which decides nothing")
    why = event.data.why
    rows = {pos: reader.row(pos) for pos in (*why.causes, *(age.pos for age in why.inputs))}
    known = {pos: _event(found) for pos, found in rows.items() if found is not None}
    return Explanation(
        event=_event(row),
        decision=event.data,
        header=event.header,
        causes=tuple(known[pos] for pos in why.causes if pos in known),
        inputs=tuple(_input(found, age.age_us) for age in why.inputs if (found := rows[age.pos]) is not None),
        consequences=_consequences(reader, row),
    )


def find(reader: Reader, name: str) -> LedgerRow:
    """Return a row by its position or its id, a decision by how that begins as well. Raises NoSuchDecision."""
    if name.isdecimal():
        row = reader.row(int(name))
        if row is None:
            raise NoSuchDecision(name, f"the ledger ends at position {reader.head.pos}")
        return row
    row = reader.by_event_id(name)
    if row is not None:
        return row
    if len(name) < ID_PREFIX_MIN_CHARS:
        raise NoSuchDecision(name, f"give a position, or at least {ID_PREFIX_MIN_CHARS} characters of an id")
    found = [row for row in reader.find(types=DECIDING) if row.event_id.startswith(name)]
    if len(found) != 1:
        raise NoSuchDecision(name, f"{len(found)} decisions have an id that begins so")
    return found[0]


def _consequences(reader: Reader, row: LedgerRow) -> tuple[Event, ...]:
    rows = islice(reader.find(types=FOLLOWING, first=row.pos + 1), FOLLOWERS_ROWS)
    return tuple(_event(other) for other in rows if decode(other.raw).header.causationid == row.event_id)


def _input(row: LedgerRow, age_us: int) -> Input:
    return Input(_event(row), age_us, detail(decode(row.raw).data))


def _event(row: LedgerRow) -> Event:
    return Event(row.pos, row.event_id, row.type, row.subject, row.ledger_us, row.trace_id)


def _relative_margin(rule: RuleValue) -> float:
    """Margins are compared as a share of their thresholds; only for the order in which they are shown."""
    return abs(rule.margin) / max(1, abs(rule.threshold))
