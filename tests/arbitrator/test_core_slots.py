"""Adapter slots: an engine has so many, an unloaded adapter takes one until it is dropped; no load goes beyond."""

from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.arbitration import Held
from kite_schemas.upcycle import BlendLoaded, Ending, InjectionAdmitted, InjectionClosed, InjectionRejected, LoadOrdered
from kite_schemas.why import Reason

FIRST, SECOND = (f"{NODE}-{BASE}-{number}" for number in range(2))
OVER_US = 121 * SECOND_US


def version(request: str, blend: str = "risk") -> str:
    return f"{blend}@{digest_of(request)[:12]}"


def rejections(fleet: Story) -> list[InjectionRejected]:
    return [row.data for row in fleet.last if isinstance(row.data, InjectionRejected)]


def full() -> Story:
    """Two blends of two versions each: the four slots of the engine are taken."""
    fleet = Story().up()
    for blend in ("risk", "tone"):
        for adapter in ("credit", "mood"):
            fleet.promote(adapter, blend=blend)
    return fleet


def test_an_injection_that_has_no_slot_is_rejected_with_the_arithmetic():
    fleet = full()
    fleet.verified(fleet.inject("laundering"))
    (rejected,) = rejections(fleet)
    assert rejected.why.reason is Reason.SLOTS_FULL
    assert rejected.detail == f"{FIRST} would hold 5 adapters in 4 slots: 2 x 2 blends + 2 = 6 would do"


def test_a_slot_counts_as_taken_after_an_unload_until_the_engine_says_otherwise():
    fleet = Story().up()
    first = fleet.promote("credit")
    fleet.promote("mood")
    fleet.wait(OVER_US)
    fleet.unloads(version(first), FIRST, slots_taken=4)
    fleet.verified(fleet.inject("laundering"))
    assert [rejected.why.reason for rejected in rejections(fleet)] == [Reason.SLOTS_FULL]
    assert fleet.state.instances[FIRST].slots_taken == 4


def test_what_a_load_tells_of_slots_is_remembered_and_passed_on():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    name = version(request)
    order = fleet.open(f"load/risk@{FIRST}")
    fleet.tell(BlendLoaded(order=order, instance=FIRST, version=name, duration_us=1, slot=7, slots_taken=1))
    assert (fleet.state.instances[FIRST].slots, fleet.state.instances[FIRST].slots_taken) == (((name, 7),), 1)
    fleet.proves(name, FIRST)
    fleet.promote("mood")
    fleet.wait(OVER_US)
    (row,) = [row for row in fleet.last if row.type == "kite.upcycle.retire_ordered.v1"]
    assert row.data is not None
    assert row.data.model_dump()["slot"] == 7


def test_what_others_are_about_to_load_counts():
    fleet = Story().up()
    fleet.promote("credit")
    fleet.promote("mood")
    fleet.verified(fleet.inject("laundering"))
    assert fleet.orders(InjectionAdmitted), "the third"
    fleet.verified(fleet.inject("credit", blend="tone"))
    assert fleet.orders(InjectionAdmitted), "the fourth"
    fleet.verified(fleet.inject("credit", blend="third"))
    assert [rejected.why.reason for rejected in rejections(fleet)] == [Reason.SLOTS_FULL]


def test_an_instance_that_filled_up_meanwhile_is_never_loaded_into():
    fleet = Story().up()
    fleet.promote("credit")
    request = fleet.inject("mood")
    fleet.verified(request)
    fleet.tell(BlendLoaded(instance=FIRST, version=version("other", "alien"), duration_us=1, slots_taken=4))
    fleet.stored(request)
    assert fleet.orders(LoadOrdered) == []
    (closed,) = [row.data for row in fleet.last if isinstance(row.data, InjectionClosed)]
    assert (closed.outcome, closed.why.reason) == (Ending.REFUSED, Reason.SLOTS_FULL)


def test_what_was_loaded_elsewhere_is_taken_out_when_one_has_filled_up():
    fleet = Story().up(ready=2, standbys=0)
    request = fleet.inject("mood")
    fleet.verified(request)
    fleet.stored(request)
    fleet.tell(BlendLoaded(instance=SECOND, version=version("other", "alien"), duration_us=1, slots_taken=4))
    fleet.proven(request, FIRST)
    assert fleet.orders(LoadOrdered) == []
    fleet.undoes(version(request), FIRST)
    (closed,) = [row.data for row in fleet.last if isinstance(row.data, InjectionClosed)]
    assert (closed.outcome, closed.why.reason) == (Ending.ROLLED_BACK, Reason.SLOTS_FULL)


def test_a_repair_waits_for_a_slot_and_says_so_once():
    fleet = Story(drift_us=SECOND_US).up()
    fleet.promote("credit")
    fleet.wait(SECOND_US)
    fleet.tell(BlendLoaded(instance=FIRST, version=version("other", "alien"), duration_us=1, slots_taken=4))
    fleet.unloads(version("other", "alien"), FIRST, slots_taken=4)
    fleet.wait(SECOND_US)
    fleet.drifts(FIRST, [])
    held = [row.data for row in fleet.last if isinstance(row.data, Held)]
    assert [one.why.reason for one in held] == [Reason.SLOTS_FULL]
    fleet.wait(SECOND_US)
    assert fleet.orders(LoadOrdered) == []
    assert [row.type for row in fleet.last if isinstance(row.data, Held)] == []


def test_without_a_retention_slots_are_not_counted():
    fleet = Story().up()
    fleet.amend({"upcycle.retention_us": None})
    for adapter in ("credit", "mood", "laundering", "credit2", "mood2", "laundering2"):
        fleet.promote(adapter)
    assert len(fleet.state.instances[FIRST].versions) == 6
