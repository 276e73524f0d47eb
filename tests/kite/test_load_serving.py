"""The counters of a synthetic instance agree with one another, and with what was put in."""

from math import isqrt

import pytest

from kite.clock import US_PER_S
from kite.testing.load import SLOT_US, Calm, arrivals
from kite.testing.load.chance import chance
from kite.testing.load.serving import (
    BLOCK_TOKENS,
    PROMPT_TOKENS,
    RUNNING_MAX,
    SERVICE_SPREAD_US,
    SERVICE_US,
    TOKEN_US,
    WAITING_MAX,
    Serving,
)
from kite_schemas.model import PPM
from kite_schemas.telemetry import InstanceWindow

LIMIT_SIGMA_US = 12_000


def served(rate_milli: int, *, seconds: int = 60, shared_ppm: int = 970_000) -> list[InstanceWindow]:
    """Let requests come at a rate and return all windows."""
    serving = Serving("i", chance(3, "serving"))
    found: list[InstanceWindow] = []
    counts = arrivals(Calm(rate_milli=rate_milli), 3)
    for slot in range(seconds * US_PER_S // SLOT_US):
        number = next(counts)
        for position in range(number):
            serving.offer(slot * SLOT_US + position * SLOT_US // number, shared_ppm)
        found.append(serving.window((slot + 1) * SLOT_US, 0))
    return found


def total(windows: list[InstanceWindow], name: str) -> int:
    return sum(getattr(window, name) for window in windows)


def sigma_us(windows: list[InstanceWindow]) -> int:
    """Return the deviation of the latency, as the arbitrator takes it from the sums."""
    number, sum_ms = total(windows, "finished"), total(windows, "latency_sum_us") // 1_000
    return isqrt(number * total(windows, "latency_squares_ms2") - sum_ms**2) * 1_000 // number


@pytest.mark.parametrize("rate_milli", [5_000, 60_000, 110_000, 200_000])
def test_every_request_that_began_has_ended_or_runs(rate_milli: int):
    windows = served(rate_milli)
    begun = ended = 0
    for window in windows:
        begun += window.arrivals or 0
        ended += window.finished or 0
        assert window.running == begun - ended
        assert 0 <= begun - ended <= RUNNING_MAX
        assert 0 <= (window.waiting or 0) <= WAITING_MAX
        assert window.cache_queries == PROMPT_TOKENS * (window.arrivals or 0)
        assert 0 <= (window.cache_hits or 0) <= PROMPT_TOKENS * (window.arrivals or 0)
    least_ms, all_ms = SERVICE_US // 1_000, total(windows, "latency_sum_us") // 1_000
    assert all_ms >= least_ms * ended
    assert total(windows, "latency_squares_ms2") * ended >= all_ms**2


def test_few_requests_take_their_service_time_and_deviate_little():
    windows = served(10_000)
    mean_us = total(windows, "latency_sum_us") // total(windows, "finished")
    assert SERVICE_US < mean_us < SERVICE_US + SERVICE_SPREAD_US + PROMPT_TOKENS * TOKEN_US
    assert sigma_us(windows) < LIMIT_SIGMA_US
    assert total(windows, "waiting") == 0


def test_more_than_it_can_serve_fills_the_queue_and_turns_the_rest_away():
    windows = served(300_000)
    assert WAITING_MAX - 30 <= (windows[-1].waiting or 0) <= WAITING_MAX
    assert windows[-1].running == RUNNING_MAX
    assert sigma_us(windows[:100]) > LIMIT_SIGMA_US
    capacity = 60 * US_PER_S * RUNNING_MAX // SERVICE_US
    assert total(windows, "finished") < capacity


@pytest.mark.parametrize("shared_ppm", [0, 300_000, 970_000, PPM])
def test_the_hit_rate_follows_the_share_of_repeated_prompts(shared_ppm: int):
    windows = served(50_000, shared_ppm=shared_ppm)
    hit_ppm = total(windows, "cache_hits") * PPM // total(windows, "cache_queries")
    expected_ppm = shared_ppm * (PROMPT_TOKENS - BLOCK_TOKENS) // PROMPT_TOKENS
    assert abs(hit_ppm - expected_ppm) < 30_000


def test_a_new_version_misses_for_a_while():
    serving = Serving("i", chance(1))
    serving.chill(0)
    for position in range(200):
        serving.offer(position * 10_000, PPM)
    cold = serving.window(2 * US_PER_S, 0)
    for position in range(200):
        serving.offer(2 * US_PER_S + position * 10_000, PPM)
    warm = serving.window(4 * US_PER_S, 0)
    assert 0.3 < (cold.cache_hits or 0) / (cold.cache_queries or 1) < 0.65
    assert (warm.cache_hits or 0) / (warm.cache_queries or 1) > 0.9
