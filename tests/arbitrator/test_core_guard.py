"""The breaker, as the core decides it: conflicts freeze admissions, agreement ends the freeze, and it always ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite_arbitrator.records import Phase
from kite_arbitrator.state import current
from kite_arbitrator.testing import BASE, NODE, Story
from kite_schemas.arbitration import Held
from kite_schemas.guard import (
    ASKED_TOKENS_MAX,
    Compared,
    ComparisonFailed,
    ComparisonOrdered,
    ComparisonRequested,
    DistributionMeasured,
    Logprobs,
    MeasurementOrdered,
)
from kite_schemas.policy import Change, ChangeRequested, flatten
from kite_schemas.probes import Registered
from kite_schemas.upcycle import Frozen, InjectionDeferred, LoadOrdered, Unfrozen
from kite_schemas.why import Reason
from kite_schemas.yoco import Device, InstanceReady, NodeRegistered, Path, SleepMode

READY, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1"
OTHER_NODE = "n2"
NEAR, FAR = f"{NODE}-{BASE}-0", f"{OTHER_NODE}-{BASE}-0"
PAIR = f"pair/{NEAR},{FAR}"
PROBES, OTHER_PROBES = "ab" * 32, "cd" * 32
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


def apart() -> Story:
    """One ready instance on each of two nodes, both with one promoted blend; the guard is off."""
    fleet = Story().up(ready=1, standbys=0)
    pools = flatten(current(fleet.state))["fleet.pools"]
    assert isinstance(pools, list)
    assert isinstance(pools[0], dict)
    wanted = Change(key="fleet.pools", value=[*pools, {**pools[0], "node": OTHER_NODE}])
    fleet.tell(ChangeRequested(actor="t", changes=(wanted,)), "policy/fleet")
    register(fleet)
    fleet.tell(ready(FAR, fleet.open(f"instance/{FAR}")))
    fleet.promote("credit", weight_ppm=500_000)
    return fleet


def register(fleet: Story) -> None:
    """The other node starts, with nothing on it."""
    boot = f"00000000-0000-4000-8000-{fleet.state.pos:012}"
    device = Device(id="cpu0", kind="cpu", memory_bytes=1 << 34)
    fact = NodeRegistered(
        node=OTHER_NODE, boot=boot, devices=(device,), memory_bytes=1 << 34, sleep_modes=(SleepMode.PAUSED,)
    )
    fleet.tell(fact, f"node/{OTHER_NODE}")


def ready(instance: str, order: str) -> InstanceReady:
    return InstanceReady(
        order=order,
        done=True,
        instance=instance,
        node=OTHER_NODE,
        path=Path.COLD,
        pid=1,
        endpoint="http://10.0.0.2:9000",
        versions=(),
        noise_micronats=0,
        t_wake_us=1,
        t_first_token_us=2,
    )


def measured(order: str, instance: str, tokens: int = 20, second: str = FAR) -> DistributionMeasured:
    """A guard has measured its side: two probes of so many tokens."""
    position = Logprobs(tokens=tuple(range(tokens)), logprobs_micronats=(-5_000_000,) * tokens)
    return DistributionMeasured.model_validate(
        {
            "order": order,
            "done": True,
            "first": NEAR,
            "second": second,
            "instance": instance,
            "model": "risk@0123456789ab",
            "probes": PROBES,
            "positions": (position, position),
            "duration_us": 1,
        }
    )


def step(fleet: Story, instance: str, **fields: str) -> None:
    """The open measurement is done."""
    version = fleet.state.blends["risk"].resident.version
    fleet.tell(measured(fleet.open(PAIR), instance).model_copy(update={"model": version, **fields}))


def end(fleet: Story, kl_micronats: int) -> None:
    """The open comparison is done."""
    fleet.tell(
        Compared(
            order=fleet.open(PAIR),
            done=True,
            first=NEAR,
            second=FAR,
            model=fleet.state.blends["risk"].resident.version,
            kl_micronats=kl_micronats,
            p99_micronats=kl_micronats,
            covered_ppm=900_000,
            positions=17,
            duration_us=1,
        )
    )


def test_across_nodes_each_guard_measures_its_own_instance():
    """First, second, and first against second: no guard is ever told to ask an engine of the other node."""
    fleet = apart()
    request = ComparisonRequested(actor="t", first=NEAR, second=FAR)
    fleet.tell(request, f"instance/{NEAR}")
    asked = next(row.id for row in fleet.rows if row.data is request)
    ((_, one),) = fleet.orders(MeasurementOrdered)
    assert (one.node, one.side.instance, one.tokens, one.target) == (NODE, NEAR, None, PAIR)
    step(fleet, NEAR, request=asked)
    ((_, other),) = fleet.orders(MeasurementOrdered)
    assert (other.node, other.side.instance, other.side.endpoint) == (OTHER_NODE, FAR, "http://10.0.0.2:9000")
    assert (other.tokens, other.probes) == ((tuple(range(20)),) * 2, PROBES)
    step(fleet, FAR, request=asked)
    ((_, last),) = fleet.orders(ComparisonOrdered)
    assert (last.node, [side.instance for side in last.sides], last.probes) == (NODE, [NEAR, FAR], PROBES)
    assert last.measured is not None
    assert [len(position.tokens) for position in last.measured] == [20, 20]
    assert {found.request for found in (one, other, last)} == {asked}
    assert {found.why.reason for found in (one, other, last)} == {Reason.ASKED}
    end(fleet, 0)
    assert fleet.state.orders == {}


def test_across_nodes_a_conflict_freezes_and_the_comparison_is_repeated():
    fleet = apart()
    enable(fleet)
    assert fleet.kinds() == ["set", "measurement_ordered"]
    fleet.wait(SECOND_US)
    assert fleet.kinds() == []  # one comparison at a time, however many steps it takes
    step(fleet, NEAR)
    step(fleet, FAR)
    assert fleet.kinds() == ["comparison_ordered"]
    end(fleet, MAX + 1)
    assert fleet.kinds() == ["frozen"]
    fleet.wait(16 * SECOND_US)
    ((_, again),) = fleet.orders(MeasurementOrdered)
    assert again.why.reason is Reason.FREEZE_ENDING
    step(fleet, NEAR)
    step(fleet, FAR)
    end(fleet, MAX)
    assert fleet.kinds() == ["unfrozen"]
    fleet.wait(61 * SECOND_US)
    assert fleet.kinds() == ["measurement_ordered"]


def test_of_three_instances_the_two_of_one_node_are_compared():
    fleet = apart()
    pools = flatten(current(fleet.state))["fleet.pools"]
    assert isinstance(pools, list)
    assert isinstance(pools[1], dict)
    more = Change(key="fleet.pools", value=[pools[0], {**pools[1], "ready": 2}])
    fleet.tell(ChangeRequested(actor="t", changes=(more,)), "policy/fleet")
    third = f"{OTHER_NODE}-{BASE}-1"
    version = fleet.state.blends["risk"].resident.version
    fact = ready(third, fleet.open(f"instance/{third}"))
    fleet.tell(fact.model_copy(update={"versions": (version,)}))
    enable(fleet)
    ((_, ordered),) = fleet.orders(ComparisonOrdered)
    assert [side.instance for side in ordered.sides] == [FAR, third]


def test_a_woken_standby_is_held_against_an_instance_that_never_slept():
    fleet = Story().up(ready=2, standbys=1)
    fleet.promote("credit", weight_ppm=500_000)
    fleet.order()
    standby = f"{NODE}-{BASE}-2"
    fleet.change(standby, "asleep", "waking")
    fleet.ready(standby, "hot", (fleet.state.blends["risk"].resident.version,))
    enable(fleet)
    ((_, ordered),) = fleet.orders(ComparisonOrdered)
    assert [side.instance for side in ordered.sides] == [READY, standby]


def test_an_instance_that_goes_in_mid_comparison_is_no_agreement():
    fleet = apart()
    enable(fleet)
    fleet.change(FAR, "ready", "failed", "engine_died")
    step(fleet, NEAR)
    (held,) = [row.data for row in fleet.last if isinstance(row.data, Held)]
    assert (held.why.reason, FAR in held.detail) == (Reason.NOT_READY, True)
    assert fleet.state.watches["risk"].verdict_us == 0
    assert not any(isinstance(row.data, Compared) for row in fleet.rows)


@pytest.mark.parametrize("side", [NEAR, FAR])
def test_a_measurement_that_failed_ends_the_comparison_without_a_verdict(side: str):
    fleet = apart()
    enable(fleet)
    if side == FAR:
        step(fleet, NEAR)
    failed = ComparisonFailed(
        order=fleet.open(PAIR), done=True, first=NEAR, second=FAR, code="not_finite", message="NaN"
    )
    fleet.tell(failed)
    assert fleet.kinds() == []
    assert fleet.state.orders == {}
    assert fleet.state.watches["risk"].verdict_us == 0
    fleet.wait(61 * SECOND_US)
    assert fleet.kinds() == ["measurement_ordered"]


def test_a_measurement_that_nobody_waits_for_any_more_leads_nowhere():
    """Its order expired, it is told twice, or it is about another pair than its order."""
    fleet = apart()
    enable(fleet)
    first = fleet.open(PAIR)
    fleet.tell(measured(first, NEAR))
    assert fleet.kinds() == ["measurement_ordered"]
    fleet.tell(measured(first, NEAR))
    assert fleet.kinds() == []
    second = fleet.open(PAIR)
    fleet.wait(31 * SECOND_US)
    assert "order_expired" in fleet.kinds()
    fleet.tell(measured(second, FAR))
    assert fleet.kinds() == []
    fleet.wait(31 * SECOND_US)
    fleet.tell(measured(fleet.open(PAIR), NEAR, second="n3-tiny-0"))
    assert fleet.kinds() == []


def test_a_guard_that_measures_too_many_tokens_does_not_break_the_arbitrator():
    fleet = apart()
    enable(fleet)
    fleet.tell(measured(fleet.open(PAIR), NEAR, tokens=128))
    ((_, other),) = fleet.orders(MeasurementOrdered)
    assert other.tokens is not None
    assert [len(tokens) for tokens in other.tokens] == [ASKED_TOKENS_MAX] * 2


@given(st.lists(st.sampled_from(["go on", "fail", "silent", "lose", "restart"]), min_size=1, max_size=8))
def test_across_nodes_every_freeze_ends_too(fates: list[str]):
    fleet = apart()
    enable(fleet)
    step(fleet, NEAR)
    step(fleet, FAR)
    end(fleet, MAX + 1)
    for fate in fates:
        fleet.wait(16 * SECOND_US)
        (order, *_) = [*(o for o in fleet.state.orders.values() if o.target == PAIR), None]
        if fate == "go on" and order is not None:
            side = {NODE: NEAR, OTHER_NODE: FAR}[order.node]
            step(fleet, side) if order.type == MeasurementOrdered.TYPE else end(fleet, 0)
        elif fate == "fail" and order is not None:
            fleet.tell(ComparisonFailed(order=order.id, done=True, first=NEAR, second=FAR, code="x", message=""))
        elif fate == "lose":
            fleet.change(FAR, "ready", "failed", "engine_died")
        elif fate == "restart":
            register(fleet)
    for _ in range(4):  # three steps at most are open one after the other
        fleet.wait(current(fleet.state).expiry.compare_us + 16 * SECOND_US)
    assert fleet.state.freeze is None


def test_the_set_in_force_goes_with_the_order_and_the_newest_is_in_force():
    fleet = guarded()
    ((_, first),) = [(row.id, row.data) for row in fleet.decided if isinstance(row.data, ComparisonOrdered)]
    assert first.probes is None  # the shipped one
    for digest in (PROBES, OTHER_PROBES):
        fleet.tell(
            Registered(actor="t", base=BASE, digest=digest, path=f"store/probes/{digest}.json", probes=9),
            f"base/{BASE}",
        )
        assert fleet.kinds() == []
    fleet.tell(Registered(actor="t", base="other", digest=PROBES, path="x", probes=9), "base/other")
    assert fleet.state.probes == {BASE: OTHER_PROBES}
    answer(fleet, 0)
    fleet.wait(61 * SECOND_US)
    ((_, ordered),) = fleet.orders(ComparisonOrdered)
    assert ordered.probes == OTHER_PROBES


@pytest.mark.parametrize("first", [NEAR, FAR])
def test_across_nodes_an_instance_that_cannot_be_asked_is_said_at_once(first: str):
    fleet = apart()
    fleet.change(FAR, "ready", "failed", "engine_died")
    second = FAR if first == NEAR else NEAR
    fleet.tell(ComparisonRequested(actor="t", first=first, second=second), f"instance/{first}")
    (held,) = [row.data for row in fleet.last if isinstance(row.data, Held)]
    assert held.why.reason is Reason.NOT_READY
