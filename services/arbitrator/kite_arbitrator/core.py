"""The pure core: rows in, decisions out. No I/O, no clock, no randomness, no environment, no logging.

`step(state, row)` folds one input row, then asks every rule once, in order; each decision is folded before the next
rule looks. A window, which comes ten times a second from every node, is a question to the rules about load only.
The same rows give the same decisions, on every machine and in every process.
"""

from uuid import UUID, uuid5

from msgspec import structs

from kite_arbitrator.folds import fold
from kite_arbitrator.records import Row
from kite_arbitrator.rules import draft, v1
from kite_arbitrator.state import State
from kite_schemas.model import Data
from kite_schemas.telemetry import Window

FORMAT = 1
"""Version of the ledger's row format that this core reads."""

RULES: dict[int, draft.Rules] = {1: v1.RULES}


def initial() -> State:
    """Return the state before the first row."""
    return State()


def evolve(state: State, row: Row) -> State:
    """Fold one row, input or decision, into the state."""
    moved = structs.replace(state, pos=row.pos, now_us=row.ledger_us)
    return fold(moved, row)


def step(state: State, row: Row) -> tuple[State, tuple[Row, ...]]:
    """Fold an input row and decide; return the new state and the decisions as the rows that directly follow."""
    state = evolve(state, row)
    decided: list[Row] = []
    version = rules(state)
    for rule in version.on_window if isinstance(row.data, Window) else version.on_all_else:
        for made in rule(state, row):
            admitted = version.admit(state, row, made)
            if admitted is None:
                continue
            decision = _row(state, row, admitted, len(decided))
            decided.append(decision)
            state = evolve(state, decision)
    return state, tuple(decided)


def rules(state: State) -> draft.Rules:
    """Return the rules in force: those of the policy's version, or only the policy's own before there is one."""
    return RULES[state.policy.rules] if state.policy else v1.BOOTSTRAP


def decision_id(ledger: str, cause: str, ordinal: int) -> str:
    """Return the id of the `ordinal`-th decision that the event `cause` brought about in this ledger."""
    return str(uuid5(UUID(ledger), f"{cause}/{ordinal}"))


def _row(state: State, cause: Row, made: draft.Draft, ordinal: int) -> Row:
    data: Data = made.data
    return Row(
        pos=cause.pos + ordinal + 1,
        id=decision_id(state.ledger, cause.id, ordinal),
        type=data.TYPE,
        subject=made.subject,
        ledger_us=cause.ledger_us + ordinal + 1,
        data=data,
    )
