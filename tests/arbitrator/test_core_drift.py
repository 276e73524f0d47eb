"""What an instance holds against what it should: told when it changed, taken as found, and put right."""

from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.upcycle import (
    BlendFailed,
    BlendStored,
    DriftObserved,
    LoadOrdered,
    RebuildOrdered,
    ResidentsSet,
    RetireOrdered,
)
from kite_schemas.why import Reason

FIRST = f"{NODE}-{BASE}-0"
EACH_US = 10 * SECOND_US


def version(request: str) -> str:
    return f"risk@{digest_of(request)[:12]}"


def watched() -> tuple[Story, str]:
    """A fleet whose node looks what engines hold, with one blend."""
    fleet = Story(drift_us=EACH_US).up()
    fleet.wait(1)
    name = version(fleet.promote("credit"))
    fleet.wait(1)
    return fleet, name


def told(fleet: Story) -> list[ResidentsSet]:
    return [row.data for row in fleet.last if isinstance(row.data, ResidentsSet)]


def test_it_is_told_once_what_it_should_hold_and_again_when_that_changes():
    fleet, first = watched()
    (said,) = told(fleet)
    assert (said.instance, said.node, said.interval_us) == (FIRST, NODE, EACH_US)
    assert [resident.version for resident in said.residents] == [first]
    assert said.residents[0].effect_print is not None
    assert said.endpoint == fleet.state.instances[FIRST].endpoint
    fleet.wait(SECOND_US)
    assert told(fleet) == []
    second = version(fleet.promote("mood"))
    fleet.wait(SECOND_US)
    (said,) = told(fleet)
    assert {resident.version for resident in said.residents} == {first, second}, "the one before stays loaded"
    fleet.wait(120 * SECOND_US)
    assert told(fleet) == [], "its retirement is open"
    fleet.unloads(first, FIRST)
    fleet.wait(SECOND_US)
    (said,) = told(fleet)
    assert [resident.version for resident in said.residents] == [second]


def test_a_new_process_and_another_interval_are_told_anew():
    fleet, _ = watched()
    fleet.amend({"upcycle.drift_interval_us": EACH_US // 2})
    fleet.wait(1)
    assert [said.interval_us for said in told(fleet)] == [EACH_US // 2]
    fleet.change(FIRST, "ready", "failed", "engine_died")
    assert fleet.state.instances[FIRST].told is None


def test_what_is_missing_is_loaded_again():
    fleet, name = watched()
    fleet.drifts(FIRST, [])
    ((_, order),) = fleet.orders(LoadOrdered)
    assert (order.resident.version, order.request, order.why.reason) == (name, None, Reason.RESIDENT_MISSING)
    fleet.proves(name, FIRST)
    assert fleet.state.instances[FIRST].versions == (name,)


def test_what_is_too_much_is_retired_under_the_name_that_it_has():
    fleet, name = watched()
    fleet.drifts(FIRST, [name, "somebody/else's"])
    ((_, order),) = fleet.orders(RetireOrdered)
    assert (order.version, order.why.reason, order.blend) == ("somebody/else's", Reason.DRIFT, BASE)
    fleet.unloads("somebody/else's", FIRST)
    assert (fleet.state.instances[FIRST].versions, fleet.state.instances[FIRST].drifted) == ((name,), ())


def drift(told_id: str) -> DriftObserved:
    return DriftObserved(node=NODE, instance=FIRST, told=told_id, expected=(), found=())


def test_what_was_held_against_something_older_says_nothing():
    fleet, name = watched()
    known = fleet.state.instances[FIRST].told
    assert known is not None
    fleet.promote("mood")
    fleet.wait(SECOND_US)
    before = fleet.state.instances[FIRST]
    fleet.tell(drift(known.id))
    assert fleet.state.instances[FIRST] == before
    assert name in before.versions


def test_while_something_is_done_about_the_instance_it_says_nothing():
    """Not even after that: it was looked before, perhaps."""
    fleet, name = watched()
    known = fleet.state.instances[FIRST].told
    assert known is not None
    request = fleet.inject("mood")
    fleet.verified(request)
    fleet.stored(request)
    assert fleet.open(f"load/risk@{FIRST}")
    fleet.tell(drift(known.id))
    assert fleet.state.instances[FIRST].versions == (name,)
    fleet.proven(request, FIRST)
    fleet.tell(drift(known.id))
    assert fleet.state.instances[FIRST].versions == (name, version(request))


def test_what_is_damaged_is_made_again_and_then_loaded():
    fleet, name = watched()
    stored = fleet.state.versions[name]
    fleet.drifts(FIRST, [], [name])
    ((order_id, order),) = fleet.orders(RebuildOrdered)
    assert (order.version, order.request, order.members) == (name, stored.request, stored.members)
    assert (order.max_lora_rank, order.why.reason, order.node) == (8, Reason.DAMAGED, NODE)
    assert fleet.orders(LoadOrdered) == [], "its files are gone"
    fleet.tell(again(order, order_id, stored.digest))
    assert not fleet.state.versions[name].damaged
    fleet.wait(1)
    assert [load.resident.version for _, load in fleet.orders(LoadOrdered)] == [name]


def again(order: RebuildOrdered, order_id: str, digest: str) -> BlendStored:
    return BlendStored(
        order=order_id,
        done=True,
        request=order.request,
        resident=Story().resident_of(order.blend, digest),
        digest=digest,
        method="concatenate",
        rank=4,
        residual_ppm=0,
        share_ppm=1,
        duration_us=1,
    )


def test_what_cannot_be_made_again_is_tried_later():
    fleet, name = watched()
    fleet.drifts(FIRST, [name], [name])
    ((order_id, order),) = fleet.orders(RebuildOrdered)
    fleet.tell(BlendFailed(order=order_id, done=True, request=order.request, code="disk", message="", duration_us=1))
    assert fleet.orders(RebuildOrdered) == []
    fleet.wait(fleet.state.delays[f"rebuild/{name}"].retry_us - fleet.now_us)
    assert len(fleet.orders(RebuildOrdered)) == 1


def test_without_an_interval_nobody_is_told():
    fleet = Story().up()
    fleet.promote("credit")
    fleet.wait(SECOND_US)
    assert told(fleet) == []
