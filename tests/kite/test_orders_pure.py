"""The parts of the worker that need no bus and no disk: lanes, and what is done with an order whose turn has come."""

from uuid import uuid4

import pytest

from kite.orders import ATTEMPTS_MAX, GRACE_US, Entry, State, Step, Verdict, decide
from kite.orders.lanes import Lanes
from kite.orders.report import fact_id
from kite.orders.verdict import deadline_us
from kite.testing.orders import stop_order

UNTIL_US = 1_000
IN_TIME, TOO_LATE = UNTIL_US, UNTIL_US + 1


def entry(state: State, attempt: int = 1) -> Entry:
    return Entry("o1", "instance/a", state, b"order", 0, attempt, b"outcome" if state is State.DONE else b"")


@pytest.mark.parametrize("now_us", [IN_TIME, TOO_LATE])
@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize(
    ("known", "verdicts"),
    [
        # in time and wanted, expired, too late
        (None, ("begin", "refuse expired", "refuse late")),
        (entry(State.DROPPED, 0), ("refuse expired", "refuse expired", "refuse expired")),
        (entry(State.BEGUN), ("resume", "give_up expired", "give_up timeout")),
        (entry(State.BEGUN, ATTEMPTS_MAX - 1), ("resume", "give_up expired", "give_up timeout")),
        (entry(State.BEGUN, ATTEMPTS_MAX), ("give_up attempts_exhausted", "give_up expired", "give_up timeout")),
        (entry(State.DONE), ("republish", "republish", "republish")),
        (entry(State.DONE, ATTEMPTS_MAX), ("republish", "republish", "republish")),
    ],
)
def test_what_is_done_with_an_order(
    known: Entry | None, verdicts: tuple[str, str, str], expired: bool, now_us: int
) -> None:
    wanted = verdicts[1] if expired else verdicts[0] if now_us == IN_TIME else verdicts[2]
    step, _, code = wanted.partition(" ")
    assert decide(known, expired=expired, now_us=now_us, until_us=UNTIL_US) == Verdict(Step(step), code)


def test_an_order_is_late_when_its_ttl_and_the_grace_have_passed_since_the_broker_took_it() -> None:
    assert deadline_us(5, stop_order("a", ttl_us=100)) == 5 + 100 + GRACE_US


def test_a_lane_is_driven_by_whoever_opened_it_until_it_is_empty() -> None:
    lanes = Lanes[int]()
    assert [lanes.push(target, item) for target, item in [("a", 1), ("b", 2), ("a", 3)]] == [True, True, False]
    assert lanes.pop("a") == 1
    assert not lanes.push("a", 4), "a lane stays open while its last item is in hand"
    assert [lanes.pop("a"), lanes.pop("a"), lanes.pop("a")] == [3, 4, None]
    assert lanes.push("a", 5), "a closed lane opens again"
    assert [lanes.pop("b"), lanes.pop("b")] == [2, None]


def test_a_fact_has_one_id_per_step_and_attempt() -> None:
    order = str(uuid4())
    ids = [fact_id(order, step, attempt) for step in ("1", "2", "done") for attempt in (1, 2)]
    assert len(set(ids)) == len(ids)
    assert ids == [fact_id(order, step, attempt) for step in ("1", "2", "done") for attempt in (1, 2)]
