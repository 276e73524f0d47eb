"""What an instance did over the last seconds, from what it had counted by then: integers only."""

from bisect import bisect_right
from collections.abc import Sequence
from math import isqrt
from operator import attrgetter

from kite_arbitrator.records import Load, Sample
from kite_schemas.model import PPM
from kite_schemas.telemetry import InstanceWindow

STEADY_US = 5_000_000
"""Over what hit rate and deviation of the latency are taken."""

RECENT_US = 1_000_000
"""The span whose misses are compared with those of the STEADY_US before it."""

SAMPLES_US = STEADY_US + RECENT_US

TOKENS_MIN = 200
"""A span with fewer queried tokens has no share of misses or hits."""

at_us = attrgetter("at_us")


def counted(samples: tuple[Sample, ...], now_us: int, told: InstanceWindow, *, probed: bool) -> tuple[Sample, ...]:
    """Add a window's increments; what is older than SAMPLES_US goes, but for the newest of that.

    While KITE itself asks, latencies and what the cache does for users are not known. The jump of misses is taken from
    all prompts: it decides together with a concurrency that probes, one at a time, do not reach.

    Values that are of no use without another one are not counted when that one is not known: a page of metrics has no
    squares of latencies, which does not mean that they are 0.
    """
    finished, sum_us, squares_ms2 = told.finished, told.latency_sum_us, told.latency_squares_ms2
    if probed or finished is None or sum_us is None or squares_ms2 is None:
        finished = sum_us = squares_ms2 = 0
    queries, hits = told.cache_queries, told.cache_hits
    if queries is None or hits is None:
        queries = hits = 0
    if not (finished or queries):
        return samples
    last = samples[-1]
    added = Sample(
        now_us,
        last.finished + finished,
        last.latency_sum_us + sum_us,
        last.latency_squares_ms2 + squares_ms2,
        last.queries + queries,
        last.hits + hits,
        last.user_queries + (0 if probed else queries),
        last.user_hits + (0 if probed else hits),
    )
    old = bisect_right(samples, now_us - SAMPLES_US, key=at_us)
    return (*samples[max(0, old - 1) :], added)


def measured(samples: tuple[Sample, ...], now_us: int) -> tuple[int | None, int | None]:
    """Return hit rate (ppm) and deviation of the latency (µs) over STEADY_US; None where too little happened."""
    first, last = _until(samples, now_us - STEADY_US), samples[-1]
    queries = last.user_queries - first.user_queries
    hit_ppm = (last.user_hits - first.user_hits) * PPM // queries if queries >= TOKENS_MIN else None
    number = last.finished - first.finished
    if not number:
        return hit_ppm, None
    sum_ms = (last.latency_sum_us - first.latency_sum_us) // 1_000
    squares_ms2 = last.latency_squares_ms2 - first.latency_squares_ms2
    # The deviation is the root of (n * sum of squares - square of the sum), over n; the factor takes ms to µs in it.
    return hit_ppm, isqrt(max(0, number * squares_ms2 - sum_ms * sum_ms) * PPM) // number


def _until(samples: tuple[Sample, ...], moment_us: int) -> Sample:
    """Return what was counted up to a moment: the oldest that is known, when it is after it."""
    return samples[max(0, bisect_right(samples, moment_us, key=at_us) - 1)]


def _share(loads: Sequence[Load], from_us: int, to_us: int) -> int | None:
    """Return the share of hits between two moments over several instances, None below TOKENS_MIN."""
    spans = [(_until(load.samples, from_us), _until(load.samples, to_us)) for load in loads]
    queries = sum(last.queries - first.queries for first, last in spans)
    hits = sum(last.hits - first.hits for first, last in spans)
    return hits * PPM // queries if queries >= TOKENS_MIN else None


def missed_ppm(loads: Sequence[Load], now_us: int) -> int | None:
    """Return how much the share of cache misses of the last second exceeds that of the five before it, None unknown."""
    recent = _share(loads, now_us - RECENT_US, now_us)
    before = _share(loads, now_us - SAMPLES_US, now_us - RECENT_US)
    return None if recent is None or before is None else before - recent
