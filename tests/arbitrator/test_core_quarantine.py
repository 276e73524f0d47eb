"""An instance whose effect is missing: no traffic, a time for a look, then another process in its place."""

import pytest

from kite_arbitrator.routes import routes
from kite_arbitrator.testing import BASE, NODE, PAUSES, SECOND_US, Story
from kite_schemas.ledger import BusGap
from kite_schemas.proof import EffectMissing, Missing
from kite_schemas.why import Reason
from kite_schemas.yoco import OrderFailed, StartOrdered, StopOrdered
from kite_schemas.yoco import State as Life

FIRST, SECOND, STANDBY = (f"{NODE}-{BASE}-{number}" for number in range(3))
QUARANTINE_US, BACKOFF_US = 60 * SECOND_US, 5 * SECOND_US


def quarantined() -> Story:
    """A fleet one of whose instances lost the effect of its blend."""
    fleet = Story(engines=(PAUSES,)).up(ready=2, standbys=1)
    fleet.promote("credit")
    version = fleet.state.blends["risk"].resident.version
    fleet.tell(EffectMissing(instance=FIRST, version=version, code=Missing.LIKE_BASE, message=""))
    return fleet


def test_it_answers_nobody_and_is_left_for_a_look():
    fleet = quarantined()
    instance = fleet.state.instances[FIRST]
    assert (instance.state, instance.quarantined_us) == (Life.QUARANTINED, fleet.now_us)
    assert FIRST not in {route.instance for route in routes(fleet.state)}
    fleet.wait(QUARANTINE_US - 1)
    assert fleet.kinds() == []
    fleet.wait(1)
    ((_, stop),) = fleet.orders(StopOrdered)
    assert (stop.instance, stop.why.reason) == (FIRST, Reason.QUARANTINED)
    (rule,) = stop.why.rules
    assert (rule.id, rule.value, rule.threshold) == ("yoco.quarantine_us", QUARANTINE_US, QUARANTINE_US)


def test_then_another_one_is_started_after_a_wait():
    fleet = quarantined()
    fleet.wait(QUARANTINE_US)
    fleet.change(FIRST, "quarantined", "absent", "stopped", done=True)
    assert fleet.kinds() == []
    assert fleet.state.instances[FIRST].retry_us == fleet.now_us + BACKOFF_US
    fleet.wait(BACKOFF_US)
    assert [start.instance for _, start in fleet.orders(StartOrdered)] == [FIRST]
    assert fleet.state.instances[FIRST].quarantined_us == 0


def test_a_wake_that_proves_nothing_leads_there_too():
    fleet = quarantined()
    fleet.order()
    order = fleet.open(f"instance/{STANDBY}")
    fleet.tell(
        OrderFailed(
            order=order,
            done=True,
            instance=STANDBY,
            state=Life.QUARANTINED,
            stage="prove",
            code="effect_missing",
            message="",
        )
    )
    assert fleet.state.instances[STANDBY].quarantined_us == fleet.now_us
    fleet.wait(QUARANTINE_US)
    assert {stop.instance for _, stop in fleet.orders(StopOrdered)} == {FIRST, STANDBY}


def test_it_ends_after_a_gap_in_the_bus_too():
    fleet = quarantined()
    fleet.tell(BusGap(stream="KITE_EVT", first=1, last=1), "ledger/fleet")
    fleet.wait(QUARANTINE_US)
    assert [stop.instance for _, stop in fleet.orders(StopOrdered)] == [FIRST]


@pytest.mark.parametrize("waits_us", [QUARANTINE_US, 100 * QUARANTINE_US])
def test_without_the_setting_it_stays(waits_us: int):
    fleet = quarantined()
    fleet.amend({"yoco.quarantine_us": None})
    fleet.wait(waits_us)
    assert fleet.kinds() == []
