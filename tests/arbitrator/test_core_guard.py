"""The breaker, as the core decides it: conflicts freeze admissions, agreement ends the freeze, and it always ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite_arbitrator.state import Phase, current
from kite_arbitrator.testing import BASE, NODE, Story
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.upcycle import Frozen, InjectionDeferred, LoadOrdered, Unfrozen
from kite_schemas.why import Reason

READY, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1"
SECOND_US = 1_000_000
MAX = 320_000


def enable(fleet: Story, *, enabled: bool = True) -> None:
    change = Change(key="guard.enabled", value=enabled)
    fleet.tell(ChangeRequested(actor="t", changes=(change,)), "policy/fleet")


def guarded() -> Story:
    """Two ready instances that hold one promoted blend; the guard is on and its first comparison is ordered."""
    fleet = Story().up()
    fleet.promote("credit", weight_ppm=500_000)
    fleet.order()
    fleet.change(STANDBY, "asleep", "waking")
    fleet.ready(STANDBY, "hot", (fleet.state.blends["risk"].resident.version,))
    enable(fleet)
    return fleet


def answer(fleet: Story, kl_micronats: int) -> None:
    """The guard measured the open comparison."""
    fleet.tell(
        Compared(
            order=fleet.open(f"pair/{READY},{STANDBY}"),
            done=True,
            first=READY,
            second=STANDBY,
            model=fleet.state.blends["risk"].resident.version,
            kl_micronats=kl_micronats,
            p99_micronats=kl_micronats,
            covered_ppm=900_000,
            positions=17,
            duration_us=1,
        )
    )


def give_up(fleet: Story) -> None:
    """The guard could not measure."""
    fleet.tell(
        ComparisonFailed(
            order=fleet.open(f"pair/{READY},{STANDBY}"),
            done=True,
            first=READY,
            second=STANDBY,
            code="timeout",
            message="",
        )
    )


def test_off_by_default_nothing_is_compared_and_nothing_freezes():
    fleet = Story().up()
    fleet.promote("credit")
    fleet.wait(120 * SECOND_US)
    assert not any(isinstance(row.data, ComparisonOrdered) for row in fleet.decided)


def test_a_blend_is_compared_when_the_guard_is_switched_on_and_then_at_every_interval():
    fleet = guarded()
    assert fleet.kinds() == ["set", "comparison_ordered"]
    answer(fleet, 0)
    assert fleet.kinds() == []
    fleet.wait(59 * SECOND_US)
    assert fleet.kinds() == []
    fleet.wait(2 * SECOND_US)
    assert fleet.kinds() == ["comparison_ordered"]


def test_a_new_version_is_compared_right_after_its_promotion():
    fleet = guarded()
    answer(fleet, 0)
    request = fleet.inject("laundering", weight_ppm=400_000)
    fleet.verified(request)
    fleet.stored(request)
    fleet.proven(request, READY)
    fleet.proven(request, STANDBY)
    assert fleet.kinds() == ["blend_promoted", "injection_closed", "comparison_ordered"]
    ((_, ordered),) = fleet.orders(ComparisonOrdered)
    assert ordered.why.reason is Reason.PROMOTED


def test_with_nobody_to_compare_with_it_is_said_once():
    fleet = Story().up()
    fleet.promote("credit")
    enable(fleet)
    assert fleet.kinds() == ["set", "held"]
    for _ in range(3):
        fleet.wait(61 * SECOND_US)
        assert fleet.kinds() == []


@pytest.mark.parametrize(("kl_micronats", "kinds"), [(MAX, []), (MAX + 1, ["frozen", "load_ordered"])])
def test_the_limit_is_crossed_from_both_sides(kl_micronats: int, kinds: list[str]):
    fleet = guarded()
    answer(fleet, kl_micronats)
    assert fleet.kinds() == kinds


def test_a_conflict_freezes_and_the_woken_standby_loads_and_proves_the_newest_version_again():
    fleet = guarded()
    answer(fleet, MAX + 1)
    (frozen,) = [row.data for row in fleet.last if isinstance(row.data, Frozen)]
    assert (frozen.severity, frozen.until_us - fleet.now_us) == (1, 15 * SECOND_US)
    (rule,) = frozen.why.rules
    assert (rule.value, rule.threshold, rule.margin, rule.fired) == (MAX + 1, MAX, -1, True)
    ((_, load),) = fleet.orders(LoadOrdered)
    assert load.instance == STANDBY


def test_while_frozen_a_verified_injection_waits_and_is_admitted_when_the_freeze_ends():
    fleet = guarded()
    answer(fleet, MAX + 1)
    request = fleet.inject("laundering", weight_ppm=400_000)
    fleet.verified(request)
    assert fleet.kinds() == ["injection_deferred"]
    (deferred,) = [row.data for row in fleet.last if isinstance(row.data, InjectionDeferred)]
    assert fleet.state.freeze is not None
    assert deferred.until_us == fleet.state.freeze.until_us
    assert fleet.state.injections[request].phase is Phase.DEFERRED
    fleet.wait(5 * SECOND_US)
    assert fleet.kinds() == []  # said once
    fleet.wait(11 * SECOND_US)
    assert fleet.kinds() == ["comparison_ordered"]
    answer(fleet, 0)
    assert fleet.kinds() == ["unfrozen"]
    fleet.wait(SECOND_US)
    assert fleet.kinds() == ["injection_admitted"]


def test_a_dry_run_is_answered_while_frozen():
    fleet = guarded()
    answer(fleet, MAX + 1)
    fleet.verified(fleet.inject("laundering", weight_ppm=400_000, dry_run=True))
    assert fleet.kinds() == ["injection_closed"]


def test_a_conflict_that_persists_renews_the_freeze_and_raises_its_severity():
    fleet = guarded()
    answer(fleet, MAX + 1)
    for severity in (2, 3):
        fleet.wait(16 * SECOND_US)
        assert "comparison_ordered" in fleet.kinds()
        answer(fleet, MAX + 1)
        (frozen,) = [row.data for row in fleet.last if isinstance(row.data, Frozen)]
        assert frozen.severity == severity
    fleet.wait(16 * SECOND_US)
    answer(fleet, 0)
    (unfrozen,) = [row.data for row in fleet.last if isinstance(row.data, Unfrozen)]
    assert unfrozen.why.reason is Reason.AGREEMENT
    assert unfrozen.lasted_us > 45 * SECOND_US


def test_a_comparison_that_failed_is_no_agreement_and_the_freeze_ends_without_a_verdict():
    fleet = guarded()
    answer(fleet, MAX + 1)
    fleet.wait(16 * SECOND_US)
    give_up(fleet)
    (unfrozen,) = [row.data for row in fleet.last if isinstance(row.data, Unfrozen)]
    assert unfrozen.why.reason is Reason.NO_VERDICT


def test_a_freeze_ends_when_the_guard_is_switched_off():
    fleet = guarded()
    answer(fleet, MAX + 1)
    enable(fleet, enabled=False)
    fleet.wait(16 * SECOND_US)
    assert fleet.kinds() == ["unfrozen"]


@given(st.lists(st.sampled_from(["agree", "fail", "silent", "lose"]), min_size=1, max_size=6))
def test_without_a_new_conflict_every_freeze_ends(fates: list[str]):
    fleet = guarded()
    answer(fleet, MAX + 1)
    for fate in fates:
        fleet.wait(16 * SECOND_US)
        comparing = any(o.target.startswith("pair/") for o in fleet.state.orders.values())
        if fate == "agree" and comparing:
            answer(fleet, 0)
        elif fate == "fail" and comparing:
            give_up(fleet)
        elif fate == "lose":
            fleet.change(STANDBY, "ready", "failed", "engine_died")
    fleet.wait(current(fleet.state).expiry.compare_us + 16 * SECOND_US)
    fleet.wait(current(fleet.state).expiry.compare_us + 16 * SECOND_US)
    assert fleet.state.freeze is None
