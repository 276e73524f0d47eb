"""Why something was not done: the skip that was in force at a position."""

from dataclasses import dataclass

from kite.errors import Fault, KiteError
from kite.ledger import Reader
from kite_schemas.arbitration import Held
from kite_schemas.envelope import Event, decode
from kite_schemas.guard import ComparisonOrdered, ComparisonRequested
from kite_schemas.policy import ChangeRejected, PolicySet
from kite_schemas.upcycle import BlendPromoted, Ending, InjectionClosed, InjectionDeferred
from kite_schemas.why import Decision, Reason
from kite_schemas.yoco import OrderRequested, WakeOrdered


class NothingSkipped(KiteError):
    """Nothing of that kind was skipped, or it was done after the last skip."""

    code = "nothing_skipped"
    fault = Fault.USER

    def __init__(self, what: str, pos: int, done_pos: int) -> None:
        said = f"the last {what} was done, at position {done_pos}" if done_pos else f"no {what} was ever asked for"
        super().__init__(f"up to position {pos} {said}", hint="`kite timeline` tells what was asked for")
        self.what = what
        self.done_pos = done_pos


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that can be skipped: the decisions that do it, and those that say it is not done."""

    done: tuple[type[Decision], ...]
    skipped: tuple[type[Decision], ...]


KINDS: dict[str, Kind] = {
    "wake": Kind((WakeOrdered,), (Held,)),
    "compare": Kind((ComparisonOrdered,), (Held,)),
    "inject": Kind((BlendPromoted,), (InjectionDeferred, InjectionClosed)),
    "change": Kind((PolicySet,), (ChangeRejected,)),
}
HELD_FOR: dict[str, str] = {OrderRequested.TYPE: "wake", ComparisonRequested.TYPE: "compare"}
"""What a held decision skips, by the type of its cause."""


def why_not(reader: Reader, what: str, at: int | None = None) -> int:
    """Return the position of the skip of `what` (a key of KINDS) that was in force at a position (default: now).

    Raises NothingSkipped when there is none, or the same was done after it.
    """
    kind, end, done = KINDS[what], min(at or reader.head.pos, reader.head.pos), 0
    types = {model.TYPE for model in (*kind.done, *kind.skipped)}
    for row in sorted(reader.find(types=types, last=end), key=lambda row: -row.pos):
        event = decode(row.raw)
        if isinstance(event.data, kind.done):
            done = row.pos
            break
        if _skips(reader, what, event):
            return row.pos
    raise NothingSkipped(what, end, done)


def _skips(reader: Reader, what: str, event: Event) -> bool:
    match event.data:
        case InjectionClosed(outcome=outcome):
            return outcome is not Ending.PROMOTED
        case Held(why=why):
            cause = reader.row(why.causes[0]) if why.causes else None
            return HELD_FOR.get(cause.type if cause else "", "") == what or (
                what == "compare" and why.reason is Reason.NO_PEER
            )
        case _:
            return True
