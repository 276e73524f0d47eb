"""Recompression by itself: the best approximation of any two factors, held against a dense SVD in double precision."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kite_upcycle.factors import Factors, Scratch, store
from kite_upcycle.recompress import recompress, residual, whole

EXCESS_MAX = 1e-4  # of the error beyond the best, relative to the product
PPM = 1e-6


def drawn(rank: int, out_features: int, in_features: int, seed: int, *, decay: float = 1.0) -> Factors:
    """Random factors whose components fade by `decay` from one to the next."""
    source = torch.Generator().manual_seed(seed)
    fading = torch.tensor([decay**index for index in range(rank)])
    a = torch.randn(rank, in_features, generator=source) / math.sqrt(in_features)
    return Factors(a, torch.randn(out_features, rank, generator=source) * 0.02 * fading)


def dense(factors: Factors) -> torch.Tensor:
    return factors.b.double() @ factors.a.double()


def best_error(exact: torch.Tensor, rank: int) -> float:
    values = np.linalg.svd(exact.numpy(), compute_uv=False)
    return float(np.sqrt(np.square(values[rank:]).sum()))


def norm_of(matrix: torch.Tensor) -> float:
    return float(matrix.square().sum().sqrt())


def check(factors: Factors, rank: int) -> float:
    """Recompress and store; hold error and residual against the oracle; return the residual."""
    exact = dense(factors)
    norm = norm_of(exact)
    made, spectrum = recompress(factors, rank, Scratch())
    told = residual([spectrum], rank)
    assert made.a.shape == (rank, factors.a.shape[1])
    assert made.b.shape == (factors.b.shape[0], rank)
    best = best_error(exact, rank)
    assert norm_of(dense(made) - exact) <= best + 1e-5 * norm
    assert told * norm == pytest.approx(best, abs=PPM * norm)
    stored = store(made, Scratch(), precise=told < 2.0**-11)
    assert stored is not None
    a, b = stored
    assert norm_of(b.double() @ a.double() - exact) <= best + EXCESS_MAX * norm
    return told


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.tuples(st.integers(2, 24), st.integers(1, 16)),
    features=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    decay=st.sampled_from([1.0, 0.7, 0.3, 0.01]),
    seed=st.integers(0, 1_000),
)
def test_it_is_the_optimum_for_any_shape(
    ranks: tuple[int, int], features: tuple[int, int], decay: float, seed: int
) -> None:
    total, rank = ranks
    check(drawn(total, *features, seed, decay=decay), rank)


@pytest.mark.parametrize("nearness", [1.0, 1e-1, 1e-3, 1e-5, 1e-7])
def test_members_that_began_from_the_same_seed_are_told_apart(nearness: float) -> None:
    """Their A are nearly equal, so that A's Gram matrix is nearly singular: every way of computing is walked."""
    one, other = drawn(8, 64, 48, 1), drawn(8, 64, 48, 2)
    near = one.a + nearness * other.a
    check(Factors(torch.cat([one.a, near]), torch.cat([one.b, other.b], dim=1)), 8)


def test_members_of_very_different_size_keep_their_share() -> None:
    one, other = drawn(8, 64, 48, 1), drawn(8, 64, 48, 2)
    factors = Factors(torch.cat([one.a * 1e6, other.a * 1e-6]), torch.cat([one.b * 1e-6, other.b * 1e6], dim=1))
    check(factors, 8)


def test_numbers_whose_squares_single_precision_does_not_hold_are_told_apart_all_the_same() -> None:
    factors = drawn(16, 64, 48, 5)
    check(Factors(factors.a * 1e24, factors.b * 1e-24), 8)
    check(Factors(factors.a * 1e-24, factors.b * 1e24), 8)


def test_opposite_members_leave_nothing() -> None:
    one = drawn(8, 64, 48, 1)
    made, spectrum = recompress(Factors(torch.cat([one.a, one.a]), torch.cat([one.b, -one.b], dim=1)), 8, Scratch())
    assert not made.a.any()
    assert not made.b.any()
    assert residual([spectrum], 8) == 0


def test_members_of_zeros_cost_nothing() -> None:
    one = drawn(8, 64, 48, 1)
    zeros = torch.zeros_like(one.a)
    assert check(Factors(torch.cat([one.a, zeros]), torch.cat([one.b, one.b], dim=1)), 8) == 0
    assert check(Factors(torch.cat([one.a, one.a.flip(0)]), torch.cat([one.b, torch.zeros_like(one.b)], 1)), 8) == 0
    made, spectrum = recompress(Factors(torch.cat([zeros, zeros]), torch.cat([one.b, one.b], dim=1)), 8, Scratch())
    assert not made.b.any()
    assert spectrum.total == 0


def test_the_energy_of_a_module_that_loses_nothing_is_its_norm() -> None:
    factors = drawn(8, 64, 48, 3)
    assert whole(factors, Scratch()).total == pytest.approx(float(dense(factors).square().sum()))


def test_the_same_factors_give_the_same_bytes() -> None:
    factors = drawn(12, 40, 40, 4)
    made, _ = recompress(factors, 4, Scratch())
    again, _ = recompress(Factors(factors.a.clone(), factors.b.clone()), 4, Scratch())
    assert torch.equal(made.a, again.a)
    assert torch.equal(made.b, again.b)
