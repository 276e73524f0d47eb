"""The one place that reads clocks. Times are integers: microseconds of UTC since the epoch, or a monotonic span."""

import time
from datetime import UTC, datetime

US_PER_S = 1_000_000
NS_PER_US = 1_000


def wall_us() -> int:
    """Return the wall clock in microseconds since the epoch, UTC."""
    return time.time_ns() // NS_PER_US


def mono_us() -> int:
    """Return a monotonic clock in microseconds; only differences mean anything."""
    return time.monotonic_ns() // NS_PER_US


def iso(us: int) -> str:
    """Format microseconds since the epoch as RFC 3339 UTC with microseconds.

    >>> iso(0)
    '1970-01-01T00:00:00.000000Z'
    """
    seconds, micros = divmod(us, US_PER_S)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{micros:06d}Z"


def parse_us(text: str) -> int:
    """Parse RFC 3339 with an explicit offset into microseconds since the epoch, without passing through floats.

    Raises ValueError without an offset: no local time zone is ever assumed.

    >>> parse_us("1970-01-01T01:00:00.000013+01:00")
    13
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        msg = f"time {text!r} has no UTC offset"
        raise ValueError(msg)
    span = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (span.days * 86_400 + span.seconds) * US_PER_S + span.microseconds
