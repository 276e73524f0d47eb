"""The incident of stale state: with nothing learnt from it, one order is repeated for ever; as shipped, it is held.

The two histories under tests/golden/histories were recorded by `tests/golden/record_incident.py`.
"""

from kite_arbitrator import shipped
from kite_arbitrator.simulation.incident import WANTED, careless, incident, starts
from kite_arbitrator.simulation.run import History
from kite_schemas.arbitration import Held
from kite_schemas.policy import Policy
from kite_schemas.why import Reason
from kite_schemas.yoco import InstanceReady, OrderFailed

SHORT_S, LONG_S, FREED_S = 20, 40, 8


def ready(history: History) -> bool:
    """Tell whether the instance that was wanted came up."""
    return any(isinstance(row.data, InstanceReady) and row.data.instance == WANTED for row in history.rows)


def held(history: History) -> list[Reason]:
    """Return why its start was held, in order."""
    return [
        row.data.why.reason
        for row in history.rows
        if isinstance(row.data, Held) and row.subject == f"instance/{WANTED}"
    ]


def patient() -> Policy:
    """Return a policy that has learnt one thing: to wait after a failure."""
    yoco = shipped.policy().yoco
    waits = {"start_backoff_us": yoco.start_backoff_us, "start_backoff_max_us": yoco.start_backoff_max_us}
    policy = careless()
    return policy.model_copy(update={"yoco": policy.yoco.model_copy(update=waits)})


def test_without_feedback_the_same_start_is_ordered_for_ever():
    short, long = incident(careless(), SHORT_S), incident(careless(), LONG_S)
    assert len(starts(short)) > 2 * SHORT_S
    assert len(starts(long)) > 1.8 * len(starts(short))  # it grows with time: there is no end to it
    assert {row.data.code for row in long.rows if isinstance(row.data, OrderFailed)} == {"out_of_memory"}
    assert not held(long)
    assert not ready(long)


def test_as_shipped_it_is_held_while_nothing_is_known_and_then_for_want_of_memory():
    history = incident(shipped.policy(), LONG_S)
    assert held(history) == [Reason.STALE, Reason.MEMORY]
    assert starts(history) == []
    assert not ready(history)


def test_as_shipped_it_starts_once_when_the_memory_is_free_again():
    history = incident(shipped.policy(), SHORT_S, freed_s=FREED_S)
    assert held(history)[:2] == [Reason.STALE, Reason.MEMORY]
    assert len(starts(history)) == 1
    assert ready(history)


def test_feedback_alone_bounds_the_orders():
    """Each failure doubles the wait: twice the time brings one start more, not twice as many."""
    short, long = incident(patient(), SHORT_S), incident(patient(), LONG_S)
    assert 1 < len(starts(short)) <= 4
    assert len(starts(long)) <= len(starts(short)) + 1
