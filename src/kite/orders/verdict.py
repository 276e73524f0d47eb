"""What is to be done with an order whose turn has come: one pure function of the journal's entry and the time."""

from enum import StrEnum
from typing import NamedTuple

from kite.clock import US_PER_S
from kite.orders.journal import Entry, State
from kite_schemas.why import Order

GRACE_US = US_PER_S
"""By how much the clocks of the broker and of a node may differ before an order is called late."""

ATTEMPTS_MAX = 5
"""An order that cut its worker off so often is given up: it may be what ends the worker."""

EXPIRED = "expired"  # the arbitrator gave it up
LATE = "late"  # its time was over before it was begun: told, so that nobody waits for it
TIMEOUT = "timeout"  # its time was over before it ended
EXHAUSTED = "attempts_exhausted"


class Step(StrEnum):
    """What the worker does next."""

    BEGIN = "begin"
    RESUME = "resume"
    REPUBLISH = "republish"
    GIVE_UP = "give_up"
    REFUSE = "refuse"


class Verdict(NamedTuple):
    """A step, and why when it is a refusal (nothing was begun) or a giving up (what was begun is told as failed)."""

    step: Step
    code: str = ""


def deadline_us(published_us: int, order: Order) -> int:
    """Return the wall time after which an order, published at that broker time, is late."""
    return published_us + order.ttl_us + GRACE_US


def decide(entry: Entry | None, *, expired: bool, now_us: int, until_us: int) -> Verdict:
    """Judge an order by what the journal knows of it, whether the arbitrator gave it up, and its deadline."""
    over = expired or now_us > until_us
    if entry is None:
        return Verdict(Step.REFUSE, EXPIRED if expired else LATE) if over else Verdict(Step.BEGIN)
    match entry.state:
        case State.DROPPED:
            return Verdict(Step.REFUSE, EXPIRED)
        case State.DONE:
            return Verdict(Step.REPUBLISH)
        case State.BEGUN if over:
            return Verdict(Step.GIVE_UP, EXPIRED if expired else TIMEOUT)
        case State.BEGUN if entry.attempt >= ATTEMPTS_MAX:
            return Verdict(Step.GIVE_UP, EXHAUSTED)
        case State.BEGUN:
            return Verdict(Step.RESUME)
