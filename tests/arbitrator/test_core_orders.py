"""Orders that end without an outcome, outcomes that come after that, and nodes that start anew in between."""

from collections.abc import Callable

import pytest

from kite_arbitrator.folds.orders import GIVEN_UP_MAX
from kite_arbitrator.records import OpenOrder
from kite_arbitrator.state import current
from kite_arbitrator.testing import BASE, NODE, Story, adapter, of
from kite_schemas.arbitration import OrderExpired
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.upcycle import (
    AdapterVerified,
    BlendLoaded,
    BlendStored,
    DeleteOrdered,
    EffectPrint,
    Ending,
    InjectionClosed,
    LoadFailed,
    LoadOrdered,
    RollbackFailed,
    RollbackOrdered,
    RolledBack,
)
from kite_schemas.why import Outcome, Reason
from kite_schemas.yoco import InstanceReady, OrderFailed, Path, WakeOrdered
from kite_schemas.yoco import State as Life

OTHER = "n2"
FIRST, STANDBY, AWAY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1", f"{OTHER}-{BASE}-0"


def ready(order: str, instance: str = STANDBY, endpoint: str = "http://127.0.0.1:9009") -> InstanceReady:
    return InstanceReady(
        order=order,
        done=True,
        instance=instance,
        node=NODE,
        path=Path.HOT,
        pid=1,
        endpoint=endpoint,
        versions=(),
        noise_micronats=0,
        t_wake_us=1,
        t_first_token_us=2,
    )


def failed(order: str, instance: str = STANDBY) -> OrderFailed:
    return OrderFailed(
        order=order, done=True, instance=instance, state=Life.FAILED, stage="wake", code="expired", message=""
    )


def proven(order: str, version: str) -> EffectProven:
    mark = EffectPrint(path="store/prints/x.json", digest="ab" * 32, distance_micronats=5)
    return EffectProven(
        order=order,
        done=True,
        instance=FIRST,
        version=version,
        base_micronats=5,
        base_min_micronats=1,
        effect_print=mark,
    )


def missing(order: str, version: str) -> EffectMissing:
    return EffectMissing(
        order=order, done=True, instance=FIRST, version=version, code=Missing.LIKE_BASE, message="like the base"
    )


def closings(fleet: Story) -> list[InjectionClosed]:
    return of(fleet.decided, InjectionClosed)


def woken() -> tuple[Story, str]:
    """Return a fleet whose standby was ordered to wake and did not answer in time, and the order."""
    fleet = Story().up()
    fleet.promote("credit")
    fleet.order()
    ((order, _),) = fleet.orders(WakeOrdered)
    fleet.wait(current(fleet.state).expiry.wake_us + 1)
    assert fleet.kinds()[0] == "order_expired"
    return fleet, order


def loading(expire_rollback: bool = True) -> tuple[Story, str, str]:
    """Return a fleet whose first load was given up, as was taking it back; the load's order; and the request."""
    fleet = Story().up(standbys=0)
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    ((order, _),) = fleet.orders(LoadOrdered)
    fleet.wait(current(fleet.state).expiry.load_us + 1)
    assert fleet.kinds() == ["order_expired", "rollback_ordered"]
    if expire_rollback:
        fleet.wait(current(fleet.state).expiry.load_us + 1)
        assert [data.outcome for data in closings(fleet)] == [Ending.EXPIRED]
    return fleet, order, request


# --- late outcomes of the same boot: what they tell is true


def test_an_instance_that_is_ready_after_all_is_taken_as_ready_and_gets_what_it_lacks():
    fleet, order = woken()
    assert fleet.state.instances[STANDBY].state is Life.FAILED
    fleet.tell(ready(order))
    assert fleet.state.instances[STANDBY].state is Life.READY
    ((_, load),) = fleet.orders(LoadOrdered)
    assert (load.instance, load.resident) == (STANDBY, fleet.state.blends["risk"].resident)
    assert order not in fleet.state.given_up, "its outcome is there: nothing more is expected of it"


def test_a_failure_that_is_told_after_its_expiry_counts_once():
    fleet, order = woken()
    before = fleet.state.instances[STANDBY]
    fleet.tell(failed(order))
    after = fleet.state.instances[STANDBY]
    assert (after.failures, after.retry_us) == (before.failures, before.retry_us) == (1, before.retry_us)
    fleet.wait(after.retry_us - fleet.now_us)
    assert "start_ordered" in fleet.kinds()


def test_a_version_that_was_loaded_after_all_is_recorded_and_taken_out_once():
    fleet, order, request = loading()
    version = f"risk@{order.replace('-', '')[:12]}"
    fleet.tell(BlendLoaded(order=order, instance=FIRST, version=version, duration_us=1))
    assert fleet.state.instances[FIRST].versions == (version,), "it is true"
    ((_, rollback),) = fleet.orders(RollbackOrdered)
    assert (rollback.request, rollback.version, rollback.target) == (request, version, f"load/risk@{FIRST}")
    assert rollback.why.reason is Reason.EXPIRED
    fleet.tell(proven(order, version))
    assert fleet.orders(RollbackOrdered) == []
    fleet.tell(
        RolledBack(
            order=fleet.open(rollback.target), done=True, request=request, instance=FIRST, version=rollback.version
        )
    )
    fleet.wait(1_000_000)
    assert (fleet.state.instances[FIRST].versions, fleet.state.instances[FIRST].strays) == ((), ())
    assert {order.type for order in fleet.state.orders.values()} <= {DeleteOrdered.TYPE}, "nobody ever wanted it"
    assert len(closings(fleet)) == 1


def test_a_version_that_came_late_and_cannot_be_taken_out_is_left():
    fleet, order, request = loading()
    version = f"risk@{order.replace('-', '')[:12]}"
    fleet.tell(BlendLoaded(order=order, instance=FIRST, version=version, duration_us=1))
    fleet.tell(
        RollbackFailed(
            order=fleet.open(f"load/risk@{FIRST}"),
            done=True,
            request=request,
            instance=FIRST,
            version=version,
            code="engine_gone",
            message="",
        )
    )
    for _ in range(3):
        assert "rollback_ordered" not in [row.type.split(".")[2] for row in fleet.wait(1_000_000)]


def test_a_load_that_ends_while_it_is_being_taken_back_is_taken_back_by_that():
    fleet, order, request = loading(expire_rollback=False)
    version = fleet.resident(request).version
    fleet.tell(BlendLoaded(order=order, instance=FIRST, version=version, duration_us=1))
    assert fleet.kinds() == []
    fleet.tell(
        RolledBack(order=fleet.open(f"load/risk@{FIRST}"), done=True, request=request, instance=FIRST, version=version)
    )
    assert fleet.kinds() == ["injection_closed"]
    assert (fleet.state.instances[FIRST].versions, fleet.state.instances[FIRST].strays) == ((), ())


def test_a_version_that_came_late_and_is_promoted_later_stays():
    fleet, order, request = loading(expire_rollback=False)
    stored = fleet.resident(request)
    version = stored.version
    fleet.wait(current(fleet.state).expiry.load_us + 1)
    fleet.tell(BlendLoaded(order=order, instance=FIRST, version=version, duration_us=1))
    fleet.wait(current(fleet.state).expiry.load_us + 1)  # nobody takes it out
    again = fleet.inject("credit")
    fleet.verified(again)
    fleet.tell(
        BlendStored(
            order=fleet.open("blend/risk"),
            done=True,
            request=again,
            resident=stored,
            digest="ab" * 32,
            method="concatenate",
            rank=4,
            residual_ppm=0,
            share_ppm=1,
            duration_us=1,
        )
    )
    fleet.tell(proven(fleet.open(f"load/risk@{FIRST}"), version))
    assert closings(fleet)[-1].outcome is Ending.PROMOTED
    fleet.wait(1_000_000)
    assert fleet.kinds() == []
    assert fleet.state.instances[FIRST].versions == (version,)


def test_a_missing_effect_that_is_told_late_is_the_versions_fault_unless_a_blend_means_it():
    fleet, order, _ = loading()
    fleet.tell(missing(order, f"risk@{'0' * 12}"))
    assert fleet.state.instances[FIRST].state is Life.READY
    fleet = Story().up(standbys=0)
    fleet.promote("credit")
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(current(fleet.state).yoco.start_backoff_us + 1)
    fleet.ready(FIRST)
    ((order, load),) = fleet.orders(LoadOrdered)
    fleet.wait(current(fleet.state).expiry.load_us + 1)
    fleet.tell(missing(order, load.resident.version))
    assert fleet.state.instances[FIRST].state is Life.QUARANTINED


# --- outcomes of another boot: what they tell is over


def test_a_node_that_starts_anew_ends_its_open_orders_and_what_they_tell_later_is_over():
    fleet = Story().up()
    fleet.order()
    ((order, _),) = fleet.orders(WakeOrdered)
    fleet.register("second boot")
    ((expired),) = of(fleet.last, OrderExpired)
    assert (expired.order, expired.service, expired.why.reason) == (order, "yoco", Reason.NODE_REPLACED)
    state, opened = fleet.state, set(fleet.state.orders)
    fleet.tell(ready(order))
    assert fleet.kinds() == []
    assert fleet.state.instances == state.instances
    assert fleet.state.instances[STANDBY].endpoint == ""
    assert set(fleet.state.orders) == opened, "the new boot's starts are under way"
    fleet.ready(FIRST)
    assert fleet.state.instances[FIRST].state is Life.READY


@pytest.mark.parametrize("told", [ready, failed])
def test_an_order_that_expired_before_its_node_started_anew_tells_nothing_of_the_new_boot(
    told: Callable[[str], Outcome],
):
    fleet, order = woken()
    fleet.register("second boot")
    instances = fleet.state.instances
    fleet.tell(told(order))
    assert (fleet.kinds(), fleet.state.instances) == ([], instances)


def test_an_order_cut_off_by_the_end_of_its_yoco_tells_nothing_when_that_has_been_said():
    fleet = Story().up()
    fleet.order()
    ((order, _),) = fleet.orders(WakeOrdered)
    for name in (FIRST, STANDBY):
        fleet.change(name, str(fleet.state.instances[name].state), "absent", "shutdown")
    fleet.wait(current(fleet.state).expiry.wake_us + 1)
    assert fleet.kinds() == ["order_expired"]
    instances = fleet.state.instances
    fleet.tell(ready(order))
    assert (fleet.kinds(), fleet.state.instances) == ([], instances)


def test_a_load_of_the_last_boot_tells_nothing_of_the_new_instance():
    fleet, order, _ = loading()
    fleet.register("second boot")
    fleet.ready(FIRST)
    version = f"risk@{'0' * 12}"
    late: tuple[Outcome, ...] = (
        BlendLoaded(order=order, instance=FIRST, version=version, duration_us=1),
        LoadFailed(order=order, instance=FIRST, version=version, stage="proof", code="x", message=""),
        missing(order, version),
    )
    instances = fleet.state.instances
    for outcome in late:
        fleet.tell(outcome)
        assert (fleet.kinds(), fleet.state.instances) == ([], instances)


# --- Upcycle's orders on a node whose yoco starts anew: its process may live, the engines are gone


def verifying(fleet: Story) -> str:
    return fleet.inject("credit")


def blending(fleet: Story) -> str:
    fleet.verified(request := verifying(fleet))
    return request


def under_load(fleet: Story) -> str:
    fleet.stored(request := blending(fleet))
    return request


def under_rollback(fleet: Story) -> str:
    request = under_load(fleet)
    order, version = fleet.open(f"load/risk@{FIRST}"), fleet.resident(request).version
    fleet.tell(
        LoadFailed(order=order, done=True, instance=FIRST, version=version, stage="load", code="refused", message="")
    )
    assert fleet.kinds() == ["rollback_ordered"]
    return request


@pytest.mark.parametrize(
    ("phase", "kind", "ending", "reason"),
    [
        (verifying, "verification_ordered", Ending.EXPIRED, Reason.NODE_REPLACED),
        (blending, "injection_admitted", Ending.ROLLED_BACK, Reason.INSTANCE_LOST),
        (under_load, "load_ordered", Ending.ROLLED_BACK, Reason.INSTANCE_LOST),
        (under_rollback, "rollback_ordered", Ending.ROLLED_BACK, Reason.LOAD_FAILED),
    ],
)
def test_an_order_of_upcycle_is_stopped_and_its_injection_closed_once(
    phase: Callable[[Story], str], kind: str, ending: Ending, reason: Reason
):
    fleet = Story().up(standbys=0)
    request = phase(fleet)
    (open_order,) = fleet.state.orders.values()
    fleet.register("second boot")
    (expired,) = of(fleet.last, OrderExpired)
    assert (expired.order, expired.service, expired.kind) == (open_order.id, "upcycle", kind)
    assert (expired.target, expired.node, expired.why.reason) == (open_order.target, NODE, Reason.NODE_REPLACED)
    (closed,) = closings(fleet)
    assert (closed.request, closed.outcome, closed.why.reason) == (request, ending, reason)
    assert fleet.state.injections == {}
    assert [order.instance for order in fleet.state.orders.values()] == [FIRST], "only the start of what is missing"
    fleet.tell(answer(open_order, request))
    assert (fleet.kinds(), len(closings(fleet))) == ([], 1)
    fleet.ready(FIRST)
    fleet.promote("credit")
    assert closings(fleet)[-1].outcome is Ending.PROMOTED, "the same can be asked for again"


def answer(order: OpenOrder, request: str) -> Outcome:
    """Return what a worker says that had done its part before it heard of the expiry."""
    version = f"risk@{'0' * 12}"
    match order.type.split(".")[2]:
        case "verification_ordered":
            return AdapterVerified(
                order=order.id,
                done=True,
                request=request,
                adapter=adapter("credit"),
                parameters=1,
                share_ppm=1,
                rank=4,
                duration_us=1,
            )
        case "load_ordered":
            return proven(order.id, version)
        case "rollback_ordered":
            return RolledBack(order=order.id, done=True, request=request, instance=FIRST, version=version)
        case _:
            return LoadFailed(order=order.id, instance=FIRST, version=version, stage="x", code="x", message="")


def test_an_injection_over_two_nodes_is_taken_back_on_the_one_that_stays_and_closed_once():
    fleet = Story().up(standbys=0, nodes=(NODE, OTHER))
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    fleet.proven(request, FIRST)
    assert [order.instance for _, order in fleet.orders(LoadOrdered)] == [AWAY]
    fleet.register("second boot", node=OTHER)
    assert fleet.kinds()[:2] == ["order_expired", "rollback_ordered"]
    ((order, rollback),) = fleet.orders(RollbackOrdered)
    assert (rollback.instance, closings(fleet)) == (FIRST, [])
    fleet.tell(RolledBack(order=order, done=True, request=request, instance=FIRST, version=rollback.version))
    (closed,) = closings(fleet)
    assert (closed.outcome, closed.why.reason) == (Ending.ROLLED_BACK, Reason.INSTANCE_LOST)
    assert fleet.state.instances[FIRST].versions == ()


# --- bounds


def test_so_many_orders_without_an_outcome_are_remembered_and_no_more():
    fleet = Story().begin(standbys=0)
    start_us = current(fleet.state).expiry.start_us
    for _ in range(GIVEN_UP_MAX + 1):
        ((newest, _),) = fleet.state.orders.items()
        fleet.wait(start_us + 1)
        fleet.wait(fleet.state.instances[FIRST].retry_us - fleet.now_us)
        assert newest in fleet.state.given_up
    assert len(fleet.state.given_up) == GIVEN_UP_MAX
