"""Paths and deadlines: which way to one more ready instance is taken, and what is said when none is fast enough."""

import pytest

from kite_arbitrator.records import Passage
from kite_arbitrator.testing import BASE, NODE, PAUSES, SECOND_US, Doing, Story, of, offer
from kite_schemas.arbitration import Held
from kite_schemas.why import Candidate, Reason
from kite_schemas.yoco import (
    EngineOffer,
    InstanceChanged,
    OrderRefused,
    Path,
    SleepMode,
    SleepOrdered,
    StartOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import State as Life

OTHER = "n2"
FIRST, STANDBY, SECOND = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1", f"{NODE}-{BASE}-2"
THERE = f"{OTHER}-{BASE}-1"
DEADLINE_US = 417_000


def up(*engines: EngineOffer, standbys: int = 1, nodes: tuple[str, ...] = (NODE,)) -> Story:
    return Story(engines=engines or (PAUSES,)).up(standbys=standbys, nodes=nodes)


def passage(fleet: Story, path: str = "hot", node: str = NODE) -> Passage:
    return fleet.state.passages[f"{node}.{BASE}/{path}"]


def woken(fleet: Story) -> WakeOrdered:
    ((_, wake),) = fleet.orders(WakeOrdered)
    return wake


def held(fleet: Story) -> Held:
    (data,) = of(fleet.last, Held)
    return data


def refuse(fleet: Story, instance: str, expected_us: int = 900_000) -> None:
    fleet.tell(
        OrderRefused(
            order=fleet.open(f"instance/{instance}"),
            done=True,
            instance=instance,
            code="deadline_unreachable",
            message="900 ms, not 417",
            path=Path.WARM,
            expected_us=expected_us,
        )
    )


# --- how an instance sleeps


def sleeps(engine: EngineOffer, wanted: str) -> Story:
    """A standby that has drained."""
    fleet = Story(engines=(engine,)).begin(standby_mode=wanted)
    fleet.ready(FIRST)
    fleet.ready(STANDBY)
    fleet.change(STANDBY, "ready", "draining")
    fleet.change(STANDBY, "draining", "draining", "drained", done=True)
    return fleet


@pytest.mark.parametrize(
    ("offered", "wanted", "chosen", "path"),
    [
        ((SleepMode.PAUSED, SleepMode.L1), "l1", SleepMode.L1, Path.WARM),
        ((SleepMode.PAUSED, SleepMode.L1), "l2", SleepMode.PAUSED, Path.HOT),
        ((SleepMode.L2, SleepMode.L1), "paused", SleepMode.L1, Path.WARM),
        ((SleepMode.KV,), "kv", SleepMode.KV, Path.HOT),
    ],
)
def test_a_standby_sleeps_as_the_pool_wants_it_or_as_its_engine_can_and_wakes_on_that_path(
    offered: tuple[SleepMode, ...], wanted: str, chosen: SleepMode, path: Path
):
    fleet = sleeps(offer(*offered), wanted)
    ((_, order),) = fleet.orders(SleepOrdered)
    assert order.mode is chosen
    reasons = {c.id: (c.chosen, c.reason) for c in order.why.candidates}
    assert reasons[chosen] == (True, Reason.STANDBY_DRAINED)
    assert {mode for mode, (_, reason) in reasons.items() if reason is Reason.MODE_UNSUPPORTED} == set(SleepMode) - set(
        offered
    )
    fleet.change(STANDBY, "draining", "asleep", "slept", done=True)
    assert fleet.state.instances[STANDBY].mode is chosen
    fleet.order()
    assert woken(fleet).path is path
    fleet.wake(STANDBY)
    assert fleet.state.instances[STANDBY].mode is None


def test_what_can_sleep_in_no_mode_stays_drained_and_that_is_said_once_with_the_reasons():
    fleet = sleeps(offer(), "paused")
    assert (held(fleet).why.reason, held(fleet).detail) == (
        Reason.MODE_UNSUPPORTED,
        f"{STANDBY} stays drained: {'; '.join(f'{mode}: not on this node' for mode in SleepMode)}",
    )
    fleet.wait(SECOND_US)
    assert fleet.kinds() == []


# --- deadlines


@pytest.mark.parametrize(("hot_us", "meets"), [(DEADLINE_US, True), (DEADLINE_US + 1, False)])
def test_an_order_is_answered_only_in_time(hot_us: int, meets: bool):
    fleet = up(offer(SleepMode.PAUSED, hot_us=hot_us))
    fleet.order()
    if meets:
        assert (woken(fleet).instance, woken(fleet).deadline_us) == (STANDBY, DEADLINE_US)
        return
    said = held(fleet)
    assert said.why.reason is Reason.DEADLINE_UNREACHABLE
    assert said.detail == f"{STANDBY} is the fastest, hot: 417001 us, not 417000"
    (rule,) = said.why.rules
    assert (rule.id, rule.value, rule.threshold, rule.margin) == ("yoco.deadline_us", hot_us, DEADLINE_US, -1)
    assert said.why.candidates == (
        Candidate(id=FIRST, chosen=False, reason=Reason.NO_STANDBY),
        Candidate(id=STANDBY, chosen=False, reason=Reason.DEADLINE_UNREACHABLE),
    )


def test_the_request_s_own_deadline_counts():
    fleet = up()
    fleet.order(deadline_us=9_999)
    assert held(fleet).why.reason is Reason.DEADLINE_UNREACHABLE
    fleet.order(deadline_us=10_000)
    assert woken(fleet).deadline_us == 10_000


def test_late_is_better_than_never_for_those_who_say_so_and_still_counts_as_missed():
    fleet = up(offer(SleepMode.PAUSED, hot_us=600_000))
    fleet.order(late=True)
    assert (woken(fleet).instance, woken(fleet).deadline_us) == (STANDBY, 600_000)
    fleet.step_us = 500_000
    fleet.wake(STANDBY)
    assert (passage(fleet).met, passage(fleet).missed) == (0, 1)


def test_a_node_that_tells_nothing_of_its_engines_is_held_against_no_deadline():
    fleet = Story().up()
    fleet.order(deadline_us=0)
    assert woken(fleet).instance == STANDBY


def test_what_was_measured_counts_more_than_what_was_offered():
    fleet = up()
    fleet.order()
    fleet.step_us = 300_000
    fleet.wake(STANDBY)
    assert passage(fleet).took_us == (599_999,)
    assert (passage(fleet).ready, passage(fleet).met, passage(fleet).missed) == (1, 0, 1)
    fleet.drain(STANDBY)
    fleet.sleep(STANDBY)
    fleet.order(instance=STANDBY)
    assert held(fleet).why.rules[0].value == 599_999


def test_the_fastest_is_taken_and_the_lowest_name_among_equals():
    fleet = up(nodes=(NODE, OTHER), standbys=1)
    fleet.order()
    assert woken(fleet).instance == STANDBY
    fleet.step_us = 50_000
    fleet.wake(STANDBY)
    assert passage(fleet).took_us == (99_999,)
    fleet.drain(STANDBY)
    fleet.sleep(STANDBY)
    fleet.order()
    assert woken(fleet).instance == THERE  # 10 ms are offered there, and nothing else was measured
    assert passage(fleet, "cold", OTHER).ready == 2


# --- counting


def test_starts_without_a_deadline_are_counted_and_miss_nothing():
    fleet = up()
    cold = passage(fleet, "cold")
    assert (cold.ready, cold.met, cold.missed, len(cold.took_us)) == (2, 0, 0, 2)


def test_a_wake_that_fails_has_missed_its_deadline_and_no_second_one_is_ordered():
    fleet = up(standbys=2)
    fleet.order()
    assert woken(fleet).instance == STANDBY
    fleet.fails(STANDBY, "wake", state=Life.ASLEEP)
    assert fleet.orders(WakeOrdered) == []
    assert fleet.state.instances[STANDBY].called is None
    assert (passage(fleet).ready, passage(fleet).missed) == (0, 1)


def test_a_late_instance_is_waited_for():
    fleet = up(standbys=2)
    fleet.order()
    fleet.wait(SECOND_US)
    assert fleet.kinds() == []
    fleet.wake(STANDBY)
    assert (passage(fleet).ready, passage(fleet).missed) == (1, 1)
    assert fleet.state.instances[STANDBY].called is None


# --- a worker that knows better


def test_what_a_worker_refuses_as_too_late_is_answered_by_the_next_one_then_held():
    fleet = up(nodes=(NODE, OTHER))
    fleet.order()
    assert woken(fleet).instance == STANDBY
    refuse(fleet, STANDBY)
    wake = woken(fleet)
    assert wake.instance == THERE
    assert {c.id: c.reason for c in wake.why.candidates}[STANDBY] is Reason.BACKED_OFF
    refuse(fleet, THERE)
    said = held(fleet)
    assert (said.request, said.why.reason) == (wake.request, Reason.DEADLINE_UNREACHABLE)
    assert said.detail == f"{THERE} was refused, warm: 900 ms, not 417"
    assert said.why.rules[0].value == 900_000
    assert fleet.state.wanted == {}


def test_any_other_refusal_was_the_answer():
    fleet = up(nodes=(NODE, OTHER))
    fleet.order()
    order = fleet.open(f"instance/{STANDBY}")
    fleet.tell(OrderRefused(order=order, done=True, instance=STANDBY, code="wrong_state", message=""))
    assert fleet.kinds() == []


# --- need


def test_need_takes_the_fastest_standby_in_time_or_not():
    fleet = up(offer(SleepMode.PAUSED, hot_us=2 * SECOND_US))
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.amend({"arbitration.concurrency_max": 4, "arbitration.hit_rate_min_ppm": None})
    fleet.windows(7 * SECOND_US)
    (wake,) = of(fleet.windows(6 * SECOND_US, {FIRST: Doing(running=9, queries=1_000, hits=700)}), WakeOrdered)
    assert (wake.instance, wake.deadline_us, wake.why.reason) == (STANDBY, 2 * SECOND_US, Reason.PRESSURE)


# --- residents


def test_a_start_names_what_has_to_be_held_before_it_is_ready():
    fleet = up(standbys=0)
    fleet.promote("credit")
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(6 * SECOND_US)
    ((_, start),) = fleet.orders(StartOrdered)
    resident = fleet.state.blends["risk"].resident
    assert start.residents == (resident,)
    fleet.ready(FIRST, versions=(resident.version,))
    assert fleet.kinds() == [], "nothing is left to load"


def test_without_the_setting_a_start_names_none():
    fleet = up(standbys=0)
    fleet.amend({"yoco.prewarm_interval_us": None})
    fleet.change(FIRST, "ready", "failed", "engine_died")
    fleet.wait(6 * SECOND_US)
    ((_, start),) = fleet.orders(StartOrdered)
    assert start.residents is None


def test_a_change_of_the_instance_is_no_arrival():
    fleet = up()
    fleet.order()
    fleet.tell(
        InstanceChanged(
            instance=STANDBY,
            node=NODE,
            from_state=Life.ASLEEP,
            to_state=Life.FAILED,
            code="engine_died",
            duration_us=1,
        )
    )
    assert (passage(fleet).ready, passage(fleet).missed) == (0, 1)
