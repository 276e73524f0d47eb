"""KV-cache pollution: windows of 100 ms before and after a load, crossed from both sides."""

from fractions import Fraction

import pytest

from kite_schemas.model import PPM
from kite_schemas.telemetry import InstanceWindow, Window
from kite_upcycle import cache
from kite_upcycle.cache import RECORDS_MAX, RING_US, SPAN_US, TOKENS_MIN, Counts, Load, Record, Seen

STEP_US = 100_000
BEGAN_US, ENDED_US = 100_000_000, 100_040_000
VERSION, FORMER = "risk@aaaaaaaaaaaa", "risk@bbbbbbbbbbbb"
LOAD = Load(VERSION, "a", BEGAN_US, ENDED_US)
WINDOWS = 49  # that lie inside 5 s as a whole, when the load is out of step with them


def record(to_us: int, **counts: Counts) -> Record:
    return Record(to_us - STEP_US, to_us, counts)


def told(seen: Seen, from_us: int, to_us: int, **counts: Counts) -> Seen:
    """Let windows come, one every 100 ms, with the same counts in each."""
    for end_us in range(from_us + STEP_US, to_us + 1, STEP_US):
        seen = cache.heard(seen, record(end_us, **counts))
    return seen


def episode(before: Counts, after: Counts, *, load: Load = LOAD, instance: str = "a") -> Seen:
    """Let 6 s pass on either side of a load, in windows that are out of step with it by 30 ms."""
    start_us = load.began_us - 6_000_000 - 30_000
    seen = told(Seen(), start_us, load.began_us + 70_000, **{instance: before})
    return told(cache.loaded(seen, load), load.began_us + 70_000, load.ended_us + 6_000_000, **{instance: after})


def test_a_fall_of_the_hit_rate_is_pollution_and_a_rise_is_none() -> None:
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(100, 20))) == 750_000
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(100, 79))) == 12_500
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(100, 80))) == 0
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(100, 81))) == 0
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(900, 0))) == PPM
    assert cache.pollution_ppm(episode(Counts(100, 0), Counts(100, 0))) == 0


def test_only_windows_inside_the_spans_count() -> None:
    (tally,) = episode(Counts(10, 8), Counts(100, 30)).tallies
    assert (tally.before, tally.after) == (Counts(10 * WINDOWS, 8 * WINDOWS), Counts(100 * WINDOWS, 30 * WINDOWS))


def test_without_enough_tokens_on_either_side_nothing_is_known() -> None:
    few, enough = Counts(TOKENS_MIN - 1, 100), Counts(TOKENS_MIN, 100)
    assert cache.fall_ppm(enough, enough) == 0
    assert cache.fall_ppm(few, enough) is None
    assert cache.fall_ppm(enough, few) is None
    assert cache.pollution_ppm(Seen()) is None
    below, at = Counts(TOKENS_MIN // WINDOWS, 1), Counts(TOKENS_MIN // WINDOWS + 1, 1)
    assert cache.pollution_ppm(episode(below, Counts(100, 1))) is None
    assert cache.pollution_ppm(episode(at, Counts(100, 1))) == 950_000
    assert cache.pollution_ppm(episode(Counts(100, 1), below)) is None
    assert cache.pollution_ppm(episode(Counts(100, 90), at)) == 777_777


def test_what_other_instances_do_is_not_the_loads() -> None:
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(100, 20), instance="b")) is None


@pytest.mark.parametrize("before", [Counts(200, 1), Counts(4_096, 4_095), Counts(10**12, 3)])
@pytest.mark.parametrize("after", [Counts(200, 0), Counts(777, 776), Counts(10**12, 1)])
def test_the_fall_is_the_exact_one_rounded_down(before: Counts, after: Counts) -> None:
    was, now = Fraction(before.hits, before.queries), Fraction(after.hits, after.queries)
    assert cache.fall_ppm(before, after) == max(0, int((was - now) / was * PPM))


def test_the_instances_of_one_injection_are_summed() -> None:
    """The second instance gets the version while the first one's 5 s run."""
    second = Load(VERSION, "b", BEGAN_US + 1_000_000, ENDED_US + 1_000_000)
    before, after = {"a": Counts(10, 10), "b": Counts(10, 6)}, {"a": Counts(10, 5), "b": Counts(10, 3)}
    seen = told(Seen(), BEGAN_US - 6_000_000, BEGAN_US, **before)
    seen = told(cache.loaded(seen, LOAD), BEGAN_US, BEGAN_US + 1_000_000, **before)
    seen = told(cache.loaded(seen, second), BEGAN_US + 1_000_000, ENDED_US + SPAN_US + 500_000, **after)
    (first_alone,) = seen.tallies
    assert first_alone.before == Counts(500, 500)
    seen = told(seen, BEGAN_US + SPAN_US + 500_000, ENDED_US + SPAN_US + 1_500_000, **after)
    (both,) = seen.tallies
    assert (both.before, both.after) == (Counts(1_000, 800), first_alone.after + Counts(10 * WINDOWS, 3 * WINDOWS))


def test_the_report_is_about_the_newest_injection_known_or_not() -> None:
    former = Load(FORMER, "a", BEGAN_US, ENDED_US)
    seen = episode(Counts(100, 80), Counts(100, 40), load=former)
    now_us = ENDED_US + 6_000_000
    seen = told(cache.loaded(seen, Load(VERSION, "a", now_us, now_us)), now_us, now_us + SPAN_US - STEP_US)
    assert cache.pollution_ppm(seen) == 500_000  # its 5 s are not over
    assert cache.pollution_ppm(told(seen, now_us + SPAN_US - STEP_US, now_us + SPAN_US)) is None


def test_a_load_of_seconds_has_less_before_it() -> None:
    """The ring holds 11 s: 2 s of them are left when the load took 4."""
    slow = Load(VERSION, "a", BEGAN_US, BEGAN_US + 4_000_000)
    (tally,) = episode(Counts(100, 80), Counts(100, 40), load=slow).tallies
    assert 1_900 <= tally.before.queries <= 2_000
    endless = Load(VERSION, "a", BEGAN_US, BEGAN_US + 7_000_000)
    assert cache.pollution_ppm(episode(Counts(100, 80), Counts(100, 40), load=endless)) is None


def test_lost_windows_only_make_the_spans_thinner() -> None:
    seen = Seen()
    for number, end_us in enumerate(range(BEGAN_US - 5_000_000, ENDED_US + 6_000_000, STEP_US)):
        if number == 60:
            seen = cache.loaded(seen, LOAD)
        if number % 3:
            counts = Counts(100, 80) if end_us <= BEGAN_US else Counts(100, 40)
            seen = cache.heard(seen, record(end_us, a=counts))
    assert cache.pollution_ppm(seen) == 500_000


def test_memory_is_bounded_whatever_comes() -> None:
    seen = told(Seen(), 0, 100_000_000, a=Counts(1, 1))
    assert len(seen.records) == RING_US // STEP_US
    for back in range(1_000):  # a clock that runs backwards
        seen = cache.heard(seen, record(100_000_000 - back * STEP_US))
        seen = cache.loaded(seen, Load(f"v{back}", "a", 10**15, 10**15))
    assert (len(seen.records), len(seen.loads)) == (RECORDS_MAX, cache.LOADS_MAX)
    seen = cache.heard(seen, record(10**16))
    assert (len(seen.records), len(seen.loads), len(seen.tallies)) == (1, 0, cache.TALLIES_MAX)


def test_a_record_holds_what_a_window_tells() -> None:
    window = Window(
        node="n1",
        boot="00000000-0000-4000-8000-000000000001",
        seq=1,
        interval_us=STEP_US,
        sampled_us=BEGAN_US,
        emitted_us=BEGAN_US + 1,
        instances=(
            InstanceWindow(id="a", cache_queries=9, cache_hits=4),
            InstanceWindow(id="silent"),
            InstanceWindow(id="half", cache_queries=9),
        ),
    )
    assert cache.record(window) == Record(BEGAN_US - STEP_US, BEGAN_US, {"a": Counts(9, 4)})
