"""What the core makes of windows: hit rates and deviations over seconds, counts that come late, and what is absent."""

from random import Random
from statistics import pstdev

import pytest

from kite_arbitrator.records import Feed, Load
from kite_arbitrator.state import probed
from kite_arbitrator.testing import BASE, HEALTHY, IDLE, NODE, SECOND_US, WINDOW_US, Doing, Story

READY, STANDBY = f"{NODE}-{BASE}-0", f"{NODE}-{BASE}-1"
SPAN = 50
"""Windows in the 5 s over which hit rate and deviation are taken."""


def feed(fleet: Story) -> Feed:
    return fleet.state.feeds[NODE]


def load(fleet: Story) -> Load:
    return feed(fleet).loads[READY]


def calm() -> Story:
    """A fleet whose last order is long over: what its instances count now is what its users do."""
    return Story().up().rest()


@pytest.mark.parametrize("seed", range(5))
def test_the_deviation_of_the_latency_is_that_of_the_requests_of_five_seconds(seed: int):
    rng, fleet, told = Random(seed), calm(), list[list[int]]()  # noqa: S311 # a test's numbers have to be known
    for _ in range(3 * SPAN):
        told.append([rng.randrange(1, 90_000) for _ in range(rng.randrange(4))])
        fleet.window({READY: Doing(latencies_ms=told[-1])})
        recent = [ms for window in told[-SPAN:] for ms in window]
        if recent:
            exact_us = pstdev(recent) * 1_000
            assert abs((load(fleet).sigma_us or 0) - exact_us) <= 1, f"seed {seed}, {recent}"
        else:
            assert load(fleet).sigma_us is None


@pytest.mark.parametrize("seed", range(5))
def test_the_hit_rate_is_that_of_the_tokens_of_five_seconds(seed: int):
    rng, fleet, told = Random(seed), calm(), list[tuple[int, int]]()  # noqa: S311 # a test's numbers have to be known
    for _ in range(3 * SPAN):
        queries = rng.choice((0, 0, 0, 30))
        told.append((queries, rng.randint(0, queries)))
        fleet.window({READY: Doing(queries=queries, hits=told[-1][1])})
        queries, hits = (sum(window[part] for window in told[-SPAN:]) for part in (0, 1))
        assert load(fleet).hit_ppm == (hits * 1_000_000 // queries if queries >= 200 else None), f"seed {seed}"


@pytest.mark.parametrize(("tokens", "known"), [(199, None), (200, 500_000)])
def test_fewer_than_200_tokens_have_no_hit_rate(tokens: int, known: int | None):
    fleet = calm()
    fleet.window({READY: Doing(queries=tokens, hits=tokens // 2)})
    assert load(fleet).hit_ppm == known


def test_what_an_instance_did_is_forgotten_when_it_idles():
    fleet = calm()
    fleet.windows(2 * SECOND_US)
    assert (load(fleet).hit_ppm, load(fleet).sigma_us) == (950_000, 0)
    fleet.windows(4_800_000, {READY: IDLE})
    assert (load(fleet).hit_ppm, load(fleet).sigma_us) == (950_000, 0)
    fleet.windows(400_000, {READY: IDLE})
    assert (load(fleet).hit_ppm, load(fleet).sigma_us, load(fleet).in_flight) == (None, None, 0)


def test_a_page_of_metrics_has_no_squares_so_that_the_deviation_is_not_known():
    fleet = calm()
    fleet.windows(2 * SECOND_US, {READY: Doing(squares=False, latencies_ms=(10, 9_000))})
    assert (load(fleet).hit_ppm, load(fleet).sigma_us) == (950_000, None)


def test_queries_without_hits_do_not_count_as_misses():
    fleet = calm()
    fleet.windows(2 * SECOND_US, {READY: Doing(hits=None)})
    assert load(fleet).hit_ppm is None


def test_an_instance_that_does_not_answer_has_nothing_known_in_flight():
    fleet = calm()
    fleet.window({READY: Doing(running=3, waiting=2)})
    assert load(fleet).in_flight == 5
    fleet.window({READY: None})
    assert load(fleet).in_flight is None
    fleet.window({READY: Doing(waiting=None)})
    assert load(fleet).in_flight is None


def test_a_late_window_adds_its_counts_and_nothing_else():
    fleet = calm()
    fleet.window(lost=1)
    late = fleet.seqs[NODE] - 1
    fleet.window(lag_us=900)
    newest, before = feed(fleet), load(fleet)
    fleet.window({READY: Doing(queries=1_000, hits=0, running=90)}, seq=late, lag_us=250_000, fragmentation_ppm=900_000)
    assert load(fleet).samples[-1].queries == before.samples[-1].queries + 1_000
    assert load(fleet).in_flight == before.in_flight
    assert (feed(fleet).seq, feed(fleet).seen_us, feed(fleet).lag_us) == (newest.seq, newest.seen_us, newest.lag_us)
    assert feed(fleet).fragmentation_ppm == newest.fragmentation_ppm
    assert feed(fleet).span.received == newest.span.received + 1


def test_windows_of_another_boot_say_nothing():
    fleet = calm()
    fleet.windows(SECOND_US)
    old = feed(fleet)
    fleet.window(seq=4, boot="one that has not registered yet")
    assert feed(fleet) == old
    fleet.register("second boot")
    fleet.window({READY: HEALTHY})
    fleet.window({READY: Doing(running=70)}, seq=old.seq + 1, boot="boot")  # was long on its way
    assert (feed(fleet).boot, feed(fleet).seq, load(fleet).in_flight) == (fleet.state.nodes[NODE].boot, 1, 1)


def test_windows_of_a_node_that_has_left_say_nothing():
    fleet = calm()
    fleet.windows(SECOND_US)
    late = fleet.sent(NODE, fleet.now_us)
    for name in (READY, STANDBY):
        fleet.change(name, str(fleet.state.instances[name].state), "absent", "shutdown")
    fleet.tell(late, f"node/{NODE}")
    assert NODE not in fleet.state.feeds
    assert [kind for kind in _all_kinds(fleet, 6) if "node" in kind] == []


def test_what_is_counted_while_kite_itself_asks_is_left_out():
    fleet = calm()
    fleet.promote("credit", weight_ppm=500_000)
    assert probed(fleet.state, READY)
    fleet.windows(fleet.state.instances[READY].probed_until_us - fleet.now_us)
    assert load(fleet).hit_ppm is None
    fleet.windows(SECOND_US)
    assert load(fleet).hit_ppm == 950_000


def test_an_instance_without_a_process_is_not_in_the_window_and_begins_anew():
    fleet = calm()
    fleet.windows(SECOND_US)
    fleet.change(READY, "ready", "failed", "engine_died")
    fleet.window()
    assert READY not in feed(fleet).loads
    assert feed(fleet).interval_us == WINDOW_US


def _all_kinds(fleet: Story, seconds: int) -> list[str]:
    return [row.type for _ in range(seconds) for row in fleet.wait(SECOND_US)]
