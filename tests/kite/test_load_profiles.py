"""Arrival profiles do what they say: means, dispersion, waves, and one stream from one seed."""

from collections.abc import Sequence
from itertools import islice
from statistics import correlation, fmean, pvariance

import pytest

from kite.clock import US_PER_S
from kite.testing.load import (
    PROFILES,
    SLOT_US,
    Bursty,
    Calm,
    Correlated,
    Diurnal,
    Profile,
    arrivals,
    injections,
    rates,
    repeats,
)
from kite.testing.load.chance import MEAN_MAX_MILLI, chance, poisson

SLOTS = 20_000  # 2 000 s
SLOTS_PER_S = US_PER_S // SLOT_US
SEEDS = (1, 2, 3)

seeded = pytest.mark.parametrize("seed", SEEDS)


def counts(profile: Profile, seed: int, *, node: int = 0, slots: int = SLOTS) -> list[int]:
    return list(islice(arrivals(profile, seed, node=node), slots))


def dispersion(values: Sequence[int]) -> float:
    return pvariance(values) / fmean(values)


@pytest.mark.parametrize("mean_milli", [0, 1, 60, 900, 2_000, 8_000, 50_000, MEAN_MAX_MILLI])
def test_poisson_has_its_mean_and_its_variance(mean_milli: int):
    rng = chance(7, "poisson")
    drawn = [poisson(rng, mean_milli) for _ in range(SLOTS)]
    mean, error = mean_milli / 1_000, (mean_milli / 1_000 / SLOTS) ** 0.5
    assert abs(fmean(drawn) - mean) <= 5 * error
    if mean_milli >= 60:
        assert dispersion(drawn) == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("mean_milli", [-1, MEAN_MAX_MILLI + 1])
def test_a_mean_out_of_bounds_is_refused(mean_milli: int):
    with pytest.raises(ValueError, match=str(mean_milli)):
        poisson(chance(1), mean_milli)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_one_seed_gives_one_stream_and_another_seed_or_node_another(profile: Profile):
    first = counts(profile, 1, slots=500)
    assert counts(profile, 1, slots=500) == first
    assert counts(profile, 2, slots=500) != first
    assert counts(profile, 1, node=1, slots=500) != first
    assert all(type(number) is int for number in first)


def test_a_stream_is_the_same_on_every_machine():
    """Integers only: these numbers hold wherever Python's generator is the one that it documents."""
    assert counts(Calm(rate_milli=20_000), 1, slots=12) == [0, 1, 0, 1, 0, 1, 3, 0, 6, 2, 0, 3]
    assert counts(Bursty(), 1, slots=12) == [0, 0, 0, 0, 0, 0, 1, 0, 2, 1, 0, 0]


@seeded
def test_calm_is_poisson(seed: int):
    found = counts(Calm(rate_milli=20_000), seed)
    assert fmean(found) * SLOTS_PER_S == pytest.approx(20, rel=0.03)
    assert dispersion(found) == pytest.approx(1, abs=0.05)


@seeded
def test_bursty_is_over_dispersed_about_the_mean_of_its_two_rates(seed: int):
    profile = Bursty(rate_milli=5_000, burst_milli=80_000, quiet_us=8 * US_PER_S, burst_us=2 * US_PER_S)
    found = counts(profile, seed, slots=5 * SLOTS)
    assert fmean(found) * SLOTS_PER_S == pytest.approx(0.8 * 5 + 0.2 * 80, rel=0.15)
    assert dispersion(found) > 3


@seeded
def test_diurnal_swings_about_its_mean_once_a_period(seed: int):
    profile = Diurnal(rate_milli=20_000, swing_ppm=800_000, period_us=SLOTS * SLOT_US)
    found = counts(profile, seed)
    quarter = SLOTS // 8
    around = [fmean(found[at - quarter : at + quarter]) * SLOTS_PER_S for at in (SLOTS // 4, SLOTS * 3 // 4)]
    assert fmean(found) * SLOTS_PER_S == pytest.approx(20, rel=0.03)
    assert around[0] > 33
    assert around[1] < 7
    turns = list(islice(rates(profile, seed), SLOTS))
    assert (turns[0], max(turns), min(turns)) == (20_000, 36_000, 4_000)


def test_bursts_are_a_nodes_own_unless_they_are_correlated():
    own, shared = Bursty(), Correlated()
    assert correlation(counts(own, 5), counts(own, 5, node=1)) < 0.2
    assert correlation(counts(shared, 5), counts(shared, 5, node=1)) > 0.7


def test_fewer_prompts_repeat_in_a_burst():
    profile = Bursty(shared_ppm=900_000, burst_shared_ppm=300_000)
    pairs = set(zip(islice(rates(profile, 1), SLOTS), islice(repeats(profile, 1), SLOTS), strict=True))
    assert pairs == {(profile.rate_milli, 900_000), (profile.burst_milli, 300_000)}
    assert set(islice(repeats(Calm(shared_ppm=500_000), 1), 100)) == {500_000}


@seeded
def test_injections_come_at_their_rate(seed: int):
    found = list(islice(injections(Calm(injections_milli=600), seed), SLOTS))
    assert sum(found) == pytest.approx(0.6 * SLOTS / SLOTS_PER_S, rel=0.12)
    rare = list(islice(injections(Calm(injections_milli=5), seed), 10 * SLOTS))
    assert 60 <= sum(rare) <= 140


@seeded
def test_correlated_injections_come_with_the_bursts_of_the_fleet(seed: int):
    profile = Correlated()
    found = list(islice(injections(profile, seed), 5 * SLOTS))
    bursting = [rate == profile.burst_milli for rate in islice(rates(profile, seed), 5 * SLOTS)]
    assert sum(found) == pytest.approx(0.6 * 5 * SLOTS / SLOTS_PER_S, rel=0.2)
    assert all(on for on, number in zip(bursting, found, strict=True) if number)
