"""The engine's side: readings leave in time, and nothing that happens to them reaches the engine."""

import importlib.util
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from kite.telemetry import (
    INSTANCE,
    READING_MAX_BYTES,
    SOCKET,
    Reading,
    Sender,
    Totals,
    decode,
    encode,
    start,
    variables,
)
from kite.telemetry.plugin import ZERO, Recorder
from kite.testing.eventually import eventually
from kite_yoco.telemetry.listener import CREDENTIALS, Listener, sent_by_us

INTERVAL_US = 5_000


@dataclass
class Cache:
    """What vLLM's PrefixCacheStats has."""

    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class Scheduled:
    """What vLLM's SchedulerStats has."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: Cache = field(default_factory=Cache)


@dataclass
class Finished:
    """What vLLM's FinishedRequestStats has."""

    e2e_latency: float


@dataclass
class Iteration:
    """What vLLM's IterationStats has."""

    num_preempted_reqs: int = 0
    finished_requests: list[Finished] = field(default_factory=list[Finished])


async def heard(listener: Listener, least: int = 1) -> list[Reading]:
    """Return the readings that come, at least some."""
    found: list[Reading] = []

    def enough() -> bool:
        found.extend(listener.receive())
        return len(found) >= least

    await eventually(enough)
    return found


async def test_a_sender_speaks_idle_or_not_and_its_readings_are_cumulative() -> None:
    with Listener() as listener:
        sender = Sender(listener.name, "a", lambda: Totals(arrivals=7), INTERVAL_US)
        sender.start()
        found = await heard(listener, 5)
        sender.end()
    assert [one.seq for one in found[:5]] == [1, 2, 3, 4, 5]
    assert {one.totals.arrivals for one in found} == {7}
    assert {one.started_us for one in found} == {found[0].started_us}
    assert listener.refused == 0


async def test_a_socket_that_vanishes_costs_readings_and_nothing_else() -> None:
    with Listener() as listener:
        sender = Sender(listener.name, "a", Totals, INTERVAL_US)
        sender.start()
        await heard(listener)
    await eventually(lambda: sender.lost >= 3)
    assert sender.is_alive()
    sender.end()


async def test_a_receiver_that_does_not_read_costs_readings_and_nothing_else() -> None:
    with Listener() as listener:
        sender = Sender(listener.name, "a", Totals, INTERVAL_US)
        sender.start()
        await eventually(lambda: sender.lost >= 1)
        assert sender.is_alive()
        found = await heard(listener, sender.sent + 1)
        sender.end()
    assert found[-1].seq > sender.sent, "it goes on, and the numbers tell what was lost"


async def test_a_socket_with_a_path_is_reached_as_well(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(5)
        channel.bind(str(tmp_path / "s"))
        sender = Sender(str(tmp_path / "s"), "a", Totals, INTERVAL_US)
        sender.start()
        assert decode(channel.recv(READING_MAX_BYTES)).instance == "a"
        sender.end()


async def test_garbage_is_refused_and_counted() -> None:
    with Listener() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        good = encode(Reading(instance="a", started_us=1, seq=1, sent_us=1, totals=Totals()))
        for raw in (b"", b"{}", b"\xff", good[:-1], good):
            channel.sendto(raw, f"\0{listener.name[1:]}")
        assert len(await heard(listener)) == 1
        assert listener.refused == 4


@pytest.mark.parametrize(
    ("ancillary", "ours"),
    [
        ([(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, CREDENTIALS.pack(1, os.getuid(), 0))], True),
        ([(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, CREDENTIALS.pack(1, os.getuid() + 1, 0))], False),
        ([(socket.SOL_SOCKET, socket.SCM_RIGHTS, CREDENTIALS.pack(1, os.getuid(), 0))], False),
        ([(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, b"")], False),
        ([], False),
    ],
)
def test_only_this_users_datagrams_are_taken(ancillary: list[tuple[int, int, bytes]], *, ours: bool) -> None:
    assert sent_by_us(ancillary) is ours


def test_without_both_variables_no_thread_starts() -> None:
    for environment in ({}, {SOCKET: "@x"}, {INSTANCE: "a"}, {SOCKET: "", INSTANCE: "a"}):
        assert start(Totals, environment) is None
    assert Recorder(None).sender is None


def recorder(monkeypatch: pytest.MonkeyPatch, listener: Listener) -> Recorder:
    """Return vLLM's stat logger as it is in an engine of ours."""
    for name, value in variables(listener.name, "a").items():
        monkeypatch.setenv(name, value)
    return Recorder(None)


async def test_the_plugin_adds_up_what_vllm_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener() as listener:
        plugin = recorder(monkeypatch, listener)
        assert plugin.sender is not None
        (idle, *_) = await heard(listener)
        assert idle.totals == ZERO
        plugin.record(Scheduled(2, 1, 1, 0.25, Cache(3, 96, 64)), Iteration(1, [Finished(0.1204), Finished(0.08)]))
        plugin.record(Scheduled(1, 0, 0, 0.125, Cache(1, 32, 0)), Iteration(0, [Finished(0.2)]), mm_cache_stats=None)
        plugin.record(None, None)
        plugin.record(Scheduled(), None)
        plugin.log()
        plugin.log_engine_initialized()
        plugin.record_sleep_state(1, 0)
        totals = plugin.read()
        assert totals is not None
        assert totals.step_us is not None
        assert totals == Totals(
            arrivals=4,
            finished=3,
            latency_sum_us=400_000,
            latency_squares_ms2=120 * 120 + 80 * 80 + 200 * 200,
            cache_queries=128,
            cache_hits=64,
            preemptions=1,
            running=0,
            waiting=0,
            kv_usage_ppm=0,
            step_us=totals.step_us,
        )
        assert totals in [one.totals for one in await heard(listener)]
        plugin.sender.end()


async def test_an_interface_that_changed_silences_the_plugin_and_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener() as listener:
        plugin = recorder(monkeypatch, listener)
        assert plugin.sender is not None
        await heard(listener)
        plugin.record(cast("Scheduled", object()), None)
        assert plugin.read() is None
        plugin.record(Scheduled(), None)
        assert plugin.read() is None, "numbers with a hole in them are worse than none"
        plugin.sender.end()


def test_a_second_engine_of_one_server_does_not_speak_for_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET, "@x")
    monkeypatch.setenv(INSTANCE, "a")
    assert Recorder(None, 1).sender is None


def test_the_plugin_costs_no_import_of_vllm_or_torch() -> None:
    heavy = "('vllm', 'torch', 'pydantic', 'httpx')"
    code = f"import sys, kite.telemetry.plugin; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_finds_the_plugin_by_itself() -> None:
    code = (
        "from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories as found\n"
        "print([f.__name__ for f in found()], found()[0](None, 0).sender)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['StatLogger'] None"
