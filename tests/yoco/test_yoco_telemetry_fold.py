"""Readings become windows: what is late, doubled, lost or begun anew never makes a wrong number."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite.telemetry import MalformedReading, Reading, Totals, decode, encode
from kite.telemetry.reading import latency_ms
from kite_schemas.model import INT64_MAX
from kite_schemas.telemetry import InstanceWindow, Source
from kite_yoco.telemetry.fold import COUNTERS, FRESH_US, Track, hear, silent, take
from kite_yoco.telemetry.page import read_page
from kite_yoco.telemetry.sampler import until_us

LOGGER, METRICS = Source.STAT_LOGGER, Source.METRICS
BEAT_US = 100_000

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.125
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 96.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 64.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 0.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="tiny"} 1.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="tiny"} 1.2e-1
"""


def reading(seq: int, arrivals: int | None = None, *, started_us: int = 1, sent_us: int | None = None) -> Reading:
    """Return a reading that counted arrivals; by default each is sent at its beat."""
    totals = Totals(arrivals=arrivals, running=arrivals)
    when_us = seq * BEAT_US if sent_us is None else sent_us
    return Reading(instance="a", started_us=started_us, seq=seq, sent_us=when_us, totals=totals)


def heard(readings: Sequence[Reading], source: Source = LOGGER, track: Track | None = None) -> Track:
    """Return the track after some readings."""
    found = track or Track()
    for one in readings:
        found = hear(found, source, one)
    return found


def window(track: Track, now_us: int) -> tuple[InstanceWindow, Track]:
    return take("a", track, now_us)


@pytest.mark.parametrize(
    ("story", "readings", "arrivals", "late", "missing"),
    [
        ("the first one counts from the start", [reading(1, 5)], 5, 0, 0),
        ("two in one window add up", [reading(1, 5), reading(2, 8)], 8, 0, 0),
        ("a lost one costs nothing", [reading(1, 5), reading(4, 9)], 9, 0, 2),
        ("one that comes twice counts once", [reading(1, 5), reading(1, 5)], 5, 1, 0),
        ("one that comes late counts nothing", [reading(2, 8), reading(1, 5)], 8, 1, 0),
        ("an engine that begins anew counts from 0", [reading(9, 40), reading(1, 3, started_us=2)], 43, 0, 0),
        ("its former self is late", [reading(1, 3, started_us=2), reading(9, 40)], 3, 1, 0),
        ("a counter that goes back began anew", [reading(1, 40), reading(2, 3)], 43, 0, 0),
        ("a counter that is not known stays absent", [reading(1), reading(2)], None, 0, 0),
        ("one that becomes known says nothing yet", [reading(1), reading(2, 9)], None, 0, 0),
    ],
)
def test_what_is_heard_is_told_once(
    story: str, readings: list[Reading], arrivals: int | None, late: int, missing: int
) -> None:
    track = heard(readings)
    told, after = window(track, BEAT_US)
    assert (told.arrivals, track.late, track.missing) == (arrivals, late, missing), story
    again, _ = window(after, BEAT_US)
    assert again.arrivals is None, "nothing new was heard: absent, not 0"


def test_an_idle_engine_says_zero_and_a_silent_one_says_nothing() -> None:
    told, track = window(heard([reading(1, 5)]), BEAT_US)
    assert (told.arrivals, told.running, told.source) == (5, 5, LOGGER)
    told, track = window(heard([reading(2, 5)], track=track), 2 * BEAT_US)
    assert (told.arrivals, told.running, told.age_us) == (0, 5, 0)
    edge_us = 2 * BEAT_US + FRESH_US[LOGGER]
    told, track = window(track, edge_us)
    assert (told.arrivals, told.running, told.age_us) == (None, 5, FRESH_US[LOGGER]), "one lost reading is borne"
    told, track = window(track, edge_us + 1)
    assert told == InstanceWindow(id="a"), "two are not"
    told, _ = window(heard([reading(9, 7)], track=track), 9 * BEAT_US)
    assert (told.arrivals, told.running) == (2, 7), "what was counted meanwhile is told when it speaks again"


def test_an_absurd_counter_is_cut_to_what_a_window_can_say() -> None:
    track = heard([reading(1, INT64_MAX), reading(1, INT64_MAX, started_us=2)])
    assert window(track, BEAT_US)[0].arrivals == INT64_MAX


def test_an_instance_never_heard_of_has_its_id_only() -> None:
    assert window(Track(), BEAT_US)[0] == InstanceWindow(id="a")


def test_the_age_of_the_last_step_grows_and_is_absent_before_the_first() -> None:
    never = heard([reading(1, 0)])
    assert window(never, BEAT_US)[0].engine_step_age_us is None
    totals = Totals(step_us=40_000)
    stepped = heard([Reading(instance="a", started_us=1, seq=1, sent_us=BEAT_US, totals=totals)])
    assert window(stepped, BEAT_US + 30_000)[0].engine_step_age_us == 90_000


def test_pages_take_over_when_the_logger_falls_silent_and_nothing_counts_twice() -> None:
    _, track = window(heard([reading(1, 5)]), BEAT_US)
    assert not silent(track, BEAT_US + FRESH_US[METRICS])
    late_us = BEAT_US + FRESH_US[METRICS] + 1
    assert silent(track, late_us)
    track = heard([reading(1, 7, started_us=0, sent_us=late_us)], METRICS, track)
    told, track = window(track, late_us)
    assert (told.arrivals, told.running, told.source) == (None, 7, METRICS), "the first page is where counting begins"
    track = heard([reading(2, 9, started_us=0, sent_us=late_us)], METRICS, track)
    assert window(track, late_us)[0].arrivals == 2
    track = heard([reading(30, 11, sent_us=late_us)], LOGGER, window(track, late_us)[1])
    told, track = window(track, late_us)
    assert (told.arrivals, told.source) == (None, LOGGER), "pages told of these already"
    assert window(heard([reading(31, 12)], track=track), late_us)[0].arrivals == 1


def test_a_page_of_metrics_tells_what_it_can() -> None:
    assert read_page(PAGE) == Totals(
        finished=1,
        latency_sum_us=120_000,
        cache_queries=96,
        cache_hits=64,
        preemptions=0,
        running=2,
        waiting=1,
        kv_usage_ppm=125_000,
    )
    assert read_page("vllm:num_requests_running NaN\n") == Totals()
    assert read_page("") == Totals()


@pytest.mark.parametrize(("us", "ms"), [(0, 0), (499, 0), (500, 1), (1_499, 1), (120_500, 121), (-7, 0)])
def test_latencies_are_rounded_to_the_nearest_millisecond(us: int, ms: int) -> None:
    assert latency_ms(us) == ms


@pytest.mark.parametrize(("now_us", "due_us"), [(0, 30_000), (29_999, 1), (30_000, 100_000), (99_999, 30_001)])
def test_windows_close_a_little_after_the_beat_of_the_engines(now_us: int, due_us: int) -> None:
    assert until_us(now_us) == due_us


NATURAL = st.integers(0, 10**12)
TOTALS = st.builds(Totals, **{name: st.none() | NATURAL for name in COUNTERS}, running=st.none() | NATURAL)


@given(TOTALS)
def test_a_reading_survives_its_datagram(totals: Totals) -> None:
    sent = Reading(instance="a", started_us=1, seq=2, sent_us=3, totals=totals)
    assert decode(encode(sent)) == sent


@given(st.binary(max_size=200))
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(MalformedReading):
        decode(raw)


@pytest.mark.parametrize("totals", [{"running": -1}, {"running": 1.5}, {"running": 2**63}, {"kv_usage_ppm": 1_000_001}])
def test_numbers_out_of_bounds_are_refused(totals: dict[str, object]) -> None:
    fields = {"instance": "a", "started_us": 1, "seq": 1, "sent_us": 1, "totals": totals}
    with pytest.raises(MalformedReading):
        decode(msgspec.json.encode(fields))


@st.composite
def lives(draw: st.DrawFn) -> list[list[int]]:
    """Return the increments of arrivals between the readings of each start of one engine."""
    return draw(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=12), min_size=1, max_size=3))


@given(lives(), st.data())
def test_the_windows_add_up_to_what_the_engine_counted_whatever_the_way_does(
    increments: list[list[int]], data: st.DataObject
) -> None:
    """Of each start all readings but the last may be lost, doubled or late; windows close anywhere in between."""
    track, told = Track(), 0
    for life, steps in enumerate(increments, start=1):
        totals = [sum(steps[: index + 1]) for index in range(len(steps))]
        readings = [reading(seq, count, started_us=life) for seq, count in enumerate(totals, start=1)]
        stray = data.draw(st.lists(st.sampled_from(readings), max_size=12))
        for one in [*stray, readings[-1], *data.draw(st.lists(st.sampled_from(readings), max_size=3))]:
            track = hear(track, LOGGER, one)
            if data.draw(st.booleans()):
                closed, track = window(track, 0)
                told += closed.arrivals or 0
    closed, track = window(track, 0)
    assert told + (closed.arrivals or 0) == sum(map(sum, increments))
