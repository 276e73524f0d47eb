"""Arrival profiles: how many requests come in each slot of 100 ms, from a seed.

Rates are per node and in thousandths of a request per second (`_milli`). Every node draws its own counts; what the rate
does is each node's own affair, too, but for correlated bursts, where it is the fleet's: all nodes have theirs at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat
from random import Random
from typing import TypeAlias

from kite.clock import US_PER_S
from kite.testing.load.chance import chance, poisson
from kite_schemas.model import PPM

SLOT_US = 100_000
"""What one count covers."""


SHARED_PPM = 970_000
"""Share of the prompts that repeat, unless a profile says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """A constant rate: counts are Poisson, their variance is their mean."""

    rate_milli: int = 20_000
    injections_milli: int = 600
    shared_ppm: int = SHARED_PPM


@dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """A rate that rises and falls once in `period_us`, by `swing_ppm` of its mean `rate_milli`; it begins at the mean.

    The wave is two parabolas, within 6 % of a sine, so that it needs integers only.
    """

    rate_milli: int = 20_000
    swing_ppm: int = 800_000
    period_us: int = 86_400 * US_PER_S
    injections_milli: int = 600
    shared_ppm: int = SHARED_PPM


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursty:
    """On and off: `burst_milli` for `burst_us` on average, then `rate_milli` for `quiet_us` on average, and so on.

    Each lasts between a half and three halves of its mean. Counts are over-dispersed: their variance is far above their
    mean. In a burst fewer prompts repeat: the share of cache misses jumps.
    """

    rate_milli: int = 5_000
    burst_milli: int = 80_000
    quiet_us: int = 8 * US_PER_S
    burst_us: int = 2 * US_PER_S
    injections_milli: int = 600
    shared_ppm: int = SHARED_PPM
    burst_shared_ppm: int = 700_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlated(Bursty):
    """Bursts of the whole fleet at once, and all injections are asked for while one lasts.

    As shipped, a burst is a little more than two synthetic instances can serve: queues grow while it lasts.
    """

    burst_milli: int = 260_000
    quiet_us: int = 16 * US_PER_S
    burst_us: int = 12 * US_PER_S


Profile: TypeAlias = Calm | Diurnal | Bursty
"""`injections_milli` is how many injections are asked for in 1 000 s, in the whole fleet, on average; `shared_ppm` the
share of the requests whose prompt was seen before."""

PROFILES: dict[str, Profile] = {
    "calm": Calm(),
    "diurnal": Diurnal(),
    "bursty": Bursty(),
    "correlated": Correlated(),
}
"""The profiles by name, with their shipped numbers."""


def arrivals(profile: Profile, seed: int, *, node: int = 0) -> Iterator[int]:
    """Yield how many requests come to a node in each slot of SLOT_US, for ever."""
    rng = chance(seed, "arrivals", node)
    for rate_milli in rates(profile, seed, node=node):
        yield poisson(rng, rate_milli * SLOT_US // US_PER_S)


def injections(profile: Profile, seed: int) -> Iterator[int]:
    """Yield how many injections are asked for in the fleet in each slot of SLOT_US, for ever."""
    rng = chance(seed, "injections")
    share_ppm = PPM
    busy = (True for _ in count())
    if isinstance(profile, Correlated):
        share_ppm = profile.burst_us * PPM // (profile.burst_us + profile.quiet_us)
        busy = _bursts(profile, _phases(profile, seed, 0))
    rate_milli = profile.injections_milli * PPM // share_ppm
    left = 0  # a rest below one thousandth of an injection is carried over to the next slot
    for on in busy:
        mean_milli, left = divmod(rate_milli * SLOT_US + left, US_PER_S) if on else (0, left)
        yield poisson(rng, mean_milli)


def rates(profile: Profile, seed: int, *, node: int = 0) -> Iterator[int]:
    """Yield the rate behind each slot's count, in thousandths of a request per second."""
    match profile:
        case Calm():
            return (profile.rate_milli for _ in count())
        case Diurnal():
            return (_wave(profile, slot * SLOT_US) for slot in count())
        case Bursty():
            bursts = _bursts(profile, _phases(profile, seed, node))
            return (profile.burst_milli if on else profile.rate_milli for on in bursts)


def repeats(profile: Profile, seed: int, *, node: int = 0) -> Iterator[int]:
    """Yield the share of repeated prompts among the requests of each slot, in parts per million."""
    if not isinstance(profile, Bursty):
        return (profile.shared_ppm for _ in count())
    bursts = _bursts(profile, _phases(profile, seed, node))
    return (profile.burst_shared_ppm if on else profile.shared_ppm for on in bursts)


def _wave(profile: Diurnal, at_us: int) -> int:
    half_us = profile.period_us // 2
    half, phase_us = divmod(at_us % profile.period_us, half_us)
    height_ppm = 4 * PPM * phase_us * (half_us - phase_us) // (half_us * half_us)
    swing_milli = profile.rate_milli * profile.swing_ppm // PPM * height_ppm // PPM
    return profile.rate_milli + (swing_milli if half == 0 else -swing_milli)


def _phases(profile: Bursty, seed: int, node: int) -> Random:
    return chance(seed, "phases", "fleet" if isinstance(profile, Correlated) else node)


def _bursts(profile: Bursty, rng: Random) -> Iterator[bool]:
    """Yield whether each slot is in a burst; where it begins follows the same shares."""
    on = rng.randrange(profile.quiet_us + profile.burst_us) < profile.burst_us
    while True:
        mean = (profile.burst_us if on else profile.quiet_us) // SLOT_US
        yield from repeat(on, rng.randint(max(1, mean // 2), max(1, mean + mean // 2)))
        on = not on
