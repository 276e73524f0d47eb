"""A yoco that begins anew and finds its processes running: what was ready is ready, with no moment between."""

import pytest

from kite_arbitrator.routes import Route, routes
from kite_arbitrator.testing import BASE, NODE, PAUSES, SECOND_US, Story
from kite_schemas.ledger import BusGap
from kite_schemas.why import Reason
from kite_schemas.yoco import (
    DrainOrdered,
    Found,
    InstanceReady,
    Path,
    SleepMode,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

FIRST, STANDBY, SPARE, STRANGER = (f"{NODE}-{BASE}-{number}" for number in (0, 1, 2, 7))
ENDPOINT = "http://127.0.0.1:9007"


def up(prewarmed: int = 0) -> Story:
    fleet = Story(engines=(PAUSES,)).up(ready=1, standbys=1, prewarmed=prewarmed)
    fleet.promote("credit")
    return fleet


def again(fleet: Story, *found: Found) -> list[str]:
    """Let the yoco begin anew; return what is decided."""
    fleet.register("second boot", found=found)
    return fleet.kinds()


def ways(fleet: Story) -> list[tuple[str, str, str]]:
    def told(route: Route) -> tuple[str, str, str]:
        return route.name, route.instance, route.endpoint

    return [told(route) for route in routes(fleet.state)]


def test_what_was_ready_answers_on():
    fleet = up()
    before = ways(fleet)
    assert [name for name, _, _ in before] == ["risk", BASE]
    assert again(fleet, fleet.found(FIRST, noise_micronats=7), fleet.found(STANDBY, mode=SleepMode.PAUSED)) == []
    assert ways(fleet) == before
    first = fleet.state.instances[FIRST]
    assert (first.state, first.standby, first.device, first.noise_micronats) == (Life.READY, False, "cpu0", 7)
    fleet.wait(SECOND_US)
    assert fleet.kinds() == []


def test_what_it_holds_and_where_it_listens_is_taken_as_found():
    fleet = up()
    found = fleet.found(FIRST, versions=(), endpoint=ENDPOINT)
    assert again(fleet, found, fleet.found(STANDBY)) == ["load_ordered"], "it has lost its blend"
    assert fleet.state.instances[FIRST].endpoint == ENDPOINT


def test_a_woken_standby_stays_awake_and_a_sleeping_one_wakes_as_it_sleeps():
    fleet = up()
    fleet.order()
    fleet.wake(STANDBY)
    assert again(fleet, fleet.found(FIRST), fleet.found(STANDBY)) == []
    assert fleet.state.instances[STANDBY].summoned
    asleep = up()
    again(asleep, asleep.found(FIRST), asleep.found(STANDBY, mode=SleepMode.L1))
    asleep.order()
    ((_, wake),) = asleep.orders(WakeOrdered)
    assert (wake.instance, wake.path) == (STANDBY, Path.WARM)


def test_what_it_did_not_find_is_absent_and_started():
    fleet = up()
    assert again(fleet, fleet.found(FIRST)) == ["start_ordered"]
    ((_, start),) = fleet.orders(StartOrdered)
    assert start.instance == STANDBY
    assert fleet.state.instances[STANDBY].versions == ()


@pytest.mark.parametrize("state", [Life.STARTING, Life.WARMING, Life.WAKING, Life.FAILED, Life.ABSENT])
def test_what_is_found_in_the_middle_of_a_step_is_started(state: Life):
    fleet = up()
    again(fleet, fleet.found(FIRST), fleet.found(STANDBY, state=state))
    assert [start.instance for _, start in fleet.orders(StartOrdered)] == [STANDBY]


def test_an_order_of_the_life_before_is_over_and_its_outcome_changes_nothing():
    fleet = up()
    fleet.order()
    ((order, _),) = fleet.orders(WakeOrdered)
    assert again(fleet, fleet.found(FIRST), fleet.found(STANDBY, state=Life.ASLEEP)) == ["order_expired"]
    instance = fleet.state.instances[STANDBY]
    assert (instance.state, instance.failures, instance.called) == (Life.ASLEEP, 0, None)
    assert fleet.state.passages[f"{NODE}.{BASE}/hot"].missed == 1
    fleet.tell(
        InstanceReady(
            order=order,
            done=True,
            instance=STANDBY,
            node=NODE,
            path=Path.HOT,
            pid=1,
            endpoint=ENDPOINT,
            versions=(),
            noise_micronats=0,
            t_wake_us=1,
            t_first_token_us=2,
        )
    )
    assert fleet.state.instances[STANDBY].state is Life.ASLEEP


def test_a_wake_that_was_done_but_not_told_is_found_ready():
    fleet = up()
    fleet.order()
    again(fleet, fleet.found(FIRST), fleet.found(STANDBY, state=Life.READY))
    standby = fleet.state.instances[STANDBY]
    assert (standby.state, standby.summoned, standby.failures) == (Life.READY, True, 0)


def test_a_prewarmed_spare_waits_on():
    fleet = up(prewarmed=1)
    fleet.hold(SPARE)
    found = [fleet.found(name) for name in (FIRST, STANDBY)]
    assert again(fleet, *found, fleet.found(SPARE, endpoint=ENDPOINT)) == []
    assert fleet.state.instances[SPARE].state is Life.PREWARMED


def test_a_quarantined_one_stays_quarantined_since_when_it_was():
    fleet = up()
    fleet.change(FIRST, "ready", "quarantined", "effect_missing")
    since_us = fleet.state.instances[FIRST].quarantined_us
    again(fleet, fleet.found(FIRST), fleet.found(STANDBY))
    assert (fleet.state.instances[FIRST].state, fleet.state.instances[FIRST].quarantined_us) == (
        Life.QUARANTINED,
        since_us,
    )


def stranger() -> Story:
    fleet = up()
    known = [fleet.found(name) for name in (FIRST, STANDBY)]
    odd = Found(instance=STRANGER, pid=1, state=Life.READY, endpoint=ENDPOINT, base=BASE, device="cpu1")
    again(fleet, *known, odd)
    return fleet


def test_what_no_pool_wants_answers_nobody_and_is_stopped():
    fleet = stranger()
    assert STRANGER not in {instance for _, instance, _ in ways(fleet)}
    fleet.wait(SECOND_US)
    ((_, stop),) = fleet.orders(StopOrdered)
    assert (stop.instance, stop.why.reason) == (STRANGER, Reason.UNWANTED)
    fleet.change(STRANGER, "ready", "absent", "stopped", done=True)
    fleet.wait(60 * SECOND_US)
    assert fleet.kinds() == []


def test_after_a_gap_in_the_bus_it_is_kept():
    fleet = stranger()
    fleet.tell(BusGap(stream="KITE_EVT", first=1, last=1), "ledger/fleet")
    fleet.wait(SECOND_US)
    assert fleet.orders(StopOrdered) == []


def test_what_the_fleet_shrinks_by_drains_before_it_is_stopped():
    fleet = up()
    fleet.amend({"fleet.pools": []})
    fleet.wait(SECOND_US)
    assert [drain.instance for _, drain in fleet.orders(DrainOrdered)] == [FIRST]
    assert [stop.instance for _, stop in fleet.orders(StopOrdered)] == [STANDBY]
    fleet.change(FIRST, "ready", "draining")
    fleet.change(FIRST, "draining", "draining", "drained", done=True)
    fleet.wait(SECOND_US)
    assert [stop.instance for _, stop in fleet.orders(StopOrdered)] == [FIRST]


def test_an_arbitrator_that_knows_nothing_takes_a_fleet_that_runs():
    fleet = Story(engines=(PAUSES,)).begin()
    ready = Found(instance=FIRST, pid=1, state=Life.READY, endpoint=ENDPOINT, base=BASE, device="cpu0")
    asleep = ready.model_copy(update={"instance": STANDBY, "state": Life.ASLEEP, "mode": SleepMode.PAUSED})
    fleet.register("second boot", found=(ready, asleep))
    assert {name: i.standby for name, i in fleet.state.instances.items()} == {FIRST: False, STANDBY: True}
    assert ways(fleet) == [(BASE, FIRST, ENDPOINT)]
