"""The channel of a blend: the loaded version while memory, cache and latency are inside limits, else the standby."""

from typing import Any

import pytest

from kite_arbitrator.testing import BASE, IDLE, NODE, SECOND_US, Doing, Story, Told, of
from kite_schemas.arbitration import Channel, ChannelSelected, Held
from kite_schemas.why import Reason

OTHER = "n2"
READY, SECOND, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1", f"{NODE}-{BASE}-1"
THERE = f"{OTHER}-{BASE}-0"
LIMITS = ("arbitration.fragmentation_max_ppm", "arbitration.hit_rate_min_ppm", "arbitration.latency_sigma_max_us")
TOKENS = 1_000_000


def blended(*, ready: int = 1, standbys: int = 1, nodes: tuple[str, ...] = (NODE,)) -> Story:
    """A fleet that serves one blend on the Upcycle channel, all inside the limits."""
    fleet = Story().up(ready=ready, standbys=standbys, nodes=nodes)
    fleet.promote("credit", weight_ppm=500_000)
    fleet.rest()
    fleet.windows(6 * SECOND_US, nodes=nodes)
    assert channel(fleet) is Channel.UPCYCLE
    assert not fleet.state.holds
    return fleet


def channel(fleet: Story) -> Channel:
    return fleet.state.channels["risk"].channel


def selected(fleet: Story, us: int, told: Told | None = None, **fields: Any) -> list[Channel]:
    return [data.channel for data in of(fleet.windows(us, told, **fields), ChannelSelected)]


def held(fleet: Story, us: int, told: Told | None = None, **fields: Any) -> list[Reason]:
    """Return why the channel was held."""
    rows = [row for row in fleet.windows(us, told, **fields) if row.subject == "channel/risk"]
    return [data.why.reason for data in of(rows, Held)]


def test_the_first_channel_of_a_blend_is_upcycle():
    fleet = Story().up()
    fleet.promote("credit")
    (first,) = of(fleet.last, ChannelSelected)
    assert (first.blend, first.channel, first.why.reason) == ("risk", Channel.UPCYCLE, Reason.INITIAL)


# --- each limit, from both sides


@pytest.mark.parametrize(("ppm", "found"), [(350_000, []), (350_001, [Channel.YOCO])])
def test_fragmentation_at_or_below_its_limit_keeps_the_channel(ppm: int, found: list[Channel]):
    fleet = blended()
    assert selected(fleet, 2 * SECOND_US, fragmentation_ppm=ppm) == found
    assert selected(fleet, 2 * SECOND_US) == ([Channel.UPCYCLE] if found else [])


@pytest.mark.parametrize(("hits", "found"), [(820_000, []), (819_999, [Channel.YOCO])])
def test_a_hit_rate_at_or_above_its_limit_keeps_the_channel(hits: int, found: list[Channel]):
    fleet = blended()
    fleet.windows(6 * SECOND_US, {READY: Doing(queries=TOKENS, hits=820_000)})
    assert selected(fleet, 6 * SECOND_US, {READY: Doing(queries=TOKENS, hits=hits)}) == found


@pytest.mark.parametrize(("latencies_ms", "found"), [((88, 112), []), ((87, 112), [Channel.YOCO])])
def test_a_deviation_of_the_latency_at_or_below_its_limit_keeps_the_channel(
    latencies_ms: tuple[int, ...], found: list[Channel]
):
    fleet = blended()
    assert selected(fleet, 6 * SECOND_US, {READY: Doing(latencies_ms=latencies_ms)}) == found


def test_the_decision_has_the_values_and_margins_of_all_three_limits():
    fleet = blended()
    (data,) = of(fleet.windows(SECOND_US, fragmentation_ppm=400_000), ChannelSelected)
    assert [(rule.id, rule.value, rule.margin, rule.fired) for rule in data.why.rules] == [
        ("arbitration.fragmentation_max_ppm", 400_000, -50_000, True),
        ("arbitration.hit_rate_min_ppm", 950_000, 130_000, False),
        ("arbitration.latency_sigma_max_us", 0, 12_000, False),
    ]
    assert [age.id for age in data.why.inputs] == [f"window/{NODE}"]
    assert data.why.reason is Reason.LIMIT_CROSSED


BAD: dict[str, tuple[Doing, int]] = {
    LIMITS[0]: (Doing(), 900_000),
    LIMITS[1]: (Doing(hits=0), 100_000),
    LIMITS[2]: (Doing(latencies_ms=(1, 900)), 100_000),
}
"""What an instance does, and the fragmentation, that cross one limit only."""


@pytest.mark.parametrize("key", LIMITS)
def test_a_limit_that_is_unset_is_no_rule_and_the_others_are(key: str):
    fleet = blended()
    fleet.amend({key: None})
    doing, ppm = BAD[key]
    assert selected(fleet, 6 * SECOND_US, {READY: doing}, fragmentation_ppm=ppm) == []
    others = [other for other in LIMITS if other != key]
    for other in others:
        doing, ppm = BAD[other]
        assert selected(fleet, 6 * SECOND_US, {READY: doing}, fragmentation_ppm=ppm) == [Channel.YOCO]
        assert selected(fleet, 7 * SECOND_US) == [Channel.UPCYCLE]


def test_without_any_limit_the_channel_is_upcycle():
    fleet = blended()
    fleet.windows(SECOND_US, fragmentation_ppm=900_000)
    assert channel(fleet) is Channel.YOCO
    fleet.amend(dict.fromkeys(LIMITS, None))
    (back,) = of(fleet.windows(SECOND_US, fragmentation_ppm=900_000), ChannelSelected)
    assert (back.channel, back.why.reason) == (Channel.UPCYCLE, Reason.POLICY_CHANGED)
    assert selected(fleet, 5 * SECOND_US, fragmentation_ppm=900_000) == []


# --- whose values count


def test_the_worst_of_the_instances_that_hold_the_version_counts():
    fleet = blended(ready=2)
    assert selected(fleet, 6 * SECOND_US, {SECOND: Doing(hits=80)}) == [Channel.YOCO]
    assert selected(fleet, 7 * SECOND_US) == [Channel.UPCYCLE]


def test_instances_without_the_version_do_not_count():
    fleet = blended(ready=2)
    fleet.change(SECOND, "ready", "failed", "engine_died")
    fleet.windows(6 * SECOND_US)
    fleet.change(SECOND, "failed", "starting")
    fleet.ready(SECOND)  # its repair is ordered, and takes time
    assert "load_ordered" in fleet.kinds()
    bad = {SECOND: Doing(hits=0, latencies_ms=(1, 900)), f"{NODE}-{BASE}-2": Doing(hits=0)}
    assert selected(fleet, 6 * SECOND_US, bad) == []
    assert channel(fleet) is Channel.UPCYCLE


def test_a_woken_standby_counts_too():
    fleet = blended()
    fleet.order()
    fleet.wake(STANDBY)
    fleet.rest()
    fleet.windows(6 * SECOND_US)
    assert selected(fleet, 6 * SECOND_US, {STANDBY: Doing(hits=0)}) == [Channel.YOCO]


# --- stale and absent inputs


def test_with_an_absent_input_the_last_channel_is_held_and_that_is_said_once():
    fleet = blended()
    since_us = fleet.state.channels["risk"].since_us
    assert held(fleet, 20 * SECOND_US, {READY: IDLE}) == [Reason.INPUT_ABSENT]
    assert selected(fleet, 6 * SECOND_US) == [Channel.UPCYCLE]  # the hold is over: that is said too
    assert fleet.state.channels["risk"].since_us == since_us
    assert held(fleet, 20 * SECOND_US, {READY: IDLE}) == [Reason.INPUT_ABSENT]


def test_the_yoco_channel_is_held_as_well():
    fleet = blended()
    fleet.windows(6 * SECOND_US, {READY: IDLE}, fragmentation_ppm=900_000)
    assert held(fleet, 20 * SECOND_US, {READY: IDLE}) == [Reason.INPUT_ABSENT]
    assert channel(fleet) is Channel.YOCO


def test_one_value_outside_is_enough_whatever_is_absent():
    fleet = blended()
    fleet.windows(10 * SECOND_US, {READY: IDLE})
    assert selected(fleet, SECOND_US, {READY: IDLE}, fragmentation_ppm=900_000) == [Channel.YOCO]


def test_with_stale_windows_the_last_channel_is_held_and_that_is_said_once():
    fleet = blended()
    assert held(fleet, 20 * SECOND_US, fragmentation_ppm=900_000, lag_us=50_000) == [Reason.STALE]
    assert channel(fleet) is Channel.UPCYCLE
    assert selected(fleet, SECOND_US, fragmentation_ppm=900_000) == [Channel.YOCO]


def test_silence_holds_it_too():
    fleet = blended()
    fleet.wait(SECOND_US)
    assert [data.why.reason for data in of(fleet.last, Held)] == [Reason.STALE]
    fleet.wait(10 * SECOND_US)
    assert of(fleet.last, Held) == []
    assert channel(fleet) is Channel.UPCYCLE


def test_a_stale_node_among_others_holds_it_until_the_node_is_lost():
    fleet = blended(nodes=(NODE, OTHER))
    fleet.windows(SECOND_US, nodes=(NODE, OTHER))
    assert held(fleet, 4 * SECOND_US) == [Reason.STALE]  # the other node may be outside, or not
    assert selected(fleet, 3 * SECOND_US) == [Channel.UPCYCLE]  # lost: nothing is sent there any more
    assert selected(fleet, SECOND_US, fragmentation_ppm=900_000) == [Channel.YOCO]


def test_what_a_fresh_node_tells_outside_its_limits_counts_while_another_is_stale():
    fleet = blended(nodes=(NODE, OTHER))
    assert selected(fleet, 2 * SECOND_US, {READY: Doing(hits=0)}) == [Channel.YOCO]
    assert fleet.state.feeds[OTHER].lost is False


def test_a_late_crossing_of_a_node_that_was_stale_is_taken_when_it_is_fresh_again():
    fleet = blended(nodes=(NODE, OTHER))
    fleet.windows(3 * SECOND_US)
    bad = {THERE: Doing(hits=0)}
    assert selected(fleet, 2 * SECOND_US, bad, nodes=(NODE, OTHER)) == [Channel.YOCO]


def test_nothing_is_written_again_while_nothing_changes():
    fleet = blended()
    assert fleet.windows(30 * SECOND_US) == []
