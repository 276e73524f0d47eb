"""One after another on a device: starts and wakes that ran together would mis-size each other's memory."""

from kite_arbitrator.testing import BASE, NODE, PAUSES, SECOND_US, Story, of
from kite_schemas.arbitration import Held
from kite_schemas.why import Reason
from kite_schemas.yoco import StartOrdered, WakeOrdered

FIRST, STANDBY, SECOND, THIRD = (f"{NODE}-{BASE}-{number}" for number in range(4))


def wakes(fleet: Story) -> list[str]:
    return [wake.instance for _, wake in fleet.orders(WakeOrdered)]


def test_a_standby_waits_while_another_wakes_on_its_device():
    fleet = Story(engines=(PAUSES,)).up(ready=1, standbys=3)
    fleet.step_us = 1_000
    places = {name: fleet.state.instances[name].device for name in (STANDBY, SECOND, THIRD)}
    assert places == {STANDBY: "cpu1", SECOND: "cpu0", THIRD: "cpu1"}
    fleet.order()
    assert wakes(fleet) == [STANDBY]
    fleet.order(instance=THIRD)
    (held,) = of(fleet.last, Held)
    assert [c.reason for c in held.why.candidates] == [Reason.DEVICE_BUSY]
    fleet.order()
    assert wakes(fleet) == [SECOND], "that one is on the other device"
    fleet.wake(STANDBY)
    fleet.order(instance=THIRD)
    assert wakes(fleet) == [THIRD]


def test_a_standby_waits_while_another_starts_on_its_device():
    fleet = Story(engines=(PAUSES,)).up(ready=2, standbys=1)
    assert fleet.state.instances[SECOND].device == fleet.state.instances[FIRST].device
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(6 * SECOND_US)
    assert [start.instance for _, start in fleet.orders(StartOrdered)] == [FIRST]
    fleet.order()
    (held,) = of(fleet.last, Held)
    assert {c.id: c.reason for c in held.why.candidates}[SECOND] is Reason.DEVICE_BUSY
    fleet.change(FIRST, "failed", "starting")
    fleet.ready(FIRST)
    fleet.order()
    assert wakes(fleet) == [SECOND]


def test_a_start_waits_while_a_standby_wakes_on_its_device():
    fleet = Story(engines=(PAUSES,)).up(ready=2, standbys=1)
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(4 * SECOND_US)
    fleet.order()
    assert wakes(fleet) == [SECOND]
    fleet.wait(2 * SECOND_US)
    assert fleet.kinds() == []
    fleet.wake(SECOND)
    assert [start.instance for _, start in fleet.orders(StartOrdered)] == [FIRST]


def test_before_nodes_told_of_their_engines_a_wake_did_not_wait():
    fleet = Story().up(ready=2, standbys=1)
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(6 * SECOND_US)
    fleet.order()
    assert wakes(fleet) == [SECOND]
