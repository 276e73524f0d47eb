"""The desired fleet, the policy and the clock, as the core decides them."""

import pytest

from kite_arbitrator import core
from kite_arbitrator.state import current
from kite_arbitrator.testing import BASE, LEDGER, NODE, Story
from kite_schemas.ledger import Created
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested, PolicySet
from kite_schemas.upcycle import LoadOrdered
from kite_schemas.yoco import StartOrdered, WakeOrdered
from kite_schemas.yoco import State as Life

FIRST, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1"


def test_nothing_is_decided_before_there_is_a_policy():
    fleet = Story()
    fleet.tell(Created(ledger=LEDGER, format=core.FORMAT), "ledger/fleet")
    assert fleet.register() == ()
    assert fleet.wait(1_000_000) == ()
    fleet.tell(ChangeRequested(actor="test", changes=(Change(key="fleet.pools", value=[]),)), "policy/fleet")
    assert [type(row.data) for row in fleet.last] == [ChangeRejected]


def test_missing_instances_are_started_one_per_device():
    fleet = Story().begin(ready=2, standbys=1)
    orders = fleet.orders(StartOrdered)
    assert [(o.instance, o.device, o.standby) for _, o in orders] == [
        (f"{NODE}-{BASE}-0", "cpu0", False),
        (f"{NODE}-{BASE}-1", "cpu1", False),
    ]  # both devices are busy: the third waits
    assert [o.spec.cpus for _, o in orders] == ["0", "1"]
    fleet.ready(FIRST)
    assert [(o.instance, o.device) for _, o in fleet.orders(StartOrdered)] == [(f"{NODE}-{BASE}-2", "cpu0")]


def test_a_standby_is_drained_and_put_to_sleep_once_it_has_started():
    fleet = Story().begin()
    fleet.ready(FIRST)
    assert fleet.kinds() == []
    fleet.ready(STANDBY)
    assert fleet.kinds() == ["drain_ordered"]
    fleet.change(STANDBY, "ready", "draining")
    assert fleet.kinds() == []
    fleet.change(STANDBY, "draining", "draining", "drained", done=True)
    assert fleet.kinds() == ["sleep_ordered"]
    fleet.change(STANDBY, "draining", "asleep", "paused", done=True)
    assert fleet.kinds() == []
    assert fleet.state.instances[STANDBY].state is Life.ASLEEP


def test_a_failed_start_is_repeated_after_a_wait_that_doubles():
    fleet = Story().begin(standbys=0)
    waits: list[int] = []
    for _ in range(4):
        fleet.fails(FIRST, "start", "engine_died")
        assert fleet.kinds() == []
        wait_us = fleet.state.instances[FIRST].retry_us - fleet.state.now_us
        waits.append(wait_us)
        fleet.wait(wait_us - 10_000)
        assert fleet.kinds() == []
        fleet.wait(20_000)
        assert fleet.kinds() == ["start_ordered"]
    assert waits == [5_000_000, 10_000_000, 20_000_000, 40_000_000]


def test_a_start_without_an_outcome_expires_and_is_repeated():
    fleet = Story().begin(standbys=0)
    fleet.wait(current(fleet.state).expiry.start_us + 1)
    assert fleet.kinds() == ["order_expired"]
    assert fleet.state.instances[FIRST].state is Life.FAILED
    fleet.wait(current(fleet.state).yoco.start_backoff_us + 1)
    assert fleet.kinds() == ["start_ordered"]


def test_an_instance_that_dies_is_started_again_and_gets_its_blends_back():
    fleet = Story().up(standbys=0)
    fleet.promote("credit")
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(current(fleet.state).yoco.start_backoff_us + 1)
    assert fleet.kinds() == ["start_ordered"]
    fleet.ready(FIRST)
    ((_, load),) = fleet.orders(LoadOrdered)
    assert load.resident == fleet.state.blends["risk"].resident
    assert load.request is None  # a repair, not an injection


def test_a_node_that_starts_anew_loses_its_instances_and_its_open_orders():
    fleet = Story().up()
    fleet.order()
    assert fleet.orders(WakeOrdered)
    fleet.register("second boot")
    assert fleet.kinds() == ["order_expired", "start_ordered", "start_ordered"]
    assert fleet.state.instances[STANDBY].summoned is False


def test_a_failed_wake_leaves_a_standby_that_can_be_asked_again():
    fleet = Story().up()
    fleet.order()
    fleet.fails(STANDBY, "load", "refused", state=Life.ASLEEP)
    assert fleet.state.instances[STANDBY].summoned is False
    fleet.order()
    assert fleet.kinds() == ["wake_ordered"]


def test_the_lowest_standby_is_woken_and_the_decision_says_why_not_the_others():
    fleet = Story().up(ready=1, standbys=2)
    fleet.order()
    ((_, wake),) = fleet.orders(WakeOrdered)
    assert wake.instance == STANDBY
    reasons = {c.id: (c.chosen, str(c.reason)) for c in wake.why.candidates}
    assert reasons[FIRST] == (False, "no_standby")
    assert reasons[STANDBY] == (True, "asked")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("upcycle.weight_decoy_ppm", 1, "unknown setting"),
        ("upcycle.weight_decay_ppm", 1_000_001, "less than or equal to 1000000"),
        ("upcycle.weight_decay_ppm", 0.93, "valid integer"),
        ("upcycle.weight_decay_ppm", True, "valid integer"),
        ("expiry.wake_us", 0, "greater than or equal to 1"),
        ("fleet.pools", "many", "valid tuple"),
    ],
)
def test_a_change_that_cannot_be_is_rejected_and_names_the_key(key: str, value: object, said: str):
    fleet = Story().begin()
    fleet.tell(
        ChangeRequested.model_validate({"actor": "t", "changes": [{"key": key, "value": value}]}), "policy/fleet"
    )
    (rejected,) = [row.data for row in fleet.last if isinstance(row.data, ChangeRejected)]
    assert key.split(".")[1] in rejected.detail
    assert said in rejected.detail


def test_a_change_takes_effect_as_the_whole_policy_with_its_digest():
    fleet = Story().begin()
    before = fleet.state.policy_digest
    change = Change(key="upcycle.weight_decay_ppm", value=710_000)
    fleet.tell(ChangeRequested(actor="t", changes=(change,)), "policy/fleet")
    (set_,) = [row.data for row in fleet.last if isinstance(row.data, PolicySet)]
    assert set_.policy.upcycle.weight_decay_ppm == 710_000
    assert set_.digest == fleet.state.policy_digest != before


def test_a_node_that_stops_is_given_no_orders_until_it_registers_again():
    fleet = Story().up()
    for name in (FIRST, STANDBY):
        fleet.change(name, str(fleet.state.instances[name].state), "absent", "shutdown")
        assert fleet.kinds() == []
    fleet.wait(1_000_000)
    assert fleet.kinds() == []
    fleet.register("second boot")
    assert fleet.kinds() == ["start_ordered", "start_ordered"]
