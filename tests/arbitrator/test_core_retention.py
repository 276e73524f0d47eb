"""A version's end: retained for a while, retired from every instance, released to the store, deleted if unwanted."""

from typing import Any

from kite_arbitrator.records import Standing
from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.arbitration import GapAcknowledged
from kite_schemas.ledger import BusGap
from kite_schemas.proof import Missing
from kite_schemas.upcycle import (
    BlendStored,
    DeleteFailed,
    DeleteOrdered,
    Ending,
    InjectionClosed,
    RetireFailed,
    RetireOrdered,
    RollbackOrdered,
)
from kite_schemas.why import Reason

FIRST, STANDBY = (f"{NODE}-{BASE}-{number}" for number in range(2))
RETENTION_US, OVER_US = 120 * SECOND_US, 121 * SECOND_US


def version(request: str, blend: str = "risk") -> str:
    return f"{blend}@{digest_of(request)[:12]}"


def standings(fleet: Story) -> dict[str, Standing]:
    return {name: stored.standing for name, stored in fleet.state.versions.items()}


def twice() -> tuple[Story, str, str]:
    """Promote two versions of one blend, one after the other."""
    fleet = Story().up()
    first = version(fleet.promote("credit"))
    second = version(fleet.promote("mood"))
    return fleet, first, second


def test_the_version_before_is_retained_and_then_retired_and_released():
    fleet, first, second = twice()
    assert standings(fleet) == {first: Standing.RETAINED, second: Standing.PROMOTED}
    fleet.wait(RETENTION_US - SECOND_US)
    assert fleet.orders(RetireOrdered) == []
    fleet.wait(2 * SECOND_US)
    ((_, order),) = fleet.orders(RetireOrdered)
    assert (order.target, order.version, order.instance) == (f"retire/{first}@{FIRST}", first, FIRST)
    assert order.why.reason is Reason.RETENTION_OVER
    (rule,) = order.why.rules
    assert (rule.id, rule.threshold, rule.fired) == ("upcycle.retention_us", RETENTION_US, True)
    assert standings(fleet)[first] is Standing.RETIRING
    fleet.unloads(first, FIRST)
    assert fleet.state.instances[FIRST].versions == (second,)
    assert standings(fleet) == {first: Standing.RELEASED, second: Standing.PROMOTED}
    for _ in range(3):
        fleet.wait(600 * SECOND_US)
        assert fleet.kinds() == [], "it stays in the store"


def test_one_version_before_is_kept_and_no_more():
    fleet, first, second = twice()
    third = version(fleet.promote("laundering"))
    ((_, order),) = fleet.orders(RetireOrdered)
    assert (order.version, order.why.reason) == (first, Reason.SUPERSEDED)
    assert standings(fleet) == {first: Standing.RETIRING, second: Standing.RETAINED, third: Standing.PROMOTED}


def test_without_a_retention_nothing_is_retired_or_deleted():
    fleet, _, _ = twice()
    fleet.amend({"upcycle.retention_us": None})
    fleet.promote("laundering")
    fleet.wait(10 * RETENTION_US)
    assert not {"retire_ordered", "delete_ordered"} & {row.type.split(".")[2] for row in fleet.decided}


def test_a_sleeping_instance_is_rid_of_it_too():
    fleet = Story().up()
    first = version(fleet.promote("credit"))
    fleet.order()
    fleet.wake(STANDBY)
    fleet.drain(STANDBY)
    fleet.sleep(STANDBY)
    assert fleet.state.instances[STANDBY].versions == (first,)
    fleet.promote("mood")
    fleet.wait(OVER_US)
    assert {order.instance for _, order in fleet.orders(RetireOrdered)} == {FIRST, STANDBY}
    fleet.unloads(first, FIRST)
    assert standings(fleet)[first] is Standing.RETIRING, "one of them lists it still"
    fleet.unloads(first, STANDBY)
    assert standings(fleet)[first] is Standing.RELEASED


def test_an_open_retirement_keeps_no_load_waiting():
    fleet, first, _ = twice()
    fleet.wait(OVER_US)
    assert len(fleet.orders(RetireOrdered)) == 1
    third = fleet.promote("laundering")
    assert fleet.state.blends["risk"].resident.version == version(third)
    assert fleet.open(f"retire/{first}@{FIRST}")


def test_what_cannot_be_retired_is_tried_again_later_and_later():
    fleet, first, _ = twice()
    fleet.wait(OVER_US)
    waits_us: list[int] = []
    for _ in range(3):
        order = fleet.open(f"retire/{first}@{FIRST}")
        failed = RetireFailed(order=order, done=True, instance=FIRST, version=first, code="busy", message="")
        assert fleet.tell(failed) == (), "not at once"
        failed_us = fleet.now_us
        while not fleet.orders(RetireOrdered):
            fleet.wait(SECOND_US)
        waits_us.append(fleet.now_us - failed_us)
    assert waits_us == sorted(waits_us)
    assert waits_us[2] >= 2 * waits_us[1] - SECOND_US >= waits_us[0]
    fleet.unloads(first, FIRST)
    assert fleet.state.delays == {}


def test_a_process_that_ended_has_nothing_to_retire():
    fleet, first, _ = twice()
    fleet.change(FIRST, "ready", "failed", "engine_died")
    assert standings(fleet)[first] is Standing.RELEASED


def test_after_a_gap_nothing_is_taken_away_until_somebody_has_looked():
    fleet, _, _ = twice()
    fleet.tell(BusGap(stream="KITE_EVT", first=1, last=2), "ledger/fleet")
    fleet.wait(OVER_US)
    assert fleet.orders(RetireOrdered) == []
    fleet.tell(GapAcknowledged(actor="t"), "arbitration/fleet")
    fleet.wait(1)
    assert len(fleet.orders(RetireOrdered)) == 1


def failing() -> tuple[Story, str]:
    """An injection whose version had no effect, and was taken out again."""
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    name = version(request)
    fleet.misses(name, FIRST)
    fleet.undoes(name, FIRST)
    return fleet, name


def test_what_was_never_promoted_is_deleted_as_soon_as_no_instance_holds_it():
    fleet, name = failing()
    stored = fleet.state.versions[name]
    assert (stored.standing, stored.quarantined) == (Standing.UNWANTED, True)
    fleet.wait(SECOND_US)
    ((_, order),) = fleet.orders(DeleteOrdered)
    assert (order.version, order.digest, order.node) == (name, stored.digest, NODE)
    assert (order.target, order.why.reason) == (f"delete/{name}", Reason.UNWANTED)
    fleet.deletes(name)
    assert fleet.state.versions == {}


def test_a_deletion_that_failed_is_tried_again_later():
    fleet, name = failing()
    fleet.wait(SECOND_US)
    order, digest = fleet.open(f"delete/{name}"), fleet.state.versions[name].digest
    fleet.tell(DeleteFailed(order=order, done=True, version=name, digest=digest, code="disk", message=""))
    assert standings(fleet) == {name: Standing.UNWANTED}
    fleet.wait(1)
    assert fleet.orders(DeleteOrdered) == []
    fleet.wait(fleet.state.delays[f"delete/{name}"].retry_us - fleet.now_us)
    assert len(fleet.orders(DeleteOrdered)) == 1


def blended(fleet: Story, request: str, order: str, digest: str) -> BlendStored:
    """Return what tells that the blend of a request is in the store, with these files."""
    blend = fleet.state.injections[request].request.blend
    resident = fleet.resident_of(blend, digest)
    measures: dict[str, Any] = {"method": "concatenate", "rank": 4, "residual_ppm": 0, "share_ppm": 1}
    end: dict[str, Any] = {"order": order, "done": True, "duration_us": 1}
    return BlendStored(request=request, resident=resident, digest=digest, **end, **measures)


def test_a_blend_that_is_stored_too_late_is_deleted():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    late = blended(fleet, request, fleet.open("blend/risk"), digest_of("late"))
    fleet.wait(300 * SECOND_US)
    assert fleet.state.injections == {}
    fleet.tell(late)
    assert standings(fleet) == {late.resident.version: Standing.UNWANTED}
    fleet.wait(SECOND_US)
    assert [order.version for _, order in fleet.orders(DeleteOrdered)] == [late.resident.version]


def test_nothing_is_deleted_between_an_admission_and_its_end_and_nothing_admitted_during_a_deletion():
    fleet, name = failing()
    request = fleet.inject("mood")
    fleet.verified(request)
    fleet.wait(SECOND_US)
    assert fleet.orders(DeleteOrdered) == []
    fleet.stored(request)
    fleet.proven(request, FIRST)
    fleet.wait(SECOND_US)
    assert len(fleet.orders(DeleteOrdered)) == 1
    other = fleet.inject("laundering")
    assert "injection_admitted" not in [row.type.split(".")[2] for row in fleet.verified(other)]
    assert "injection_admitted" in [row.type.split(".")[2] for row in fleet.deletes(name)]


def test_files_that_two_blends_have_in_common_are_not_deleted_while_one_is_alive():
    fleet = Story().up()
    kept = fleet.promote("credit")
    request = fleet.inject("credit", blend="tone")
    fleet.verified(request)
    fleet.tell(blended(fleet, request, fleet.open("blend/tone"), digest_of(kept)))
    name = version(kept, "tone")
    fleet.misses(name, FIRST)
    fleet.undoes(name, FIRST)
    assert standings(fleet) == {version(kept): Standing.PROMOTED, name: Standing.UNWANTED}
    fleet.wait(SECOND_US)
    assert fleet.orders(DeleteOrdered) == []


def test_a_version_without_effect_is_never_loaded_again():
    """The same members give the same bytes: the second injection stores what the first one had."""
    fleet = Story().up()
    for _ in range(2):
        request = fleet.inject("credit")
        fleet.verified(request)
        fleet.tell(blended(fleet, request, fleet.open("blend/risk"), digest_of("bytes")))
        if request in fleet.state.injections:
            fleet.misses(version("bytes"), FIRST)
            fleet.undoes(version("bytes"), FIRST)
    (closed,) = [row.data for row in fleet.last if isinstance(row.data, InjectionClosed)]
    assert (closed.outcome, closed.why.reason) == (Ending.REFUSED, Reason.VERSION_QUARANTINED)
    assert fleet.state.instances[FIRST].versions == ()


def test_numbers_that_are_not_finite_make_the_worker_ask_the_base_and_the_instance_is_ill_if_it_is():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    name = version(request)
    fleet.misses(name, FIRST, Missing.NOT_FINITE)
    ((_, order),) = fleet.orders(RollbackOrdered)
    assert order.base == fleet.state.instances[FIRST].base
    healthy = Story(state=fleet.state, now_us=fleet.now_us)
    healthy.undoes(name, FIRST, healed=True)
    assert healthy.state.instances[FIRST].state == "ready"
    fleet.undoes(name, FIRST, healed=False)
    assert fleet.state.instances[FIRST].state == "quarantined"
    assert fleet.state.injections == {}


def test_a_version_without_effect_alone_asks_no_base():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    fleet.misses(version(request), FIRST)
    ((_, order),) = fleet.orders(RollbackOrdered)
    assert order.base is None
