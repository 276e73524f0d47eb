"""One injection, as the core decides it."""

from typing import Any

import pytest

from kite_arbitrator.state import current
from kite_arbitrator.testing import Story, adapter
from kite_schemas.guard import ComparisonOrdered, ComparisonRequested
from kite_schemas.proof import EffectMissing, Missing
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendFailed,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    InjectionRequested,
    LoadFailed,
    LoadOrdered,
    RollbackOrdered,
    RolledBack,
    Violation,
)
from kite_schemas.why import Decision, Reason
from kite_schemas.yoco import OrderRequested, WakeOrdered

READY, SECOND, STANDBY = "n1-tiny-0", "n1-tiny-1", "n1-tiny-1"


def closed(story: Story) -> InjectionClosed:
    (data,) = [row.data for row in story.decided if isinstance(row.data, InjectionClosed)]
    return data


def reason_of(story: Story) -> Reason:
    """Return the reason of the last row's first decision."""
    decision = story.last[0].data
    assert isinstance(decision, Decision)
    return decision.why.reason


def test_an_injection_is_verified_blended_loaded_proven_promoted_and_closed():
    fleet = Story().up()
    request = fleet.inject("credit", weight_ppm=600_000)
    assert fleet.kinds() == ["verification_ordered"]
    fleet.verified(request)
    assert fleet.kinds() == ["injection_admitted"]
    ((_, admitted),) = fleet.orders(InjectionAdmitted)
    assert [m.weight_ppm for m in admitted.members] == [600_000]
    assert admitted.base_weight_ppm == 400_000
    assert admitted.instances == (READY,)  # the standby sleeps: it gets the version when it wakes
    fleet.stored(request)
    assert fleet.kinds() == ["load_ordered"]
    fleet.proven(request, READY)
    assert fleet.kinds() == ["blend_promoted", "injection_closed", "channel_selected"]
    assert closed(fleet).outcome is Ending.PROMOTED
    assert closed(fleet).version == fleet.state.blends["risk"].resident.version
    assert not fleet.state.injections
    assert not fleet.state.orders


def test_the_decision_says_with_which_values_it_was_taken():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request, share_ppm=3_000)
    ((_, admitted),) = fleet.orders(InjectionAdmitted)
    share = next(rule for rule in admitted.why.rules if rule.id == "upcycle.params_share_max_ppm")
    assert (share.value, share.threshold, share.margin, share.fired) == (3_000, 8_000, 5_000, False)
    assert {c.id: c.chosen for c in admitted.why.candidates} == {READY: True, STANDBY: False}
    assert admitted.why.policy == fleet.state.policy_digest
    assert [age.id for age in admitted.why.inputs] == ["adapter/credit", f"instance/{READY}"]


def test_the_first_instance_is_proven_before_the_others_load():
    fleet = Story().up(ready=2, standbys=0)
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    assert [order.instance for _, order in fleet.orders(LoadOrdered)] == [READY]
    fleet.proven(request, READY)
    ((_, second),) = fleet.orders(LoadOrdered)
    assert second.instance == SECOND
    assert second.resident.effect_print is not None  # the print travels with every later load
    fleet.proven(request, SECOND)
    assert fleet.kinds() == ["blend_promoted", "injection_closed", "channel_selected"]


def test_an_anchor_keeps_its_weight_when_a_second_adapter_comes():
    fleet = Story().up()
    fleet.promote("credit", weight_ppm=600_000, anchors=("credit",))
    fleet.promote("laundering", weight_ppm=400_000)
    weights = {m.adapter.name: (m.weight_ppm, m.anchored) for m in fleet.state.blends["risk"].members}
    assert weights == {"credit": (600_000, True), "laundering": (400_000, False)}


def test_a_refused_adapter_closes_the_injection():
    fleet = Story().up()
    request = fleet.inject("broken")
    violation = Violation(code="not_finite", where="layer 0", expected="finite", found="nan")
    fleet.tell(
        AdapterRefused(
            order=fleet.open("blend/risk"),
            done=True,
            request=request,
            adapter=fleet.state.injections[request].request.adapter,
            violations=(violation,),
            total=1,
            duration_us=1,
        )
    )
    assert fleet.kinds() == ["injection_closed"]
    assert closed(fleet).outcome is Ending.REFUSED


def test_a_dry_run_closes_with_the_weights_it_would_get():
    fleet = Story().up()
    request = fleet.inject("credit", weight_ppm=250_000, dry_run=True)
    fleet.verified(request)
    assert fleet.kinds() == ["injection_closed"]
    assert closed(fleet).outcome is Ending.DRY_RUN
    assert closed(fleet).base_weight_ppm == 750_000
    assert "risk" not in fleet.state.blends


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"anchors": ("nobody",)}, Reason.MEMBER_UNKNOWN),
        ({"replace": "nobody"}, Reason.MEMBER_UNKNOWN),
        ({"weight_ppm": 0}, Reason.WEIGHT_TOO_SMALL),
    ],
)
def test_weights_that_cannot_be_are_rejected(fields: dict[str, Any], reason: Reason):
    fleet = Story().up()
    request = fleet.inject("credit", **fields)
    fleet.verified(request)
    assert fleet.kinds() == ["injection_rejected", "injection_closed"]
    assert reason_of(fleet) is reason


def test_a_base_that_no_pool_serves_is_rejected_at_once():
    fleet = Story().up()
    request = InjectionRequested(actor="test", blend="other", adapter=adapter("credit"), base="elsewhere")
    fleet.tell(request, "blend/other")
    assert fleet.kinds() == ["injection_rejected", "injection_closed"]
    assert closed(fleet).why.reason is Reason.BASE_UNKNOWN


def test_without_a_ready_instance_an_injection_is_rejected_once_verified():
    fleet = Story().begin()
    fleet.verified(fleet.inject("credit"))
    assert closed(fleet).why.reason is Reason.NO_READY_INSTANCE


def test_one_injection_at_a_time_per_blend():
    fleet = Story().up()
    fleet.inject("credit")
    fleet.inject("laundering")
    assert fleet.kinds() == ["injection_rejected", "injection_closed"]
    assert reason_of(fleet) is Reason.BLEND_BUSY
    fleet.inject("laundering", blend="other")  # several blends in parallel
    assert fleet.kinds() == ["verification_ordered"]


def test_a_blend_that_cannot_be_computed_ends_the_injection():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.tell(
        BlendFailed(
            order=fleet.open("blend/risk"),
            done=True,
            request=request,
            code="rank_too_large",
            message="9 > 8",
            duration_us=1,
        )
    )
    assert fleet.kinds() == ["injection_closed"]
    assert (closed(fleet).outcome, closed(fleet).why.reason) == (Ending.ROLLED_BACK, Reason.BLEND_FAILED)


def test_a_missing_effect_takes_the_version_out_of_every_instance_that_may_hold_it():
    fleet = Story().up(ready=2, standbys=0)
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    fleet.proven(request, READY)
    version = fleet.resident(request).version
    fleet.tell(
        EffectMissing(
            order=fleet.open(f"load/risk@{SECOND}"),
            done=True,
            instance=SECOND,
            version=version,
            code=Missing.LIKE_BASE,
            message="",
        )
    )
    assert [order.instance for _, order in fleet.orders(RollbackOrdered)] == [READY, SECOND]
    for instance in (READY, SECOND):
        fleet.tell(
            RolledBack(
                order=fleet.open(f"load/risk@{instance}"),
                done=True,
                request=request,
                instance=instance,
                version=version,
            )
        )
    assert (closed(fleet).outcome, closed(fleet).why.reason) == (Ending.ROLLED_BACK, Reason.EFFECT_MISSING)
    assert all(version not in i.versions for i in fleet.state.instances.values())
    assert "risk" not in fleet.state.blends


def test_an_order_without_an_outcome_expires_and_the_injection_is_undone():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    fleet.wait(current(fleet.state).expiry.load_us - 2_000)
    assert fleet.kinds() == []
    fleet.wait(10_000)
    assert fleet.kinds() == ["order_expired", "rollback_ordered"]
    fleet.wait(current(fleet.state).expiry.load_us + 1)
    assert fleet.kinds()[:2] == ["order_expired", "injection_closed"]
    assert (closed(fleet).outcome, closed(fleet).why.reason) == (Ending.EXPIRED, Reason.EXPIRED)


def test_an_outcome_after_its_expiry_is_recorded_and_moves_nothing():
    fleet = Story().up()
    request = fleet.inject("credit")
    order, injection = fleet.open("blend/risk"), fleet.state.injections[request]
    fleet.wait(current(fleet.state).expiry.verify_us + 1)
    assert fleet.kinds() == ["order_expired", "injection_closed"]
    fleet.tell(
        AdapterVerified(
            order=order,
            done=True,
            request=request,
            adapter=injection.request.adapter,
            parameters=1,
            share_ppm=1,
            rank=1,
            duration_us=1,
        )
    )
    assert fleet.kinds() == []


def test_an_instance_that_dies_in_the_middle_ends_the_injection():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    fleet.change(READY, "ready", "failed", "engine_died")
    assert "injection_closed" in fleet.kinds()
    assert closed(fleet).why.reason is Reason.INSTANCE_LOST


def test_a_failed_load_is_rolled_back():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    fleet.tell(
        LoadFailed(
            order=fleet.open(f"load/risk@{READY}"),
            done=True,
            instance=READY,
            version=fleet.resident(request).version,
            stage="load",
            code="refused",
            message="",
        )
    )
    assert fleet.kinds() == ["rollback_ordered"]


def test_a_woken_standby_gets_every_promoted_blend_of_its_base():
    fleet = Story().up()
    fleet.promote("credit")
    fleet.order()
    ((_, wake),) = fleet.orders(WakeOrdered)
    assert wake.instance == STANDBY
    assert [r.version for r in wake.residents] == [fleet.state.blends["risk"].resident.version]
    assert wake.deadline_us == 417_000
    fleet.change(STANDBY, "asleep", "waking")
    fleet.ready(STANDBY, "hot", (wake.residents[0].version,))
    assert fleet.kinds() == []  # it stays awake: it was asked for
    fleet.order()
    assert fleet.kinds() == ["held"]
    assert reason_of(fleet) is Reason.NO_STANDBY


def test_an_order_for_a_base_nobody_serves_is_held():
    fleet = Story().up()
    fleet.tell(OrderRequested(actor="test", base="elsewhere"), "base/elsewhere")
    assert reason_of(fleet) is Reason.BASE_UNKNOWN


def test_a_comparison_asks_for_the_blend_that_both_hold():
    fleet = Story().up()
    fleet.promote("credit")
    fleet.tell(ComparisonRequested(actor="test", first=READY, second=STANDBY))
    assert reason_of(fleet) is Reason.NOT_READY
    fleet.order()
    version = fleet.state.blends["risk"].resident.version
    fleet.change(STANDBY, "asleep", "waking")
    fleet.ready(STANDBY, "hot", (version,))
    fleet.tell(ComparisonRequested(actor="test", first=READY, second=STANDBY))
    ((_, ordered),) = fleet.orders(ComparisonOrdered)
    assert ordered.model == version
