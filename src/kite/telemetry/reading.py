"""One reading of an engine, as it travels: JSON in one datagram, cumulative, so that a lost one costs nothing."""

from typing import Annotated

import msgspec

READING_MAX_BYTES = 2_048  # measured 300 to 450
INT64_MAX = 2**63 - 1
PPM = 1_000_000
US_PER_MS = 1_000

Natural = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Share = Annotated[int, msgspec.Meta(ge=0, le=PPM)]


class MalformedReading(ValueError):
    """A datagram that is no reading."""


class Totals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine knows of itself: counts and sums since it started, and how it stands now. None is not known.

    Latencies are rounded to milliseconds per request, in both sums. `step_us` is the monotonic time of the last step.
    """

    arrivals: Natural | None = None
    finished: Natural | None = None
    latency_sum_us: Natural | None = None
    latency_squares_ms2: Natural | None = None
    cache_queries: Natural | None = None
    cache_hits: Natural | None = None
    preemptions: Natural | None = None
    running: Natural | None = None
    waiting: Natural | None = None
    kv_usage_ppm: Share | None = None
    step_us: Natural | None = None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Totals with who sent them and when: `started_us` tells an engine from its successor, `seq` counts from 1.

    Times are monotonic, which is one clock for all processes of a machine.
    """

    instance: str
    started_us: Natural
    seq: Natural
    sent_us: Natural
    totals: Totals


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Reading)


def encode(reading: Reading) -> bytes:
    """Return the reading as one datagram."""
    return _encoder.encode(reading)


def decode(raw: bytes) -> Reading:
    """Read a datagram. Raises MalformedReading."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedReading(str(error)) from error


def latency_ms(latency_us: int) -> int:
    """Return a latency in whole milliseconds, the nearest; a clock that went back makes 0."""
    return max(0, latency_us + US_PER_MS // 2) // US_PER_MS
