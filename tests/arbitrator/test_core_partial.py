"""An injection that may be partial: where it fails it is taken out again, and the others have it."""

from typing import Any

from kite_arbitrator.records import Standing
from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.upcycle import (
    BlendLoaded,
    BlendPromoted,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    LoadFailed,
    LoadOrdered,
    RollbackFailed,
    RollbackOrdered,
)
from kite_schemas.why import Reason

FIRST, SECOND, THIRD = (f"{NODE}-{BASE}-{number}" for number in range(3))


def version(request: str) -> str:
    return f"risk@{digest_of(request)[:12]}"


def loading(ready: int = 2, *, partial: bool = True) -> tuple[Story, str]:
    fleet = Story().up(ready=ready, standbys=0)
    request = fleet.inject("credit", partial=partial)
    fleet.verified(request)
    fleet.stored(request)
    return fleet, request


def fails(fleet: Story, request: str, instance: str) -> None:
    order = fleet.open(f"load/risk@{instance}")
    name = version(request)
    fleet.tell(LoadFailed(order=order, done=True, instance=instance, version=name, stage="load", code="x", message=""))


def closing(fleet: Story) -> InjectionClosed:
    (closed,) = [row.data for row in fleet.decided if isinstance(row.data, InjectionClosed)]
    return closed


def test_where_it_fails_it_is_taken_out_and_the_others_have_it():
    fleet, request = loading()
    fleet.proven(request, FIRST)
    fails(fleet, request, SECOND)
    ((_, order),) = fleet.orders(RollbackOrdered)
    assert order.instance == SECOND
    assert fleet.state.injections, "it is not promoted while the other may hold it unproven"
    fleet.undoes(version(request), SECOND)
    (promoted,) = [row.data for row in fleet.last if isinstance(row.data, BlendPromoted)]
    assert promoted.instances == (FIRST,)
    closed = closing(fleet)
    assert (closed.outcome, closed.why.reason) == (Ending.PROMOTED, Reason.PARTIAL)
    assert (closed.instances, closed.missing) == ((FIRST,), (SECOND,))
    assert not fleet.state.versions[version(request)].quarantined


def test_the_first_one_may_fail_too():
    fleet, request = loading()
    fleet.misses(version(request), FIRST)
    fleet.undoes(version(request), FIRST)
    assert [order.instance for _, order in fleet.orders(LoadOrdered)] == [SECOND]
    fleet.proven(request, SECOND)
    assert closing(fleet).instances == (SECOND,)
    assert not fleet.state.versions[version(request)].quarantined


def test_where_it_is_missing_it_is_loaded_again_after_a_while():
    fleet, request = loading()
    fleet.proven(request, FIRST)
    fails(fleet, request, SECOND)
    fleet.undoes(version(request), SECOND)
    assert fleet.orders(LoadOrdered) == []
    fleet.wait(fleet.state.instances[SECOND].retry_us - fleet.now_us)
    ((_, order),) = fleet.orders(LoadOrdered)
    assert (order.instance, order.request) == (SECOND, None)


def test_when_all_fail_nothing_is_promoted():
    fleet, request = loading()
    for instance in (FIRST, SECOND):
        fleet.misses(version(request), instance)
        fleet.undoes(version(request), instance)
    closed = closing(fleet)
    assert (closed.outcome, closed.why.reason, closed.instances) == (Ending.ROLLED_BACK, Reason.EFFECT_MISSING, None)
    stored = fleet.state.versions[version(request)]
    assert (stored.standing, stored.quarantined) == (Standing.UNWANTED, True)


def test_an_instance_that_ends_is_given_up():
    fleet, request = loading(ready=3)
    fleet.proven(request, FIRST)
    fleet.change(SECOND, "ready", "failed", "engine_died")
    fleet.proven(request, THIRD)
    closed = closing(fleet)
    assert (closed.instances, closed.missing) == ((FIRST, THIRD), ())


def test_one_that_does_not_answer_is_given_up():
    fleet, request = loading()
    fleet.proven(request, FIRST)
    fleet.wait(300 * SECOND_US)
    fleet.undoes(version(request), SECOND)
    assert closing(fleet).instances == (FIRST,)


def test_what_cannot_be_taken_out_there_is_promoted_nowhere():
    """A promoted version that an instance lists counts as proven there."""
    fleet, request = loading()
    fleet.proven(request, FIRST)
    fleet.misses(version(request), SECOND)
    about: dict[str, Any] = {"request": request, "instance": SECOND, "version": version(request)}
    fleet.tell(RollbackFailed(order=fleet.open(f"load/risk@{SECOND}"), done=True, **about, code="x", message=""))
    fleet.undoes(version(request), FIRST)
    assert closing(fleet).outcome is Ending.ROLLED_BACK
    assert fleet.state.blends == {}


def gone(fleet: Story, request: str) -> None:
    """The second engine does not answer when it is to let go of what it may hold."""
    fails(fleet, request, SECOND)
    order = fleet.open(f"load/risk@{SECOND}")
    about: dict[str, Any] = {"request": request, "instance": SECOND, "version": version(request)}
    fleet.tell(RollbackFailed(order=order, done=True, **about, code="engine_unreachable", message=""))


def test_an_engine_that_died_of_its_load_is_waited_for_until_its_node_says_so():
    fleet, request = loading()
    fleet.proven(request, FIRST)
    gone(fleet, request)
    assert fleet.last == (), "it may come back, and hold it unproven"
    fleet.change(SECOND, "ready", "failed", "engine_died")
    closed = closing(fleet)
    assert (closed.outcome, closed.instances) == (Ending.PROMOTED, (FIRST,))
    assert fleet.state.delays == {}


def test_an_engine_of_which_its_node_said_so_before_needs_not_let_go_of_anything():
    fleet, request = loading(ready=3)
    fleet.proven(request, FIRST)
    fails(fleet, request, SECOND)
    order = fleet.open(f"load/risk@{SECOND}")
    fleet.change(SECOND, "ready", "failed", "engine_died")
    about: dict[str, Any] = {"request": request, "instance": SECOND, "version": version(request)}
    fleet.tell(RollbackFailed(order=order, done=True, **about, code="engine_unreachable", message=""))
    fleet.proven(request, THIRD)
    assert closing(fleet).instances == (FIRST, THIRD)


def test_an_engine_that_answers_again_is_asked_again_and_then_no_more():
    fleet, request = loading()
    fleet.proven(request, FIRST)
    gone(fleet, request)
    (delay,) = fleet.state.delays.values()
    fleet.wait(delay.retry_us - fleet.now_us)
    ((_, order),) = fleet.orders(RollbackOrdered)
    assert (order.instance, order.version) == (SECOND, version(request))
    about: dict[str, Any] = {"request": request, "instance": SECOND, "version": version(request)}
    order_id = fleet.open(f"load/risk@{SECOND}")
    fleet.tell(RollbackFailed(order=order_id, done=True, **about, code="engine_unreachable", message=""))
    fleet.undoes(version(request), FIRST)
    assert closing(fleet).outcome is Ending.ROLLED_BACK


def test_one_without_a_slot_is_left_out():
    fleet = Story().up(ready=2, standbys=0)
    fleet.tell(BlendLoaded(instance=SECOND, version="alien@0123456789ab", duration_us=1, slots_taken=4))
    fleet.verified(fleet.inject("credit", partial=True))
    ((_, admitted),) = fleet.orders(InjectionAdmitted)
    assert admitted.instances == (FIRST,)
    assert [c.reason for c in admitted.why.candidates if c.id == SECOND] == [Reason.SLOTS_FULL]


def test_otherwise_one_failure_undoes_all():
    fleet, request = loading(partial=False)
    fleet.proven(request, FIRST)
    fails(fleet, request, SECOND)
    fleet.undoes(version(request), FIRST)
    fleet.undoes(version(request), SECOND)
    assert closing(fleet).outcome is Ending.ROLLED_BACK
