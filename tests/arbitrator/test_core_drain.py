"""Out of service by request: one instance drains, rests, and is left alone until somebody orders it again."""

from kite_arbitrator.routes import routes
from kite_arbitrator.testing import BASE, NODE, PAUSES, SECOND_US, Doing, Story, of
from kite_schemas.arbitration import Discarded, Held
from kite_schemas.ledger import BusGap
from kite_schemas.why import Reason
from kite_schemas.yoco import DrainOrdered, SleepOrdered, StartOrdered, WakeOrdered
from kite_schemas.yoco import State as Life

FIRST, SECOND, STANDBY = (f"{NODE}-{BASE}-{number}" for number in range(3))


def up(ready: int = 2, standbys: int = 1) -> Story:
    return Story(engines=(PAUSES,)).up(ready=ready, standbys=standbys)


def parked(ready: int = 2, standbys: int = 1) -> Story:
    """A fleet whose first instance was drained by request, and sleeps."""
    fleet = up(ready, standbys)
    fleet.drain(FIRST)
    fleet.sleep(FIRST)
    return fleet


def served(fleet: Story) -> list[str]:
    return [route.instance for route in routes(fleet.state)]


def held(fleet: Story) -> Held:
    (data,) = of(fleet.last, Held)
    return data


def test_an_instance_drains_sleeps_and_has_no_route_from_the_order_on():
    fleet = up()
    fleet.drain(FIRST)
    ((_, drain),) = fleet.orders(DrainOrdered)
    assert (drain.instance, drain.request, drain.why.reason) == (FIRST, fleet.rows[-2].id, Reason.ASKED)
    (rule,) = drain.why.rules
    assert (rule.id, rule.value, rule.threshold) == ("fleet.serving", 1, 1)
    assert served(fleet) == [SECOND]
    fleet.change(FIRST, "ready", "draining")
    fleet.change(FIRST, "draining", "draining", "drained", done=True)
    assert [order.instance for _, order in fleet.orders(SleepOrdered)] == [FIRST]
    fleet.change(FIRST, "draining", "asleep", "paused", done=True)
    assert (served(fleet), fleet.kinds()) == ([SECOND], [])


def test_the_last_one_that_answers_is_kept_unless_it_is_forced():
    fleet = up(ready=1)
    fleet.drain(FIRST)
    assert (held(fleet).why.reason, held(fleet).detail) == (
        Reason.LAST_INSTANCE,
        f"no other instance answers for '{BASE}'",
    )
    assert held(fleet).why.rules[0].margin == -1
    fleet.drain(FIRST, force=True)
    assert [drain.instance for _, drain in fleet.orders(DrainOrdered)] == [FIRST]


def test_what_cannot_be_drained_is_held_with_the_reason():
    fleet = up()
    fleet.drain("nobody")
    assert held(fleet).why.reason is Reason.INSTANCE_UNKNOWN
    fleet.drain(STANDBY)
    assert (held(fleet).why.reason, held(fleet).detail) == (
        Reason.NOT_READY,
        f"{STANDBY} is asleep: only what is ready drains",
    )
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.drain(FIRST)
    assert held(fleet).why.reason is Reason.TARGET_BUSY, "an injection counts on it"
    fleet.tell(BusGap(stream="KITE_EVT", first=1, last=1), "ledger/fleet")
    fleet.wait(200 * SECOND_US)
    fleet.drain(FIRST)
    assert held(fleet).why.reason is Reason.DEGRADED
    assert fleet.state.wanted == {}


def test_it_is_out_of_service_once():
    fleet = parked()
    fleet.drain(FIRST)
    assert held(fleet).why.reason is Reason.PARKED


def test_no_rule_wakes_what_is_parked():
    fleet = parked(ready=2, standbys=0)
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.amend({"arbitration.concurrency_max": 4, "arbitration.hit_rate_min_ppm": None})
    fleet.windows(7 * SECOND_US)
    rows = fleet.windows(60 * SECOND_US, {SECOND: Doing(running=9, queries=1_000, hits=700)})
    assert of(rows, WakeOrdered) == []
    fleet.order()
    assert {c.id: c.reason for c in held(fleet).why.candidates}[FIRST] is Reason.PARKED


def test_a_parked_standby_is_not_woken_by_need():
    fleet = up(ready=1, standbys=2)
    fleet.order()
    fleet.wake(SECOND)
    fleet.drain(SECOND)
    fleet.sleep(SECOND)
    assert fleet.state.instances[SECOND].parked
    fleet.order()
    assert [wake.instance for _, wake in fleet.orders(WakeOrdered)] == [STANDBY]
    fleet.wake(STANDBY)
    fleet.order()
    assert {c.id: c.reason for c in held(fleet).why.candidates}[SECOND] is Reason.PARKED


def test_by_its_name_it_comes_back():
    fleet = parked()
    fleet.order(instance=FIRST)
    ((_, wake),) = fleet.orders(WakeOrdered)
    assert wake.instance == FIRST
    assert fleet.state.instances[FIRST].parked, "until it is ready"
    fleet.wake(FIRST)
    assert (fleet.state.instances[FIRST].parked, served(fleet)) == (False, [FIRST, SECOND])
    fleet.wait(60 * SECOND_US)
    assert fleet.kinds() == []


def test_what_dies_while_it_is_parked_is_not_started_until_somebody_asks_for_it():
    fleet = parked()
    fleet.change(FIRST, "asleep", "failed", "engine_died")
    fleet.wait(60 * SECOND_US)
    assert fleet.kinds() == []
    fleet.order(instance=FIRST, late=True)
    ((_, start),) = fleet.orders(StartOrdered)
    assert (start.instance, start.standby, start.request is not None) == (FIRST, False, True)
    fleet.ready(FIRST)
    assert served(fleet) == [FIRST, SECOND]


def test_a_node_that_starts_anew_leaves_it_parked():
    fleet = parked()
    fleet.register("second boot")
    assert FIRST not in [start.instance for _, start in fleet.orders(StartOrdered)]
    assert fleet.state.instances[FIRST].state is Life.ABSENT


def test_what_jitter_put_off_is_answered_at_a_tick():
    fleet = up(ready=1)
    fleet.step_us = 20_000
    fleet.order()
    fleet.wake(SECOND)
    fleet.drain(SECOND)
    assert [data.decision for data in of(fleet.last, Discarded)] == [DrainOrdered.TYPE]
    fleet.wait(137_000)
    assert [drain.instance for _, drain in fleet.orders(DrainOrdered)] == [SECOND]
    assert fleet.state.wanted == {}
