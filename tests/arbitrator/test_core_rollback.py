"""A rollback on request: loaded and proven everywhere, promoted, closed exactly once; refused when it cannot be."""

from typing import Any

import pytest

from kite_arbitrator.state import Standing
from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.guard import Compared
from kite_schemas.upcycle import (
    BlendPromoted,
    LoadFailed,
    LoadOrdered,
    RetireOrdered,
    Return,
    RollbackClosed,
    RollbackOrdered,
)
from kite_schemas.why import Reason

RETENTION_US = 121 * SECOND_US
FIRST, SECOND = (f"{NODE}-{BASE}-{number}" for number in range(2))


def twice(*, ready: int = 1, standbys: int = 1) -> tuple[Story, str, str]:
    fleet = Story().up(ready=ready, standbys=standbys)
    names = [f"risk@{digest_of(fleet.promote(adapter))[:12]}" for adapter in ("credit", "mood")]
    return fleet, names[0], names[1]


def closings(fleet: Story) -> list[RollbackClosed]:
    return [row.data for row in fleet.decided if isinstance(row.data, RollbackClosed)]


def standings(fleet: Story) -> dict[str, Standing]:
    return {name: stored.standing for name, stored in fleet.state.versions.items()}


def test_a_blend_means_the_version_before_again_within_one_load():
    fleet, first, second = twice(ready=2, standbys=0)
    request = fleet.rollback()
    loads = fleet.orders(LoadOrdered)
    assert {order.instance for _, order in loads} == {FIRST, SECOND}, "all at once: it was proven before"
    assert {order.request for _, order in loads} == {request}
    assert all(order.resident.effect_print is not None for _, order in loads)
    fleet.proves(first, FIRST)
    assert closings(fleet) == []
    fleet.proves(first, SECOND)
    (promoted,) = [row.data for row in fleet.last if isinstance(row.data, BlendPromoted)]
    assert (promoted.request, promoted.why.reason) == (request, Reason.ROLLED_BACK)
    assert [m.adapter.name for m in promoted.members] == ["credit"]
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.version, closed.former) == (Return.DONE, first, second)
    assert fleet.state.blends["risk"].resident.version == first
    assert standings(fleet) == {first: Standing.PROMOTED, second: Standing.RETAINED}
    assert fleet.state.watches["risk"].due_us <= fleet.state.now_us, "a promotion is compared at once"
    fleet.rollback()
    fleet.proves(second, FIRST)
    fleet.proves(second, SECOND)
    assert fleet.state.blends["risk"].resident.version == second, "and forward again"


def test_what_was_released_is_loaded_again():
    fleet, first, _ = twice()
    fleet.wait(RETENTION_US)
    fleet.unloads(first, FIRST)
    fleet.rollback(version=first)
    fleet.proves(first, FIRST)
    assert closings(fleet)[0].outcome is Return.DONE
    assert fleet.state.blends["risk"].resident.version == first


def test_a_rollback_waits_for_the_retirement_of_its_version_and_loads_it_again():
    fleet, first, _ = twice()
    fleet.wait(RETENTION_US)
    fleet.rollback()
    assert fleet.orders(LoadOrdered) == []
    fleet.unloads(first, FIRST)
    ((_, order),) = fleet.orders(LoadOrdered)
    assert order.resident.version == first
    fleet.proves(first, FIRST)
    assert closings(fleet)[0].outcome is Return.DONE


def test_a_dry_run_says_what_would_happen():
    fleet, first, second = twice()
    fleet.rollback(dry_run=True)
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.version, closed.former) == (Return.DRY_RUN, first, second)
    assert closed.detail == f"would prove {first} on 1 instances, and load it on 0 of them"
    assert fleet.state.blends["risk"].resident.version == second


def test_a_rollback_goes_on_in_a_freeze():
    fleet, first, second = twice(ready=2, standbys=0)
    fleet.amend({"guard.enabled": True})
    conflict: dict[str, Any] = {
        "kl_micronats": 400_000,
        "p99_micronats": 400_000,
        "covered_ppm": 900_000,
        "positions": 9,
    }
    fleet.tell(Compared(first=FIRST, second=SECOND, model=second, **conflict, duration_us=1))
    assert fleet.state.freeze is not None
    fleet.rollback()
    for name in (FIRST, SECOND):
        fleet.proves(first, name)
    assert fleet.state.freeze is not None
    assert closings(fleet)[0].outcome is Return.DONE


def test_what_fails_is_taken_out_where_it_was_loaded_and_stays_where_it_was():
    fleet, first, second = twice()
    fleet.wait(RETENTION_US)
    fleet.unloads(first, FIRST)
    request = fleet.rollback()
    fleet.misses(first, FIRST)
    ((_, order),) = fleet.orders(RollbackOrdered)
    assert (order.request, order.version) == (request, first)
    assert closings(fleet) == []
    fleet.undoes(first, FIRST)
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.why.reason) == (Return.FAILED, Reason.EFFECT_MISSING)
    assert fleet.state.blends["risk"].resident.version == second
    assert fleet.state.versions[first].quarantined
    assert fleet.state.instances[FIRST].state == "ready", "the version is at fault"


def test_a_load_that_failed_leaves_the_retained_version_where_it_is():
    fleet, first, _ = twice()
    fleet.rollback()
    order = fleet.open(f"load/risk@{FIRST}")
    failed = LoadFailed(order=order, done=True, instance=FIRST, version=first, stage="load", code="x", message="")
    fleet.tell(failed)
    assert fleet.orders(RollbackOrdered) == []
    assert closings(fleet)[0].outcome is Return.FAILED
    assert standings(fleet)[first] is Standing.RETAINED
    assert fleet.state.instances[FIRST].failures == 0


def test_nobody_answers():
    fleet, _, _ = twice()
    fleet.rollback()
    fleet.wait(300 * SECOND_US)
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.why.reason) == (Return.FAILED, Reason.EXPIRED)


def test_an_instance_that_ends_is_not_waited_for():
    fleet, first, _ = twice(ready=2, standbys=0)
    fleet.rollback()
    fleet.proves(first, FIRST)
    fleet.change(SECOND, "ready", "failed", "engine_died")
    assert closings(fleet)[0].outcome is Return.DONE
    assert fleet.state.blends["risk"].resident.version == first


def rejected(fleet: Story, **fields: Any) -> Reason:
    fleet.rollback(**fields)
    closed = closings(fleet)[-1]
    assert closed.outcome is Return.REJECTED
    assert closed.detail
    return closed.why.reason


def test_what_cannot_be_returned_to():
    fleet, _, second = twice()
    assert rejected(fleet, blend="tone") is Reason.VERSION_UNKNOWN
    assert rejected(fleet, version="risk@0123456789ab") is Reason.VERSION_UNKNOWN
    assert rejected(fleet, version=second) is Reason.PROMOTED
    once = Story().up()
    once.promote("credit")
    assert rejected(once) is Reason.NO_FORMER
    fleet.inject("laundering")
    assert rejected(fleet) is Reason.BLEND_BUSY
    assert len(closings(fleet)) == 4
    assert fleet.state.rollbacks == {}


def test_one_change_of_a_blend_at_a_time():
    fleet, first, _ = twice()
    fleet.rollback()
    assert rejected(fleet) is Reason.BLEND_BUSY
    fleet.inject("laundering")
    assert "injection_rejected" in fleet.kinds()
    fleet.proves(first, FIRST)
    assert [closed.outcome for closed in closings(fleet)] == [Return.REJECTED, Return.DONE]


def test_a_version_without_effect_is_not_returned_to():
    fleet, first, _ = twice()
    fleet.wait(RETENTION_US)
    fleet.unloads(first, FIRST)
    fleet.rollback()
    fleet.misses(first, FIRST)
    fleet.undoes(first, FIRST)
    assert rejected(fleet, version=first) is Reason.VERSION_QUARANTINED


def test_nowhere_to_load_it():
    fleet, _, _ = twice()
    fleet.change(FIRST, "ready", "failed", "engine_died")
    assert rejected(fleet) is Reason.NO_READY_INSTANCE


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_slot_for_it(dry_run: bool):
    fleet, first, _ = twice()
    fleet.wait(RETENTION_US)
    fleet.unloads(first, FIRST, slots_taken=4)
    assert rejected(fleet, dry_run=dry_run) is Reason.SLOTS_FULL
    assert closings(fleet)[0].detail == (f"{FIRST} would hold 5 adapters in 4 slots: 2 x 1 blends + 2 = 4 would do")


def test_nothing_of_an_open_rollback_is_retired_or_deleted():
    fleet, first, second = twice()
    fleet.rollback()
    fleet.wait(RETENTION_US // 100)
    for _ in range(20):
        fleet.wait(SECOND_US)
        assert not [order for _, order in fleet.orders(RetireOrdered) if order.version in (first, second)]
