"""A rollback on request: loaded and proven everywhere, promoted, closed exactly once; refused when it cannot be."""

from typing import Any

import pytest

from kite_arbitrator.records import Standing
from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.guard import Compared
from kite_schemas.upcycle import (
    BlendFailed,
    BlendPromoted,
    BlendStored,
    LoadFailed,
    LoadOrdered,
    RebuildOrdered,
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


def finds_damaged(fleet: Story, name: str, instance: str) -> None:
    """Upcycle hashes a version before it gives it to an engine."""
    order = fleet.open(f"load/risk@{instance}")
    fleet.tell(
        LoadFailed(
            order=order, done=True, instance=instance, version=name, stage="check", code="store_damaged", message=""
        )
    )


def makes_again(fleet: Story, name: str) -> None:
    order, known = fleet.open(f"rebuild/{name}"), fleet.state.versions[name]
    about: dict[str, Any] = {"request": known.request, "resident": known.resident, "digest": known.digest}
    made: dict[str, Any] = {"method": "concatenate", "rank": 4, "residual_ppm": 0, "share_ppm": 1, "duration_us": 1}
    fleet.tell(BlendStored(order=order, done=True, **about, **made))


def fails_to_make_again(fleet: Story, name: str) -> None:
    order, stored = fleet.open(f"rebuild/{name}"), fleet.state.versions[name]
    fleet.tell(
        BlendFailed(
            order=order, done=True, request=stored.request, code="member_changed", message="credit", duration_us=1
        )
    )


def released(*, ready: int = 1) -> tuple[Story, str]:
    """A blend whose first version is in the store alone, where nobody looks at it."""
    fleet, first, _ = twice(ready=ready, standbys=0)
    fleet.wait(RETENTION_US)
    for name in (FIRST, SECOND)[:ready]:
        fleet.unloads(first, name)
    assert standings(fleet)[first] is Standing.RELEASED
    return fleet, first


def test_a_released_version_whose_files_are_damaged_is_made_again_and_then_loaded():
    fleet, first = released(ready=2)
    fleet.rollback()
    finds_damaged(fleet, first, FIRST)
    ((_, order),) = fleet.orders(RebuildOrdered)
    assert (order.version, order.why.reason) == (first, Reason.DAMAGED)
    finds_damaged(fleet, first, SECOND)
    assert closings(fleet) == fleet.orders(LoadOrdered) == [], "both found it so, and it is made again once"
    makes_again(fleet, first)
    assert {order.instance for _, order in fleet.orders(LoadOrdered)} == {FIRST, SECOND}
    for name in (FIRST, SECOND):
        fleet.proves(first, name)
    assert closings(fleet)[0].outcome is Return.DONE
    assert all(fleet.state.instances[name].failures == 0 for name in (FIRST, SECOND)), "the files were at fault"


def test_a_version_that_is_damaged_at_once_again_is_not_returned_to():
    fleet, first = released()
    fleet.rollback()
    finds_damaged(fleet, first, FIRST)
    makes_again(fleet, first)
    finds_damaged(fleet, first, FIRST)
    assert fleet.orders(RebuildOrdered) == []
    fleet.undoes(first, FIRST)
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.detail) == (Return.FAILED, f"{FIRST}: store_damaged")


def test_a_version_that_cannot_be_made_again_is_not_returned_to_and_a_moment_later_refused():
    fleet, first = released()
    fleet.rollback()
    finds_damaged(fleet, first, FIRST)
    fails_to_make_again(fleet, first)
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.why.reason) == (Return.FAILED, Reason.DAMAGED)
    assert closed.detail == f"{first} cannot be made again: member_changed: credit"
    assert rejected(fleet, version=first) is Reason.DAMAGED
    fleet.wait(fleet.state.delays[f"rebuild/{first}"].retry_us - fleet.now_us)
    fleet.rollback(version=first)
    assert len(fleet.orders(RebuildOrdered)) == 1, "later it is tried again"
    makes_again(fleet, first)
    fleet.proves(first, FIRST)
    assert closings(fleet)[-1].outcome is Return.DONE


def test_nobody_makes_it_again():
    fleet, first = released()
    fleet.rollback()
    finds_damaged(fleet, first, FIRST)
    fleet.wait(300 * SECOND_US)
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.why.reason) == (Return.FAILED, Reason.DAMAGED)


def test_a_damaged_version_that_nobody_returns_to_is_left_as_it_is():
    fleet, first = released()
    fleet.rollback()
    finds_damaged(fleet, first, FIRST)
    fails_to_make_again(fleet, first)
    fleet.wait(fleet.state.delays[f"rebuild/{first}"].retry_us - fleet.now_us)
    assert fleet.orders(RebuildOrdered) == []
    assert fleet.state.versions[first].damaged
