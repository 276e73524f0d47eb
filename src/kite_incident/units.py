"""Durations, shares and sizes in words, for whoever reads them."""

from decimal import Decimal

US_PER_MS = 1_000
US_PER_S = 1_000_000
MINUTE_S = 60
HOUR_S = 3_600
PPM_PER_PERCENT = 10_000
KB = 1_000
SIZES = ("B", "kB", "MB", "GB")


def duration(us: int) -> str:
    """Format a duration for people.

    >>> duration(417_000), duration(2_340_000), duration(75_000_000), duration(7_320_000_000)
    ('417 ms', '2.3 s', '1 min 15 s', '2 h 2 min')
    """
    seconds = us // US_PER_S
    if us < US_PER_S:
        return f"{us // US_PER_MS} ms"
    if seconds < MINUTE_S:
        return f"{us / US_PER_S:.1f} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S} min {seconds % MINUTE_S} s"
    return f"{seconds // HOUR_S} h {seconds % HOUR_S // MINUTE_S} min"


def percent(ppm: int) -> str:
    """Format parts per million as percent, exactly.

    >>> percent(300_000), percent(3_217)
    ('30 %', '0.3217 %')
    """
    return f"{(Decimal(ppm) / PPM_PER_PERCENT).normalize():f} %"


def size(size_bytes: int) -> str:
    """Format a size, rounded.

    >>> size(999), size(81_000_000), size(1_936_200)
    ('999 B', '81.0 MB', '1.9 MB')
    """
    value, unit = float(size_bytes), 0
    while value >= KB and unit < len(SIZES) - 1:
        value, unit = value / KB, unit + 1
    return f"{value:.1f} {SIZES[unit]}" if unit else f"{size_bytes} {SIZES[0]}"
