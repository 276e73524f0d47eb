"""Why something was not done: the skip that was in force at a position."""

from dataclasses import dataclass

from kite.errors import Fault, KiteError
from kite.ledger import Reader
from kite_schemas.arbitration import ChannelSelected, Discarded, Held
from kite_schemas.envelope import Event, decode
from kite_schemas.guard import ComparisonOrdered, ComparisonRequested
from kite_schemas.policy import ChangeRejected, PolicySet
from kite_schemas.upcycle import Ending, InjectionClosed, InjectionDeferred, Return, RollbackClosed
from kite_schemas.why import Decision, Reason, Why
from kite_schemas.yoco import DrainOrdered, OrderRequested, PrewarmBlocked, SleepOrdered, StartOrdered, WakeOrdered


class NothingSkipped(KiteError):
    """Nothing of that kind was skipped, or it was done after the last skip."""

    code = "nothing_skipped"
    fault = Fault.USER

    def __init__(self, what: str, pos: int, done_pos: int) -> None:
        said = f"the last {what} was done, at position {done_pos}" if done_pos else f"no {what} was ever held back"
        super().__init__(
            f"up to position {pos} {said}", hint="`kite timeline` tells what was asked for and what was decided"
        )
        self.what = what
        self.done_pos = done_pos


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that can be skipped: the decisions that do it, and those that say it is not done."""

    done: tuple[type[Decision], ...]
    skipped: tuple[type[Decision], ...]


KINDS: dict[str, Kind] = {
    "wake": Kind((WakeOrdered,), (Held, Discarded)),
    "sleep": Kind((DrainOrdered, SleepOrdered), (Held, Discarded)),
    "start": Kind((StartOrdered,), (Held, Discarded)),
    "channel": Kind((ChannelSelected,), (Held, Discarded)),
    "shed": Kind((PrewarmBlocked,), (Held, Discarded)),
    "compare": Kind((ComparisonOrdered,), (Held,)),
    "inject": Kind((InjectionClosed,), (InjectionDeferred, InjectionClosed)),
    "rollback": Kind((RollbackClosed,), (RollbackClosed,)),
    "change": Kind((PolicySet,), (ChangeRejected,)),
}
HELD_FOR: dict[str, str] = {OrderRequested.TYPE: "wake", ComparisonRequested.TYPE: "compare"}
"""What a held decision skips, by the type of its cause."""

HELD_ABOUT: dict[str, str] = {"channel": "channel", "instance": "start", "start": "start", "prewarm": "shed"}
"""What a held decision that nobody asked for skips, by the first word of its subject."""


def why_not(reader: Reader, what: str, at: int | None = None) -> int:
    """Return the position of the skip of `what` (a key of KINDS) that was in force at a position (default: now).

    Raises NothingSkipped when there is none, or the same was done after it.
    """
    kind, end, done = KINDS[what], min(at or reader.head.pos, reader.head.pos), 0
    types = {model.TYPE for model in (*kind.done, *kind.skipped)}
    for row in sorted(reader.find(types=types, last=end), key=lambda row: -row.pos):
        event = decode(row.raw)
        if _does(kind, event):
            done = row.pos
            break
        if _skips(reader, what, event):
            return row.pos
    raise NothingSkipped(what, end, done)


def _does(kind: Kind, event: Event) -> bool:
    """Tell whether a decision does it; what closes a request does so only when it says that it was done."""
    match event.data:
        case InjectionClosed(outcome=outcome):
            return outcome is Ending.PROMOTED
        case RollbackClosed(outcome=outcome):
            return outcome is Return.DONE
        case data:
            return isinstance(data, kind.done)


def _skips(reader: Reader, what: str, event: Event) -> bool:
    match event.data:
        case InjectionClosed(outcome=outcome):
            return outcome is not Ending.PROMOTED
        case RollbackClosed(outcome=outcome):
            return outcome is not Return.DONE
        case Discarded(decision=decision):
            return any(decision == model.TYPE for model in KINDS[what].done)
        case Held(why=why):
            cause = reader.row(why.causes[0]) if why.causes else None
            return what == (HELD_FOR.get(cause.type if cause else "") or _due(event.header.subject, why))
        case _:
            return True


def _due(subject: str, why: Why) -> str:
    """Return what was due and held without a request; empty for what no kind stands for."""
    about = subject.partition("/")[0]
    if about == "capacity":  # a pool has one subject for both ways: only a wake weighs candidates
        return "wake" if why.candidates or why.reason is Reason.NO_STANDBY else "sleep"
    return "compare" if why.reason is Reason.NO_PEER else HELD_ABOUT.get(about, "")
