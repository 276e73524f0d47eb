"""How far one distribution is from another: pure arithmetic on floats, with integers at the end.

Both sides are cut into the same parts: some tokens, each with its exact probability, and one part for the rest of the
vocabulary. Merging outcomes never raises a Kullback-Leibler divergence (log-sum inequality, Cover & Thomas, Elements
of Information Theory, theorem 2.7.1), so what is measured is a lower bound of the divergence over the vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kite.engine import Distribution
from kite_schemas.model import PPM

MICRO = 1_000_000  # micronats in a nat
REST_MIN = 1e-9  # probability
"""Least probability of the rest. Sums of float32 probabilities reach or pass 1 by rounding; with the rest at zero on
one side, that error would be weighed with an infinite logarithm. At this bound it is weighed with at most 21 nats."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One side of a partition: log-probabilities [n] in nats, and the logarithm of the rest's probability."""

    logprobs: tuple[float, ...]
    rest: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models over a number of positions: mean and 99th percentile of the KL, mean mass in the compared tokens."""

    kl_micronats: int
    p99_micronats: int
    covered_ppm: int
    positions: int


def partition(first: Distribution, second: Distribution, tokens: Iterable[int]) -> tuple[Parts, Parts]:
    """Cut two distributions into `tokens` and the rest. Raises KeyError for a token that a side does not list."""
    shared = tuple(tokens)
    return _parts(first, shared), _parts(second, shared)


def _parts(side: Distribution, tokens: Sequence[int]) -> Parts:
    logprobs = tuple(side.logprobs[token] for token in tokens)
    listed = math.fsum(map(math.exp, logprobs))
    rest = max(1.0 - listed, REST_MIN)
    excess = math.log(max(listed + rest, 1.0))  # above 0 only where rounding pushed the sum past 1
    return Parts(tuple(value - excess for value in logprobs), math.log(rest) - excess)


def shared_tokens(first: Distribution, second: Distribution) -> list[int]:
    """Return the tokens that both sides list, ascending: after a read of the union on both sides, the union."""
    return sorted(first.logprobs.keys() & second.logprobs.keys())


def kl_nats(first: Distribution, second: Distribution) -> float:
    """Return KL(first ‖ second) in nats over the tokens that both list and a part for the rest.

    Never negative, and finite for finite log-probabilities: a part of probability zero in `first` adds nothing, and
    the rest is never below REST_MIN. Without a shared token it is 0 and covers nothing: look at `covered` as well.
    """
    p, q = partition(first, second, shared_tokens(first, second))
    terms = (
        math.exp(mine) * (mine - theirs)
        for mine, theirs in zip((*p.logprobs, p.rest), (*q.logprobs, q.rest), strict=True)
    )
    return max(0.0, math.fsum(terms))


def covered(first: Distribution, second: Distribution) -> float:
    """Return the probability, 0 to 1, that the tokens of `kl_nats` have on the side where they have less."""
    tokens = shared_tokens(first, second)
    sides = (math.fsum(math.exp(side.logprobs[token]) for token in tokens) for side in (first, second))
    return min(1.0, *sides)


def micronats(nats: float) -> int:
    """Round nats to the nearest micronat, ties to even. Raises ValueError when not finite or negative.

    >>> micronats(0.32)
    320000
    """
    if not math.isfinite(nats) or nats < 0:
        msg = f"a divergence of {nats} nats"
        raise ValueError(msg)
    return round(nats * MICRO)


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value, correctly rounded whatever their order."""
    return math.fsum(values) / len(values)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile by nearest rank: with fewer than 100 values, the largest."""
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]


def summary(pairs: Sequence[tuple[Distribution, Distribution]]) -> Comparison:
    """Compare pair by pair, at least one; the covered mass is rounded down."""
    divergences = [kl_nats(first, second) for first, second in pairs]
    masses = [covered(first, second) for first, second in pairs]
    return Comparison(
        kl_micronats=micronats(mean(divergences)),
        p99_micronats=micronats(p99(divergences)),
        covered_ppm=int(mean(masses) * PPM),
        positions=len(pairs),
    )
