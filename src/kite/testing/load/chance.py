"""Chance from a seed, in integers only: the same numbers on every machine."""

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from random import Random

MEAN_MAX_MILLI = 200_000
"""The largest mean that is drawn at once: the weights behind it are integers of some 400 bits."""

TABLES_MAX = 4_096
_ONE = 1 << 64  # weight of the count 0; what falls below 1 is never drawn


def chance(seed: int, *purpose: str | int) -> Random:
    """Return the generator of a seed for one purpose: what is drawn for one changes nothing for another."""
    return Random("/".join(map(str, (seed, *purpose))))  # noqa: S311 # the numbers have to be known, not secret


def poisson(rng: Random, mean_milli: int) -> int:
    """Draw from the Poisson distribution whose mean is `mean_milli` thousandths. Raises ValueError out of bounds."""
    if not 0 <= mean_milli <= MEAN_MAX_MILLI:
        msg = f"a mean of {mean_milli} thousandths; 0 to {MEAN_MAX_MILLI} are drawn"
        raise ValueError(msg)
    table = _cumulated(mean_milli)
    return bisect_right(table, rng.randrange(table[-1]))


@lru_cache(TABLES_MAX)
def _cumulated(mean_milli: int) -> tuple[int, ...]:
    """Return the summed weights of 0, 1, 2 …: each is the one before it, times the mean, over its count."""
    weights = [_ONE]
    while weights[-1] > 0:
        weights.append(weights[-1] * mean_milli // (1_000 * len(weights)))
    return tuple(accumulate(weights[:-1]))
