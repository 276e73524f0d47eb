"""How fresh windows are, which nodes are heard, how many windows are lost, and what a gap in the bus forbids."""

import pytest

from kite_arbitrator.records import Feed
from kite_arbitrator.state import stale
from kite_arbitrator.testing import BASE, NODE, SECOND_US, WINDOW_US, Doing, Story, of
from kite_schemas.arbitration import GapAcknowledged, Held, Mode, ModeChanged, Transport, TransportChanged
from kite_schemas.ledger import BusGap, LeaseTaken
from kite_schemas.telemetry import NodeFound, NodeLost
from kite_schemas.upcycle import LoadFailed, RollbackOrdered
from kite_schemas.why import Reason
from kite_schemas.yoco import DrainOrdered, SleepOrdered, StartOrdered, WakeOrdered

READY, STANDBY, SECOND = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1", f"{NODE}-{BASE}-2"
HOUR_US = 3_600 * SECOND_US
FAST_US, RELIABLE_US = 33_000, 87_000
SPAN = 20
"""Windows over which loss is judged."""

LOSSES = {"arbitration.loss_max_ppm": 50_000, "arbitration.loss_windows": 3}


def feed(fleet: Story) -> Feed:
    return fleet.state.feeds[NODE]


def heard() -> Story:
    """A fleet whose windows have come on time for a second."""
    fleet = Story().up()
    fleet.windows(SECOND_US)
    return fleet


def spans(fleet: Story, number: int, *, lost: int) -> list[TransportChanged]:
    """Let so many spans pass, each of which loses windows; return the changes of the transport."""
    changes: list[TransportChanged] = []
    for place in range(number * SPAN):
        if place % SPAN < lost:
            fleet.seqs[NODE] += 1
            fleet.now_us += WINDOW_US
        else:
            changes += of(fleet.window(), TransportChanged)
    return changes


# --- lag


@pytest.mark.parametrize("offset_us", [0, 5 * HOUR_US, -5 * HOUR_US, 13_000])
@pytest.mark.parametrize(("above_us", "old"), [(FAST_US, False), (FAST_US + 1, True)])
def test_a_lag_above_the_limit_is_stale_whatever_the_clocks_say(offset_us: int, above_us: int, old: bool):
    fleet = Story().up()
    fleet.windows(SECOND_US, lag_us=4_000, offset_us=offset_us)
    fleet.window(lag_us=4_000 + above_us, offset_us=offset_us)
    assert feed(fleet).lag_us == above_us
    assert stale(fleet.state, NODE) is old
    fleet.window(lag_us=4_000, offset_us=offset_us)
    assert not stale(fleet.state, NODE)


@pytest.mark.parametrize(("above_us", "old"), [(RELIABLE_US, False), (RELIABLE_US + 1, True)])
def test_a_reliable_transport_may_take_longer(above_us: int, old: bool):
    fleet = heard()
    spans(fleet, 4, lost=3)
    assert feed(fleet).transport is Transport.RELIABLE
    fleet.window(lag_us=1_000 + above_us)
    assert stale(fleet.state, NODE) is old


def test_the_floor_is_the_least_lag_of_the_last_minute():
    fleet = heard()
    fleet.windows(49 * SECOND_US, lag_us=51_000)
    assert feed(fleet).lag_us == 50_000
    assert stale(fleet.state, NODE)
    fleet.windows(12 * SECOND_US, lag_us=51_000)  # nothing faster for a minute: that is how long it takes now
    assert feed(fleet).lag_us == 0
    assert not stale(fleet.state, NODE)


def test_the_age_of_an_input_counts_from_its_sample():
    fleet = heard()
    fleet.window(lag_us=11_000, held_us=7_000)
    fleet.now_us += 5 * SECOND_US
    (lost,) = of(fleet.wait(1), NodeLost)
    (window,) = lost.why.inputs
    assert window.age_us == 5 * SECOND_US + 1 + 10_000 + 7_000  # 10 ms above the floor


# --- silence


@pytest.mark.parametrize(("silence_us", "old"), [(2 * WINDOW_US + FAST_US, False), (2 * WINDOW_US + FAST_US + 1, True)])
def test_two_intervals_and_the_limit_without_a_window_are_stale(silence_us: int, old: bool):
    fleet = heard()
    fleet.change(READY, "ready", "failed", "engine_died")  # it is to be started again after 5 s
    fleet.windows(5 * SECOND_US - WINDOW_US)
    fleet.wait(silence_us)
    assert [held.why.reason for held in of(fleet.last, Held)] == ([Reason.STALE] if old else [])
    assert [start.instance for start in of(fleet.last, StartOrdered)] == ([] if old else [READY])


def test_a_window_that_was_held_up_makes_the_next_one_due_no_later():
    fleet = heard()
    fleet.window(at_us=fleet.now_us + 3 * SECOND_US, interval_us=3 * SECOND_US)
    assert not stale(fleet.state, NODE)
    fleet.wait(2 * WINDOW_US + FAST_US + 1)
    assert stale(fleet.state, NODE)


@pytest.mark.parametrize(("silence_us", "lost"), [(5 * SECOND_US - 1, False), (5 * SECOND_US, True)])
def test_a_node_is_lost_after_five_seconds_of_silence(silence_us: int, lost: bool):
    fleet = heard()
    fleet.window()
    fleet.wait(silence_us)
    assert [data.silence_us for data in of(fleet.last, NodeLost)] == ([silence_us] if lost else [])
    assert fleet.wait(1_000) == () or not lost  # said once


def test_a_lost_node_is_given_nothing_and_found_by_its_next_window():
    fleet = heard()
    heard_us = feed(fleet).seen_us
    fleet.wait(5 * SECOND_US)
    fleet.order()
    assert [held.why.candidates[-1].reason for held in of(fleet.last, Held)] == [Reason.NODE_LOST]
    fleet.change(READY, "ready", "failed", "engine_died")
    fleet.wait(10 * SECOND_US)
    assert fleet.kinds() == []
    fleet.window()
    (found,) = of(fleet.last, NodeFound)
    assert found.silence_us == fleet.now_us - heard_us > 15 * SECOND_US
    fleet.wait(1)
    assert fleet.kinds() == ["start_ordered"]


def test_a_lost_node_that_registers_is_found_by_its_first_window():
    fleet = heard()
    fleet.wait(5 * SECOND_US)
    fleet.register("second boot")
    assert of(fleet.last, StartOrdered) == []
    assert len(of(fleet.window(), NodeFound)) == 1
    assert len(of(fleet.wait(1), StartOrdered)) == 2


def test_a_node_that_registers_and_stays_silent_is_lost():
    fleet = heard()
    fleet.register("second boot")
    fleet.wait(5 * SECOND_US - 1)
    assert of(fleet.last, NodeLost) == []
    fleet.wait(1)
    assert len(of(fleet.last, NodeLost)) == 1


def test_a_node_that_never_sent_a_window_is_neither_stale_nor_lost():
    fleet = Story().up()
    fleet.wait(60 * SECOND_US)
    assert fleet.kinds() == []
    assert not stale(fleet.state, NODE)


def test_without_the_limit_nothing_is_stale_or_lost():
    fleet = heard()
    fleet.amend({"arbitration.sync_timeout_us": None})
    fleet.window(lag_us=5 * SECOND_US)
    fleet.wait(60 * SECOND_US)
    assert fleet.kinds() == []
    assert not stale(fleet.state, NODE)


# --- loss


@pytest.mark.parametrize(("lost", "reliable"), [(1, False), (2, True)])
def test_loss_above_its_limit_in_three_spans_in_a_row_moves_the_node_to_reliable(lost: int, reliable: bool):
    fleet = heard()  # 10 windows of its first span have come
    spans(fleet, 1, lost=0)
    changes = spans(fleet, 3, lost=lost) + spans(fleet, 1, lost=0)
    assert [change.transport for change in changes] == ([Transport.RELIABLE] if reliable else [])
    assert (feed(fleet).transport is Transport.RELIABLE) is reliable
    for change in changes:
        loss, windows = change.why.rules
        assert (loss.value, loss.threshold) == (100_000, 50_000)
        assert (windows.value, windows.threshold) == (3, 3)
        assert change.boot == fleet.state.nodes[NODE].boot


def test_two_such_spans_and_one_without_loss_do_not():
    fleet = heard()
    for _ in range(4):
        assert spans(fleet, 2, lost=5) == []
        assert spans(fleet, 1, lost=0) == []
    assert feed(fleet).transport is Transport.FAST


def test_whole_spans_that_are_missing_count_each():
    fleet = heard()
    fleet.window(lost=3 * SPAN, at_us=fleet.now_us + 4 * SECOND_US)
    assert [change.transport for change in of(fleet.last, TransportChanged)] == [Transport.RELIABLE]


def test_a_window_that_comes_late_was_not_lost():
    fleet = heard()
    for place in range(5 * SPAN):
        if place % SPAN == 5:
            fleet.window(seq=fleet.seqs[NODE])  # the one that was missing
        fleet.window(lost=1 if place % SPAN == 4 else 0)
        assert of(fleet.last, TransportChanged) == []
    assert feed(fleet).span.loss_ppm == 0


@pytest.mark.parametrize(("lossless_us", "back"), [(60 * SECOND_US - WINDOW_US, False), (60 * SECOND_US, True)])
def test_a_minute_without_loss_ends_it(lossless_us: int, back: bool):
    fleet = heard()
    spans(fleet, 4, lost=2)
    assert feed(fleet).transport is Transport.RELIABLE
    since_us = feed(fleet).span.lossless_since_us
    fleet.window(at_us=since_us + lossless_us)
    assert [change.transport for change in of(fleet.last, TransportChanged)] == ([Transport.FAST] if back else [])


def test_a_loss_while_reliable_begins_the_minute_anew():
    fleet = heard()
    spans(fleet, 4, lost=2)
    spans(fleet, 20, lost=0)
    before_us = feed(fleet).span.lossless_since_us
    spans(fleet, 2, lost=1)
    assert feed(fleet).transport is Transport.RELIABLE
    assert feed(fleet).span.lossless_since_us > before_us + 40 * SECOND_US


@pytest.mark.parametrize("key", LOSSES)
def test_without_a_limit_on_loss_the_transport_stays_fast(key: str):
    fleet = heard()
    fleet.amend({key: None})
    assert spans(fleet, 6, lost=10) == []


def test_a_reliable_node_goes_back_even_when_the_rule_was_switched_off_meanwhile():
    fleet = heard()
    spans(fleet, 4, lost=2)
    fleet.amend(dict.fromkeys(LOSSES, None))
    fleet.windows(62 * SECOND_US)
    assert feed(fleet).transport is Transport.FAST


def test_a_new_boot_sends_fast():
    fleet = heard()
    spans(fleet, 4, lost=2)
    fleet.register("second boot")
    fleet.window()
    assert feed(fleet).transport is Transport.FAST
    assert feed(fleet).span.lossy == 0


# --- a new leader


def test_what_came_while_nobody_led_was_not_lost():
    fleet = heard()
    fleet.windows(20 * SECOND_US)
    fleet.tell(LeaseTaken(epoch=2, holder="second"), "ledger/fleet")
    fleet.window(lost=400, at_us=fleet.now_us + WINDOW_US)
    assert spans(fleet, 4, lost=0) == []
    assert (feed(fleet).transport, feed(fleet).span.lossy) == (Transport.FAST, 0)


def test_a_reliable_node_stays_so_under_a_new_leader():
    fleet = heard()
    spans(fleet, 4, lost=2)
    fleet.tell(LeaseTaken(epoch=2, holder="second"), "ledger/fleet")
    fleet.window(lost=30)
    assert feed(fleet).transport is Transport.RELIABLE


def test_a_node_that_stays_silent_under_a_new_leader_is_lost_five_seconds_later():
    fleet = heard()
    fleet.now_us += 60 * SECOND_US
    fleet.tell(LeaseTaken(epoch=2, holder="second"), "ledger/fleet")
    fleet.wait(5 * SECOND_US - 1)
    assert of(fleet.last, NodeLost) == []
    fleet.wait(1)
    assert len(of(fleet.last, NodeLost)) == 1


def test_a_lost_node_is_lost_for_a_new_leader_too_until_it_is_heard():
    fleet = heard()
    fleet.wait(5 * SECOND_US)
    fleet.tell(LeaseTaken(epoch=2, holder="second"), "ledger/fleet")
    fleet.wait(20 * SECOND_US)
    assert of(fleet.decided, NodeFound) == []
    assert len(of(fleet.decided, NodeLost)) == 1
    assert len(of(fleet.window(), NodeFound)) == 1


# --- degraded after a gap


def gap(fleet: Story, first: int = 7) -> None:
    fleet.tell(BusGap(stream="KITE_EVT", first=first, last=first + 2), "ledger/fleet")


def test_a_gap_degrades_until_somebody_has_looked_at_it():
    fleet = heard()
    gap(fleet)
    assert [change.mode for change in of(fleet.last, ModeChanged)] == [Mode.DEGRADED]
    gap(fleet, 20)
    assert fleet.kinds() == []  # it is degraded already
    fleet.tell(GapAcknowledged(actor="test"), "arbitration/fleet")
    assert [(c.mode, c.why.reason) for c in of(fleet.last, ModeChanged)] == [(Mode.STATIC, Reason.GAP_ACKNOWLEDGED)]
    fleet.tell(GapAcknowledged(actor="test"), "arbitration/fleet")
    assert fleet.kinds() == []


def test_degraded_a_started_standby_is_neither_drained_nor_put_to_sleep():
    fleet = Story().begin()
    fleet.ready(READY)
    gap(fleet)
    fleet.ready(STANDBY)
    assert of(fleet.last, DrainOrdered) == []
    fleet.tell(GapAcknowledged(actor="test"), "arbitration/fleet")
    assert [drain.instance for drain in of(fleet.last, DrainOrdered)] == [STANDBY]
    fleet.change(STANDBY, "ready", "draining")
    gap(fleet)
    fleet.change(STANDBY, "draining", "draining", "drained", done=True)
    assert of(fleet.last, SleepOrdered) == []
    fleet.tell(GapAcknowledged(actor="test"), "arbitration/fleet")
    assert [sleep.instance for sleep in of(fleet.last, SleepOrdered)] == [STANDBY]


def test_degraded_nothing_is_rolled_back():
    fleet = Story().up()
    request = fleet.inject("credit", weight_ppm=500_000)
    fleet.verified(request)
    fleet.stored(request)
    gap(fleet)
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
    fleet.wait(600 * SECOND_US)
    assert of(fleet.decided, RollbackOrdered) == []
    fleet.tell(GapAcknowledged(actor="test"), "arbitration/fleet")
    assert [rollback.instance for rollback in of(fleet.last, RollbackOrdered)] == [READY]


def test_degraded_a_standby_is_still_woken():
    fleet = heard()
    gap(fleet)
    fleet.order()
    assert [wake.instance for wake in of(fleet.last, WakeOrdered)] == [STANDBY]


def test_windows_alone_bring_about_no_decision_in_a_calm_fleet():
    fleet = heard()
    assert fleet.windows(20 * SECOND_US, {READY: Doing(latencies_ms=(20, 30))}) == []
