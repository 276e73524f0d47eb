"""How the arbitrator's decisions about itself, and the gaps of the bus, change the state."""

from msgspec import structs

from kite_arbitrator.folds.pressure import without_holds
from kite_arbitrator.records import Hold, Row, Turn
from kite_arbitrator.state import State, put, without
from kite_arbitrator.turns import way
from kite_schemas.arbitration import Discarded, GapAcknowledged, Held, Mode, ModeChanged
from kite_schemas.ledger import BusEpochChanged, BusGap
from kite_schemas.why import Decision
from kite_schemas.yoco import DrainOrdered


def held(state: State, row: Row, data: Held) -> State:
    """What is due and not done is said again only when the reason is another one; an answer to a request is not due."""
    if data.request is not None:
        return state
    return put(state, Hold(subject=row.subject, reason=data.why.reason, pos=row.pos, since_us=row.ledger_us))


def decided(state: State, row: Row, data: Decision) -> State:
    """A decision about a subject ends what was held about it; one that has an opposite makes that one wait.

    What was held about the capacity of a pool is over when one of its instances is drained.
    """
    if row.subject in state.holds and not isinstance(data, Held | Discarded):
        state = structs.replace(state, holds=without(state.holds, row.subject))
    if isinstance(data, DrainOrdered):
        state = without_holds(state, data.node, state.instances[data.instance].base)
    found = way(data)
    return state if found is None else put(state, Turn(target=found[0], up=found[1], at_us=row.ledger_us, pos=row.pos))


def discarded(state: State, _row: Row, data: Discarded) -> State:
    return put(state, structs.replace(state.turns[data.target], discarded=True))


def gap(state: State, row: Row, _data: BusGap | BusEpochChanged) -> State:
    """Remember that facts may be missing: lost in a stream, or with the one that this bus took the place of."""
    return structs.replace(state, gap_pos=row.pos)


def acknowledged(state: State, _row: Row, _data: GapAcknowledged) -> State:
    return structs.replace(state, gap_pos=0)


def mode_changed(state: State, _row: Row, data: ModeChanged) -> State:
    return structs.replace(state, degraded=data.mode is Mode.DEGRADED)
