"""KL over a partition: against a float64 oracle over the whole vocabulary, and at the edges of rounding."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite.engine import Distribution
from kite.proof import Comparison, kl_nats, micronats, partition, summary
from kite.proof.divergence import REST_MIN, covered, p99

VOCAB = 40
EXACT_NATS = 1e-6  # the target against a float64 reference


def log_softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(value - top) for value in logits))
    return [value - total for value in logits]


def full_kl(p: Sequence[float], q: Sequence[float]) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def rest(logprobs: Sequence[float], tokens: set[int]) -> float:
    """Return the log-probability of everything but some tokens, from the tokens outside: nothing cancels."""
    return math.log(math.fsum(math.exp(value) for token, value in enumerate(logprobs) if token not in tokens))


def listed(logprobs: Sequence[float], tokens: set[int]) -> Distribution:
    return Distribution({token: logprobs[token] for token in tokens})


logits = st.lists(st.floats(-8, 8), min_size=VOCAB, max_size=VOCAB).map(log_softmax)
some_tokens = st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB - 1)
any_logprobs = st.dictionaries(st.integers(0, VOCAB), st.floats(-9_998, 1e-4), max_size=VOCAB).map(Distribution)


@given(logits, logits)
def test_equals_the_whole_divergence_when_every_token_is_listed(p: list[float], q: list[float]) -> None:
    every = set(range(VOCAB))
    assert kl_nats(listed(p, every), listed(q, every)) == pytest.approx(full_kl(p, q), abs=EXACT_NATS)


@given(logits, logits, some_tokens)
def test_equals_a_float64_reference_over_the_same_partition(p: list[float], q: list[float], tokens: set[int]) -> None:
    reference = full_kl([*(p[t] for t in tokens), rest(p, tokens)], [*(q[t] for t in tokens), rest(q, tokens)])
    assert kl_nats(listed(p, tokens), listed(q, tokens)) == pytest.approx(reference, abs=EXACT_NATS)


@given(logits, logits, some_tokens)
def test_is_a_lower_bound_of_the_divergence(p: list[float], q: list[float], tokens: set[int]) -> None:
    assert kl_nats(listed(p, tokens), listed(q, tokens)) <= full_kl(p, q) + EXACT_NATS


@given(logits, some_tokens)
def test_is_nothing_between_equals(p: list[float], tokens: set[int]) -> None:
    assert kl_nats(listed(p, tokens), listed(p, tokens)) == 0


@given(any_logprobs, any_logprobs)
def test_is_finite_and_never_negative_whatever_an_engine_gives(first: Distribution, second: Distribution) -> None:
    assert 0 <= kl_nats(first, second) < math.inf
    assert 0 <= covered(first, second) <= 1


def test_tokens_that_one_side_lacks_belong_to_the_rest() -> None:
    first = Distribution({1: math.log(0.5), 2: math.log(0.25)})
    second = Distribution({1: math.log(0.5), 3: math.log(0.25)})
    assert kl_nats(first, second) == 0
    assert covered(first, second) == pytest.approx(0.5)
    assert covered(Distribution({1: 0.0}), Distribution({2: 0.0})) == 0


def test_a_sum_that_passes_one_by_rounding_leaves_a_rest_of_almost_nothing() -> None:
    over = Distribution({1: math.log(0.7), 2: math.log(0.3000005)})
    under = Distribution({1: math.log(0.7), 2: math.log(0.2999995)})
    p, q = partition(over, under, [1, 2])
    assert math.exp(p.rest) == pytest.approx(REST_MIN)
    assert math.fsum(map(math.exp, (*p.logprobs, p.rest))) == pytest.approx(1)
    assert math.exp(q.rest) == pytest.approx(5e-7)
    assert micronats(kl_nats(over, under)) <= 1
    assert micronats(kl_nats(under, over)) <= 10


def test_a_token_that_a_side_does_not_list_has_no_probability_to_cut_by() -> None:
    with pytest.raises(KeyError):
        partition(Distribution({1: -1.0}), Distribution({2: -1.0}), [1])


@pytest.mark.parametrize(("nats", "expected"), [(0.0, 0), (4e-7, 0), (0.5e-6, 0), (1.5e-6, 2), (0.32, 320_000)])
def test_micronats_are_rounded_to_the_nearest(nats: float, expected: int) -> None:
    assert micronats(nats) == expected


@pytest.mark.parametrize("nats", [math.nan, math.inf, -1e-9])
def test_micronats_refuse_what_is_no_divergence(nats: float) -> None:
    with pytest.raises(ValueError, match="nats"):
        micronats(nats)


def test_the_percentile_is_a_value_that_was_seen() -> None:
    assert p99([float(value) for value in range(200)]) == 197
    assert p99([1.0, 5.0, 3.0]) == 5


def test_a_summary_is_in_integers() -> None:
    same = Distribution({1: math.log(0.9)})
    other = Distribution({1: math.log(0.5)})
    moved = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert summary([(same, same), (same, other)]) == Comparison(
        kl_micronats=round(moved / 2 * 1e6), p99_micronats=round(moved * 1e6), covered_ppm=700_000, positions=2
    )
