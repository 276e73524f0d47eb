"""What becomes of a draft before it is a decision: repeats of a skip are not written, jitter is discarded."""

from kite_arbitrator.records import Row
from kite_arbitrator.rules.draft import Draft, age, at_least, why
from kite_arbitrator.state import State, current
from kite_arbitrator.turns import way
from kite_schemas.arbitration import Discarded, Held
from kite_schemas.why import Reason


def said(state: State, subject: str, reason: Reason) -> bool:
    """Tell whether it was said already that nothing is done about a subject, for this reason."""
    hold = state.holds.get(subject)
    return hold is not None and hold.reason is reason


def admit(state: State, row: Row, made: Draft) -> Draft | None:
    """Return the draft, what takes its place, or None when that has been said already."""
    if isinstance(made.data, Held):
        return None if _repeats(state, made.subject, made.data) else made
    return _steady(state, row, made)


def _repeats(state: State, subject: str, data: Held) -> bool:
    """An answer to a request is never a repeat: somebody waits for it."""
    return data.request is None and said(state, subject, data.why.reason)


def _steady(state: State, row: Row, made: Draft) -> Draft | None:
    """Discard what would undo the last decision about its target inside the window; say so once per turn.

    What somebody asked for is put off: its answer follows at a tick.
    """
    window_us, found = current(state).arbitration.switch_window_us, way(made.data)
    if window_us is None or found is None:
        return made
    target, up = found
    last = state.turns.get(target)
    if last is None or last.up is up or state.now_us - last.at_us >= window_us:
        return made
    if last.discarded:
        return None
    request = getattr(made.data, "request", None)
    rule = at_least("arbitration.switch_window_us", state.now_us - last.at_us, window_us)
    account = why(state, row, Reason.JITTER, rules=[rule], inputs=[age(state, target, last.pos, last.at_us)])
    return Draft(made.subject, Discarded(decision=made.data.TYPE, target=target, request=request, why=account))
