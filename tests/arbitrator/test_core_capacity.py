"""Capacity by need: pressure and channels wake a standby, quiet puts it to sleep, and memory bounds what is started."""

from typing import Any

import pytest
from pydantic import JsonValue

from kite_arbitrator.testing import BASE, NODE, SECOND_US, WINDOW_US, Doing, Story, of, pool
from kite_schemas.arbitration import Channel, GapAcknowledged, Held, PressureChanged
from kite_schemas.ledger import BusGap, Tick
from kite_schemas.upcycle import InjectionClosed
from kite_schemas.why import Reason
from kite_schemas.yoco import DrainOrdered, SleepOrdered, StartOrdered, WakeOrdered
from kite_schemas.yoco import State as Life

OTHER = "n2"
READY, STANDBY, SECOND = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1", f"{NODE}-{BASE}-2"
THERE = f"{OTHER}-{BASE}-1"
IDLE_US = 30 * SECOND_US
DEVICE_BYTES = 1 << 34


def calm(*, standbys: int = 1, nodes: tuple[str, ...] = (NODE,)) -> Story:
    """A fleet with a blend on the Upcycle channel and a limit on concurrency, all quiet."""
    fleet = Story().up(standbys=standbys, nodes=nodes)
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.amend({"arbitration.concurrency_max": 4})
    fleet.windows(7 * SECOND_US, nodes=nodes)
    return fleet


def press(fleet: Story, us: int = 6 * SECOND_US) -> list[WakeOrdered]:
    """Keep the pool above its limit, with more misses than before, but inside the limits of the channel."""
    return of(fleet.windows(us, {READY: Doing(running=9, queries=1_000, hits=700)}), WakeOrdered)


def pressed(**fields: Any) -> Story:
    """A fleet whose pressure has woken its standby, on the Upcycle channel: its hit rate has no limit."""
    fleet = calm(**fields)
    fleet.amend({"arbitration.hit_rate_min_ppm": None})
    assert [wake.instance for wake in press(fleet)] == [STANDBY]
    fleet.wake(STANDBY)
    return fleet


def fail(fleet: Story, instance: str) -> None:
    """A wake fails: the standby sleeps on."""
    fleet.fails(instance, "wake", "refused", state=Life.ASLEEP)


def drains(fleet: Story, us: int, **fields: Any) -> list[DrainOrdered]:
    return of(fleet.windows(us, **fields), DrainOrdered)


def holds(fleet: Story, us: int, **fields: Any) -> list[Reason]:
    """Return why capacity was held."""
    rows = [row for row in fleet.windows(us, **fields) if row.subject.startswith("capacity/")]
    return [data.why.reason for data in of(rows, Held)]


# --- wake


def test_pressure_wakes_the_lowest_standby():
    fleet = calm(standbys=2)
    fleet.amend({"arbitration.hit_rate_min_ppm": None})
    (wake,) = press(fleet)
    assert (wake.instance, wake.why.reason, wake.request) == (STANDBY, Reason.PRESSURE, None)
    assert {c.id: (c.chosen, c.reason) for c in wake.why.candidates} == {
        STANDBY: (True, Reason.PRESSURE),
        SECOND: (False, Reason.PRESSURE),
    }
    assert [resident.blend for resident in wake.residents] == ["risk"]
    fleet.wake(STANDBY)
    assert press(fleet, 20 * SECOND_US) == []  # one is enough


def test_a_blend_that_turns_to_yoco_wakes_the_lowest_standby():
    fleet = calm(standbys=2)
    (wake,) = of(fleet.windows(SECOND_US, fragmentation_ppm=400_000), WakeOrdered)
    assert (wake.instance, wake.why.reason) == (STANDBY, Reason.CHANNEL_YOCO)
    fleet.wake(STANDBY)
    assert of(fleet.windows(20 * SECOND_US, fragmentation_ppm=400_000), WakeOrdered) == []


def test_a_standby_that_somebody_asked_for_is_enough():
    fleet = calm(standbys=2)
    fleet.order()
    fleet.wake(STANDBY)
    assert press(fleet, 10 * SECOND_US) == []
    assert of(fleet.decided, PressureChanged)[-1].on


def test_a_turned_blend_needs_one_standby_in_the_whole_fleet():
    fleet = calm(nodes=(NODE, OTHER))
    wakes = of(fleet.windows(5 * SECOND_US, fragmentation_ppm=400_000, nodes=(NODE, OTHER)), WakeOrdered)
    assert [wake.instance for wake in wakes] == [STANDBY]


def test_a_standby_on_a_lost_node_is_not_enough():
    fleet = calm(nodes=(NODE, OTHER))
    fleet.windows(2 * SECOND_US, fragmentation_ppm=400_000, nodes=(NODE, OTHER))
    fleet.wake(STANDBY)
    wakes = of(fleet.windows(8 * SECOND_US, nodes=(OTHER,), fragmentation_ppm=400_000), WakeOrdered)
    assert [wake.instance for wake in wakes] == [THERE]


def test_a_pool_that_cannot_wake_one_gives_way_to_another():
    fleet = calm(nodes=(NODE, OTHER))
    fleet.order(instance=STANDBY)
    fail(fleet, STANDBY)  # it is not asked again for 5 s
    (wake,) = of(fleet.windows(SECOND_US, fragmentation_ppm=400_000, nodes=(NODE, OTHER)), WakeOrdered)
    assert wake.instance == THERE


def test_a_stale_node_gives_way_to_a_fresh_one():
    fleet = calm(nodes=(NODE, OTHER))
    wakes: list[WakeOrdered] = []
    for _ in range(20):
        fleet.window(lag_us=50_000, fragmentation_ppm=400_000)
        wakes += of(fleet.window(node=OTHER, fragmentation_ppm=400_000), WakeOrdered)
    assert [wake.instance for wake in wakes] == [THERE]


def test_without_a_standby_asleep_that_is_held_once_with_the_reason_of_each():
    fleet = calm(standbys=1)
    fleet.amend({"arbitration.hit_rate_min_ppm": None})
    press(fleet)
    fail(fleet, STANDBY)
    held = [row for row in fleet.last if row.subject.startswith("capacity/")]
    (data,) = of(held, Held)
    assert data.why.reason is Reason.NO_STANDBY
    assert [(c.id, c.chosen, c.reason) for c in data.why.candidates] == [(STANDBY, False, Reason.BACKED_OFF)]
    again = [wake.instance for wake in press(fleet, 8 * SECOND_US)]
    assert again == [STANDBY]  # when the wait was over
    assert [row for row in fleet.decided if row.subject.startswith("capacity/")] == held


def test_without_any_standby_a_turned_blend_is_held():
    fleet = calm(standbys=0)
    assert holds(fleet, 5 * SECOND_US, fragmentation_ppm=400_000) == [Reason.NO_STANDBY]
    assert holds(fleet, 5 * SECOND_US) == []
    assert holds(fleet, 5 * SECOND_US, fragmentation_ppm=400_000) == [Reason.NO_STANDBY]  # another time, said again


def test_on_stale_windows_no_standby_is_woken_but_that_is_held():
    fleet = calm()
    fleet.amend({"arbitration.hit_rate_min_ppm": None})
    press(fleet)
    fail(fleet, STANDBY)  # it could be woken again after 5 s
    crowded = {READY: Doing(running=9)}
    assert holds(fleet, 10 * SECOND_US, doing=crowded, lag_us=50_000) == [Reason.STALE]
    assert fleet.state.instances[STANDBY].retry_us < fleet.now_us
    assert fleet.state.orders == {}
    assert [wake.instance for wake in press(fleet, SECOND_US)] == [STANDBY]


# --- sleep


@pytest.mark.parametrize(("quiet_us", "sleeps"), [(IDLE_US - 1, False), (IDLE_US, True)])
def test_a_standby_sleeps_when_its_pool_was_quiet_for_long_enough(quiet_us: int, sleeps: bool):
    fleet = pressed()
    fleet.windows(6 * SECOND_US)
    off = fleet.state.pressures[f"pool/{NODE}.{BASE}"]
    assert not off.on
    while fleet.now_us + 2 * WINDOW_US < off.since_us + quiet_us:
        fleet.window()
    fleet.window(at_us=off.since_us + quiet_us - 1_000)
    fleet.tell_at(off.since_us + quiet_us, Tick(), "ledger/fleet")
    assert [(drain.instance, drain.why.reason) for drain in of(fleet.last, DrainOrdered)] == (
        [(STANDBY, Reason.IDLE)] if sleeps else []
    )
    if sleeps:
        (drain,) = of(fleet.last, DrainOrdered)
        assert (drain.why.rules[0].id, drain.why.rules[0].value) == ("arbitration.idle_us", IDLE_US)
        fleet.change(STANDBY, "ready", "draining")
        fleet.change(STANDBY, "draining", "draining", "drained", done=True)
        assert [sleep.instance for sleep in of(fleet.last, SleepOrdered)] == [STANDBY]


def test_a_channel_that_turned_back_counts_from_then():
    fleet = calm()
    fleet.windows(SECOND_US, fragmentation_ppm=400_000)
    fleet.wake(STANDBY)
    assert drains(fleet, 60 * SECOND_US, fragmentation_ppm=400_000) == []  # it is needed
    assert fleet.state.channels["risk"].channel is Channel.YOCO
    assert drains(fleet, 30 * SECOND_US) == []
    assert [drain.instance for drain in drains(fleet, 2 * SECOND_US)] == [STANDBY]


def test_a_hold_of_the_channel_does_not_keep_a_standby_awake():
    fleet = pressed()
    fleet.windows(6 * SECOND_US)
    idle = {READY: Doing(queries=0, hits=0, latencies_ms=()), STANDBY: Doing(queries=0, hits=0, latencies_ms=())}
    found: list[DrainOrdered] = []
    for _ in range(4):
        found += of(fleet.windows(7 * SECOND_US, idle), DrainOrdered)  # held
        found += of(fleet.windows(2 * SECOND_US), DrainOrdered)  # and selected again
    assert [drain.instance for drain in found] == [STANDBY]


def test_a_standby_that_somebody_asked_for_stays():
    fleet = calm()
    fleet.order()
    fleet.wake(STANDBY)
    assert drains(fleet, 100 * SECOND_US) == []
    assert fleet.state.instances[STANDBY].state is Life.READY


def test_a_standby_that_an_open_injection_counts_on_is_not_drained():
    fleet = pressed()
    fleet.windows(20 * SECOND_US)
    request = fleet.inject("laundering", blend="other", weight_ppm=400_000)
    fleet.verified(request)
    assert STANDBY in fleet.state.injections[request].targets
    assert drains(fleet, 60 * SECOND_US) == []
    found = fleet.windows(70 * SECOND_US)  # the blending expires
    assert [data.request for data in of(found, InjectionClosed)] == [request]
    assert [drain.instance for drain in of(found, DrainOrdered)] == [STANDBY]


def test_without_the_limit_it_stays_awake():
    fleet = pressed()
    fleet.amend({"arbitration.idle_us": None})
    assert drains(fleet, 100 * SECOND_US) == []


def test_on_stale_windows_nothing_is_put_to_sleep_but_that_is_held_once():
    fleet = pressed()
    fleet.windows(30 * SECOND_US)
    rows = fleet.windows(20 * SECOND_US, lag_us=50_000)
    assert of(rows, DrainOrdered) == []
    assert [data.why.reason for row in rows if row.subject.startswith("capacity/") for data in of([row], Held)] == [
        Reason.STALE
    ]
    assert [drain.instance for drain in drains(fleet, 2 * SECOND_US)] == [STANDBY]
    assert [hold for hold in fleet.state.holds if hold.startswith("capacity/")] == []


def test_degraded_nothing_is_put_to_sleep_until_the_gap_is_acknowledged():
    fleet = pressed()
    fleet.tell(BusGap(stream="KITE_EVT", first=1, last=1), "ledger/fleet")
    assert holds(fleet, 60 * SECOND_US) == [Reason.DEGRADED]
    fleet.tell(GapAcknowledged(actor="test"), "arbitration/fleet")
    assert [drain.instance for drain in drains(fleet, 2 * SECOND_US)] == [STANDBY]


# --- memory


def grown(settings: dict[str, JsonValue], ppm: int | None = None) -> tuple[list[str], list[Reason]]:
    """Want one instance more than the two devices have; return what is started, and why not."""
    fleet = Story().up(ready=2, standbys=0)
    if ppm is not None:
        fleet.windows(SECOND_US, fragmentation_ppm=ppm)
    rows = fleet.amend({"fleet.pools": [pool(NODE, 3, 0)], **settings})
    return [start.instance for start in of(rows, StartOrdered)], [data.why.reason for data in of(rows, Held)]


HALF = DEVICE_BYTES // 2


@pytest.mark.parametrize("ppm", [None, 0, 250_000])
def test_an_instance_is_started_only_where_its_memory_is_free_in_one_piece(ppm: int | None):
    share = 1_000_000 - (ppm or 0)
    fits = DEVICE_BYTES * share // (1_000_000 + share)  # beside one that takes as much
    assert grown({"yoco.reserve_bytes": fits - 1}, ppm) == ([SECOND], [])
    assert grown({"yoco.reserve_bytes": fits + 1}, ppm) == ([], [Reason.MEMORY])


def test_without_a_reserve_memory_is_no_rule():
    assert grown({"yoco.reserve_bytes": None}, 999_999) == ([SECOND], [])


def test_what_is_held_for_memory_is_started_when_it_fits():
    fleet = Story().up(ready=2, standbys=0)
    fleet.amend({"fleet.pools": [pool(NODE, 3, 0)], "yoco.reserve_bytes": HALF + 1})
    (held,) = of(fleet.last, Held)
    (rule,) = held.why.rules
    assert (rule.id, rule.value, rule.threshold, rule.margin) == ("yoco.reserve_bytes", HALF + 1, HALF - 1, -2)
    fleet.wait(SECOND_US)
    assert fleet.kinds() == []  # said once
    fleet.amend({"yoco.reserve_bytes": HALF})
    assert [start.instance for start in of(fleet.last, StartOrdered)] == [SECOND]
    assert not fleet.state.holds
