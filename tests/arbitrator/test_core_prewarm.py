"""The warm pool: spares without the weights, paced, blocked, started under need, and brought back."""

import pytest
from pydantic import JsonValue

from kite_arbitrator.rules.v1.prewarm import ranges
from kite_arbitrator.testing import BASE, NODE, PAUSES, SECOND_US, Doing, Story, of, pool
from kite_schemas.arbitration import Held
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested, PolicySet
from kite_schemas.why import Reason
from kite_schemas.yoco import (
    DrainOrdered,
    Path,
    PrewarmOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

FIRST, STANDBY, SPARE, SECOND = (f"{NODE}-{BASE}-{number}" for number in range(4))
INTERVAL_US, CRITICAL_US = 120 * SECOND_US, 90 * SECOND_US
BUSY = {FIRST: Doing(running=9, queries=1_000, hits=700)}


def prewarms(fleet: Story) -> list[str]:
    return [order.instance for _, order in fleet.orders(PrewarmOrdered)]


def holds(fleet: Story) -> list[Reason]:
    return [data.why.reason for data in of(fleet.last, Held)]


def up(prewarmed: int = 1, *, critical: bool = False) -> Story:
    """A fleet whose first fill is over: a prewarm is ordered with the last report of it."""
    return Story(engines=(PAUSES,)).up(ready=1, standbys=1, prewarmed=prewarmed, critical=critical)


def warm(prewarmed: int = 1, *, critical: bool = False) -> Story:
    fleet = up(prewarmed, critical=critical)
    assert fleet.open(f"instance/{SPARE}")
    fleet.hold(SPARE)
    assert fleet.state.instances[SPARE].state is Life.PREWARMED
    return fleet


def calm(fleet: Story) -> None:
    """A blend, a limit on concurrency, and quiet windows."""
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.amend({"arbitration.concurrency_max": 4, "arbitration.hit_rate_min_ppm": None})
    fleet.windows(7 * SECOND_US)


def fail(fleet: Story, instance: str) -> None:
    fleet.fails(instance, "prewarm")


# --- what is ordered, and when


def test_a_spare_is_prewarmed_when_the_fleet_is_there_on_cores_that_serve_nobody():
    fleet = up()
    (order,) = of(fleet.decided, PrewarmOrdered)
    assert (order.instance, order.why.reason) == (SPARE, Reason.DEMAND)
    assert order.cores == "1", "what is ready runs on the first one; the standby on the other sleeps"
    assert order.spec.served_name == BASE
    (rule,) = order.why.rules
    assert (rule.id, rule.value, rule.threshold) == ("fleet.prewarmed", 0, 1)
    fleet.hold(SPARE)
    fleet.wait(2 * INTERVAL_US)
    assert fleet.kinds() == [], "it waits for as long as nobody needs it"


def test_no_core_is_named_where_something_serves_on_every_one():
    fleet = Story(engines=(PAUSES,)).up(ready=2, standbys=0, prewarmed=1)
    (order,) = of(fleet.decided, PrewarmOrdered)
    assert order.cores == ""


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), (("0",), "0"), (("3", "1", "2", "7"), "1-3,7"), (("0", "2"), "0,2")]
)
def test_cores_are_told_as_the_kernel_tells_them(cores: tuple[str, ...], text: str):
    assert ranges(iter(cores)) == text


@pytest.mark.parametrize(("critical", "interval_us"), [(False, INTERVAL_US), (True, CRITICAL_US)])
def test_two_prewarms_of_a_pool_are_an_interval_apart(critical: bool, interval_us: int):
    fleet = warm(prewarmed=2, critical=critical)
    began_us = fleet.state.prewarmed_us[f"pool/{NODE}.{BASE}"]
    assert holds(fleet) == [Reason.PREWARM_RECENT]
    fleet.wait(began_us + interval_us - fleet.now_us - 1)
    assert fleet.kinds() == []
    fleet.wait(1)
    assert prewarms(fleet) == [SECOND]


def test_without_the_setting_nothing_is_prewarmed():
    fleet = Story(engines=(PAUSES,)).up(ready=1, standbys=1)
    fleet.amend({"yoco.prewarm_interval_us": None, "fleet.pools": [pool(NODE, 1, 1, prewarmed=1)]})
    assert prewarms(fleet) == []


def test_nothing_is_prewarmed_while_its_pool_starts():
    fleet = Story(engines=(PAUSES,)).begin(ready=1, standbys=1, prewarmed=1)
    assert prewarms(fleet) == []
    fleet.ready(FIRST)
    assert prewarms(fleet) == []
    fleet.ready(STANDBY)
    assert prewarms(fleet) == [SPARE]


def test_a_prewarm_that_fails_is_repeated_at_the_interval():
    fleet = up()
    fail(fleet, SPARE)
    assert holds(fleet) == []
    fleet.wait(60 * SECOND_US)
    assert holds(fleet) == [Reason.PREWARM_RECENT]
    fleet.wait(INTERVAL_US)
    assert prewarms(fleet) == [SPARE]


def test_a_prewarm_without_an_outcome_has_failed():
    fleet = up()
    fleet.wait(300 * SECOND_US + 1)
    assert fleet.state.instances[SPARE].state is Life.FAILED


# --- what stands against it


def test_a_node_that_sheds_prewarms_nothing():
    fleet = up(prewarmed=0)
    fleet.amend({"arbitration.injection_rate_max_milli": 1})
    fleet.inject("credit")
    fleet.window(fragmentation_ppm=400_000)
    assert fleet.kinds() == ["prewarm_blocked", "decay_set"]
    fleet.amend({"fleet.pools": [pool(NODE, 1, 1, prewarmed=1)]})
    assert prewarms(fleet) == []
    assert Reason.PREWARM_BLOCKED in holds(fleet)


def test_a_spare_is_prewarmed_only_where_it_could_be_started():
    fleet = up(prewarmed=0)
    half = (1 << 34) // 2
    fleet.amend({"fleet.pools": [pool(NODE, 1, 1, prewarmed=1)], "yoco.reserve_bytes": half + 1})
    assert (prewarms(fleet), holds(fleet)) == ([], [Reason.MEMORY])
    fleet.amend({"yoco.reserve_bytes": half})
    assert prewarms(fleet) == [SPARE]


def test_what_is_prewarmed_holds_no_memory():
    """Each device has room for two: the spare on the first and the instance on it leave room for one more."""
    fleet = warm()
    fleet.amend({"yoco.reserve_bytes": (1 << 34) // 2, "fleet.pools": [pool(NODE, 2, 1, prewarmed=0)]})
    fleet.wait(SECOND_US)
    assert Reason.MEMORY not in holds(fleet)


# --- need


def test_pressure_starts_a_spare_when_no_standby_is_left():
    fleet = warm()
    calm(fleet)
    fleet.change(STANDBY, "asleep", "failed", "engine_died")
    expected_us = sorted(fleet.state.passages[f"{NODE}.{BASE}/cold"].took_us)[1]
    (start,) = [start for start in of(fleet.windows(6 * SECOND_US, BUSY), StartOrdered) if start.deadline_us]
    assert (start.instance, start.standby, start.request) == (SPARE, True, None)
    assert start.why.reason is Reason.PRESSURE
    assert start.deadline_us == expected_us, "as long as a cold start took"
    instance = fleet.state.instances[SPARE]
    assert (instance.summoned, instance.state) == (True, Life.PREWARMED)
    assert instance.called
    assert (instance.called.path, instance.called.deadline_us) == (Path.COLD, 417_000)


def test_pressure_wakes_a_standby_before_it_starts_a_spare():
    fleet = warm()
    calm(fleet)
    rows = fleet.windows(6 * SECOND_US, BUSY)
    assert [wake.instance for wake in of(rows, WakeOrdered)] == [STANDBY]
    assert of(rows, StartOrdered) == []


def used() -> Story:
    """A fleet whose spare was started since somebody did not mind to wait."""
    fleet = warm()
    fleet.order()
    fleet.wake(STANDBY)
    fleet.order()
    (held,) = of(fleet.last, Held)
    assert held.why.reason is Reason.DEADLINE_UNREACHABLE
    expected_us = sorted(fleet.state.passages[f"{NODE}.{BASE}/cold"].took_us)[1]
    assert held.detail == f"{SPARE} is the fastest, cold: {expected_us} us, not 417000"
    fleet.order(late=True)
    ((_, start),) = fleet.orders(StartOrdered)
    assert (start.instance, start.request is not None, start.deadline_us) == (SPARE, True, expected_us)
    fleet.change(SPARE, "prewarmed", "starting")
    fleet.ready(SPARE)
    return fleet


def test_a_spare_that_was_asked_for_serves_and_stays():
    fleet = used()
    assert fleet.kinds() == []
    spare = fleet.state.instances[SPARE]
    assert (spare.state, spare.summoned, spare.asked) == (Life.READY, True, True)
    assert fleet.state.passages[f"{NODE}.{BASE}/cold"].ready == 3
    fleet.wait(2 * INTERVAL_US)
    assert fleet.kinds() == []


def test_a_spare_that_is_needed_no_more_drains_stops_and_is_prewarmed_at_the_next_interval():
    fleet = warm()
    calm(fleet)
    fleet.change(STANDBY, "asleep", "failed", "engine_died")
    assert of(fleet.windows(6 * SECOND_US, BUSY), StartOrdered)
    fleet.change(SPARE, "prewarmed", "starting")
    fleet.ready(SPARE, versions=(fleet.state.blends["risk"].resident.version,))
    rows = fleet.windows(45 * SECOND_US)
    assert [(drain.instance, drain.why.reason) for drain in of(rows, DrainOrdered)] == [(SPARE, Reason.IDLE)]
    fleet.change(SPARE, "ready", "draining")
    fleet.change(SPARE, "draining", "draining", "drained", done=True)
    ((_, stop),) = fleet.orders(StopOrdered)
    assert stop.instance == SPARE
    fleet.change(SPARE, "draining", "absent", "stopped", done=True)
    rows = fleet.windows(INTERVAL_US)
    assert [start.instance for start in of(rows, StartOrdered)] == [STANDBY], "the standby comes first"
    fleet.ready(STANDBY, versions=(fleet.state.blends["risk"].resident.version,))
    fleet.sleep(STANDBY)
    assert [order.instance for order in of(fleet.windows(INTERVAL_US), PrewarmOrdered)] == [SPARE]


# --- standbys that start again


def test_a_standby_that_dies_again_and_again_is_started_once_an_interval():
    fleet = Story(engines=(PAUSES,)).up()
    fleet.change(STANDBY, "asleep", "failed", "engine_died")
    fleet.wait(6 * SECOND_US)
    assert [start.instance for _, start in fleet.orders(StartOrdered)] == [STANDBY]
    fail(fleet, STANDBY)
    fleet.wait(30 * SECOND_US)
    assert (fleet.orders(StartOrdered), holds(fleet)) == ([], [Reason.PREWARM_RECENT])
    fleet.wait(INTERVAL_US)
    assert [start.instance for _, start in fleet.orders(StartOrdered)] == [STANDBY]


def test_a_node_that_starts_anew_is_filled_at_once():
    fleet = Story(engines=(PAUSES,)).up(standbys=2)
    fleet.change(STANDBY, "asleep", "failed", "engine_died")
    fleet.wait(6 * SECOND_US)
    assert fleet.orders(StartOrdered)
    fleet.register("second boot")
    assert len(fleet.orders(StartOrdered)) == 2, "one on each device"


# --- the interval itself


def change(key: str, value: JsonValue, *, force: bool = False) -> ChangeRequested:
    return ChangeRequested(actor="test", changes=(Change(key=key, value=value),), force=force)


@pytest.mark.parametrize("key", ["yoco.prewarm_interval_us", "yoco.prewarm_interval_critical_us"])
def test_an_interval_below_a_minute_is_refused_unless_it_is_forced(key: str):
    fleet = Story(engines=(PAUSES,)).up()
    fleet.tell(change(key, 60 * SECOND_US), "policy/fleet")
    assert of(fleet.last, PolicySet)
    fleet.tell(change(key, 60 * SECOND_US - 1), "policy/fleet")
    (rejected,) = of(fleet.last, ChangeRejected)
    assert rejected.detail == (
        f"{key} of 59999999 us is below 60000000 us: prewarming so often takes CPU from inference; "
        "ask with force to have it all the same"
    )
    (rule,) = rejected.why.rules
    assert (rule.value, rule.threshold, rule.margin) == (59_999_999, 60_000_000, -1)
    fleet.tell(change(key, SECOND_US, force=True), "policy/fleet")
    assert of(fleet.last, PolicySet)
    fleet.tell(change("arbitration.idle_us", SECOND_US), "policy/fleet")
    assert of(fleet.last, PolicySet), "what was forced before is in no one's way"
