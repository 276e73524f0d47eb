"""Readings into windows: pure functions. Readings may come late, twice, in any order, or never."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from kite.clock import US_PER_S
from kite.telemetry import INTERVAL_US, Reading, Totals
from kite_schemas.model import INT64_MAX
from kite_schemas.telemetry import InstanceWindow, Source

SCRAPE_US = US_PER_S  # between two looks at a page of metrics
FRESH_US: Mapping[Source, int] = {
    Source.STAT_LOGGER: 5 * INTERVAL_US // 2,
    Source.METRICS: 5 * SCRAPE_US // 2,
}
"""How long a gauge is known after it was read: one reading may be lost, not two."""

COUNTERS = (
    "arrivals",
    "finished",
    "latency_sum_us",
    "latency_squares_ms2",
    "cache_queries",
    "cache_hits",
    "preemptions",
)
GAUGES = ("running", "waiting", "kv_usage_ppm")

Counts = dict[str, int]
"""Increments by counter; one that is not known is not in it."""


def _none() -> Counts:
    return {}


@dataclass(frozen=True, slots=True)
class Track:
    """What was heard of one instance: its newest reading, and the increments that no window has told yet."""

    source: Source | None = None
    newest: Reading | None = None
    owed: Counts = field(default_factory=_none)
    late: int = 0  # readings that came behind a newer one, or twice
    missing: int = 0  # readings that never came, or not in time


def hear(track: Track, source: Source, reading: Reading) -> Track:
    """Return the track with one more reading. A late one adds nothing: the newer one held all that it says."""
    newest = track.newest
    if newest is None or track.source is not source or reading.started_us > newest.started_us:
        return begun(track, source, reading)
    if (reading.started_us, reading.seq) <= (newest.started_us, newest.seq):
        return replace(track, late=track.late + 1)
    return replace(
        track,
        newest=reading,
        owed=added(track.owed, increments(newest.totals, reading.totals)),
        missing=track.missing + reading.seq - newest.seq - 1,
    )


def begun(track: Track, source: Source, reading: Reading) -> Track:
    """Return the track from the first reading of an engine, or of a source, on.

    A stat logger counts from the start of its engine: what it has counted is new, unless the other source told of it
    meanwhile. A page of metrics may be older than the one who reads it: what it shows at first is not new.
    """
    fresh = source is Source.STAT_LOGGER and track.source is not Source.METRICS
    counted = known(reading.totals) if fresh else _none()
    return replace(track, source=source, newest=reading, owed=added(track.owed, counted))


def known(totals: Totals) -> Counts:
    """Return the counters that an engine knows."""
    values = msgspec.structs.asdict(totals)
    return {name: values[name] for name in COUNTERS if values[name] is not None}


def increments(before: Totals, after: Totals) -> Counts:
    """Return what each counter grew by; one that went back began anew at 0."""
    old, new = known(before), known(after)
    return {name: grown(old[name], value) for name, value in new.items() if name in old}


def grown(before: int, after: int) -> int:
    """Return the increment of a counter."""
    return after - before if after >= before else after


def added(owed: Counts, more: Counts) -> Counts:
    """Return the sum, counter by counter, at most what a window can say."""
    names = [name for name in COUNTERS if name in owed or name in more]
    return {name: min(INT64_MAX, owed.get(name, 0) + more.get(name, 0)) for name in names}


def take(instance: str, track: Track, now_us: int) -> tuple[InstanceWindow, Track]:
    """Return the window of an instance at a monotonic time, and the track that owes nothing any more."""
    newest, source = track.newest, track.source
    if newest is None or source is None:
        return InstanceWindow(id=instance), track
    age_us = max(0, now_us - newest.sent_us)
    told = dict(track.owed)
    if age_us <= FRESH_US[source]:
        told |= gauges(newest.totals, now_us) | {"age_us": age_us}
    named = {"source": source} if told else {}
    return InstanceWindow.model_validate({"id": instance, **told, **named}), replace(track, owed={})


def gauges(totals: Totals, now_us: int) -> Counts:
    """Return how the engine stands."""
    values = msgspec.structs.asdict(totals)
    found = {name: values[name] for name in GAUGES if values[name] is not None}
    if totals.step_us is not None:
        found["engine_step_age_us"] = max(0, now_us - totals.step_us)
    return found


def silent(track: Track, now_us: int) -> bool:
    """Say whether no stat logger is heard, so that the page of metrics has to be read."""
    if track.newest is None or track.source is not Source.STAT_LOGGER:
        return True
    return now_us - track.newest.sent_us > FRESH_US[Source.METRICS]
