"""What an injection did to the prefix cache of the engines: a pure fold over the windows of the node.

KV-cache pollution is the relative fall of the hit rate in the 5 s after a load against the 5 s before. The requests of
the proof that follows a load count too: they are a part of what the injection costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kite.clock import US_PER_S
from kite_schemas.model import PPM
from kite_schemas.telemetry import Window

SPAN_US = 5 * US_PER_S
"""What is compared on either side of a load."""

RING_US = 11 * US_PER_S
"""How long windows are kept: both spans and 1 s more. A load that takes longer has a shorter span before it."""

RECORDS_MAX = 128  # 11 s of windows of 100 ms are 110; it holds when a clock goes back, too
LOADS_MAX = 16  # loads whose 5 s are not over: the oldest is given up
TALLIES_MAX = 4  # injections that can still get another instance's share
TOKENS_MIN = 200
"""A span with fewer queried tokens has no hit rate."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompt tokens that were looked up in the prefix cache, and those that were found."""

    queries: int = 0
    hits: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.queries + other.queries, self.hits + other.hits)


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a window: its bounds by the wall clock, and the counts of each instance that has them."""

    from_us: int
    to_us: int
    counts: Mapping[str, Counts]


@dataclass(frozen=True, slots=True)
class Load:
    """An engine was given a version between two moments of the node's wall clock."""

    version: str
    instance: str
    began_us: int
    ended_us: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Both sides of an injection, over the instances that were loaded so far."""

    version: str
    before: Counts = Counts()
    after: Counts = Counts()


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that is remembered: windows, loads whose 5 s are not over, and injections, the newest last."""

    records: tuple[Record, ...] = ()
    loads: tuple[Load, ...] = ()
    tallies: tuple[Tally, ...] = ()


def record(window: Window) -> Record:
    """Return what is kept of a window; an instance of which queries or hits are not known is left out."""
    return Record(
        from_us=window.sampled_us - window.interval_us,
        to_us=window.sampled_us,
        counts={
            told.id: Counts(told.cache_queries, told.cache_hits)
            for told in window.instances
            if told.cache_queries is not None and told.cache_hits is not None
        },
    )


def loaded(seen: Seen, load: Load) -> Seen:
    """Remember a load until its 5 s are over."""
    return replace(seen, loads=(*seen.loads, load)[-LOADS_MAX:])


def heard(seen: Seen, latest: Record) -> Seen:
    """Add a window, forget what is older than RING_US, and settle the loads whose 5 s it ends."""
    kept = tuple(old for old in seen.records if old.to_us > latest.to_us - RING_US)
    records = (*kept, latest)[-RECORDS_MAX:]
    due = [load for load in seen.loads if load.ended_us + SPAN_US <= latest.to_us]
    tallies = seen.tallies
    for load in due:
        tallies = added(tallies, settled(records, load))
    return Seen(records, tuple(load for load in seen.loads if load not in due), tallies)


def settled(records: Sequence[Record], load: Load) -> Tally:
    """Return both sides of one load on its instance."""
    return Tally(
        version=load.version,
        before=counted(records, load.instance, load.began_us - SPAN_US, load.began_us),
        after=counted(records, load.instance, load.ended_us, load.ended_us + SPAN_US),
    )


def counted(records: Sequence[Record], instance: str, from_us: int, to_us: int) -> Counts:
    """Sum the counts of an instance over the windows that lie inside the span as a whole."""
    inside = (found for found in records if from_us <= found.from_us and found.to_us <= to_us)
    return sum((found.counts.get(instance, Counts()) for found in inside), Counts())


def added(tallies: Sequence[Tally], one: Tally) -> tuple[Tally, ...]:
    """Add an instance's share to its injection, which is the newest then."""
    former = next((tally for tally in tallies if tally.version == one.version), Tally(one.version))
    total = Tally(one.version, former.before + one.before, former.after + one.after)
    others = [tally for tally in tallies if tally.version != one.version]
    return (*others, total)[-TALLIES_MAX:]


def pollution_ppm(seen: Seen) -> int | None:
    """Return the pollution of the newest injection, None where too little happened on either side."""
    return fall_ppm(seen.tallies[-1].before, seen.tallies[-1].after) if seen.tallies else None


def fall_ppm(before: Counts, after: Counts) -> int | None:
    """Return the relative fall of the hit rate in ppm, rounded down; 0 when it rose, None below TOKENS_MIN.

    >>> fall_ppm(Counts(1_000, 800), Counts(500, 100)), fall_ppm(Counts(1_000, 800), Counts(500, 500))
    (750000, 0)
    """
    if min(before.queries, after.queries) < TOKENS_MIN:
        return None
    was, now = before.hits * after.queries, after.hits * before.queries  # both over the same product of queries
    return (was - now) * PPM // was if was > now else 0
