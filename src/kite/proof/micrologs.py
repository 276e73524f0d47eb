"""Distributions as integers, in which they are recorded and travel: exact to half a millionth of a nat."""

from collections.abc import Sequence

from kite.engine import Distribution
from kite.proof.divergence import MICRO
from kite_schemas.guard import Logprobs


def micrologs(side: Distribution, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the log-probability of each token in millionths of a nat. Raises KeyError for one that is not listed."""
    return tuple(round(side.logprobs[token] * MICRO) for token in tokens)


def distribution(tokens: Sequence[int], values: Sequence[int]) -> Distribution:
    """Return tokens with their log-probabilities, given in millionths of a nat, as a distribution."""
    return Distribution({token: value / MICRO for token, value in zip(tokens, values, strict=True)})


def written(side: Distribution) -> Logprobs:
    """Return a distribution as events carry it, tokens ascending."""
    tokens = sorted(side.logprobs)
    return Logprobs(tokens=tuple(tokens), logprobs_micronats=micrologs(side, tokens))


def read(found: Logprobs) -> Distribution:
    """Undo `written`."""
    return distribution(found.tokens, found.logprobs_micronats)
