"""vLLM's stat logger of KITE, found through the entry point `vllm.stat_logger_plugins`; only vLLM imports this module.

vLLM calls `record` after every engine step, in the process of its API server. The interface is not stable: what is read
of it is named by the protocols below, and when it is not there any more this logger falls silent, once and for all, and
yoco reads `/metrics` instead.
"""

import logging
import threading
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

import msgspec

from kite.clock import US_PER_S, mono_us
from kite.telemetry import sender
from kite.telemetry.reading import PPM, US_PER_MS, Totals, latency_ms

log = logging.getLogger("vllm.kite")  # below vLLM's own, so that it is written where vLLM writes


class CacheStats(Protocol):
    """vLLM's prefix cache since the last step: requests, and tokens asked for and found."""

    @property
    def requests(self) -> int: ...
    @property
    def queries(self) -> int: ...
    @property
    def hits(self) -> int: ...


class SchedulerStats(Protocol):
    """vLLM's scheduler after a step."""

    @property
    def num_running_reqs(self) -> int: ...
    @property
    def num_waiting_reqs(self) -> int: ...
    @property
    def num_skipped_waiting_reqs(self) -> int: ...
    @property
    def kv_cache_usage(self) -> float: ...
    @property
    def prefix_cache_stats(self) -> CacheStats: ...


class FinishedRequest(Protocol):
    """One request that ended in a step; seconds."""

    @property
    def e2e_latency(self) -> float: ...


class IterationStats(Protocol):
    """What came out of a step."""

    @property
    def num_preempted_reqs(self) -> int: ...
    @property
    def finished_requests(self) -> Sequence[FinishedRequest]: ...


ZERO = Totals(
    arrivals=0,
    finished=0,
    latency_sum_us=0,
    latency_squares_ms2=0,
    cache_queries=0,
    cache_hits=0,
    preemptions=0,
    running=0,
    waiting=0,
    kv_usage_ppm=0,
)
"""What an engine that has not stepped yet knows: it has done nothing, and holds nothing."""


def stepped(totals: Totals, stats: SchedulerStats, now_us: int) -> Totals:
    """Return the totals after a step of the scheduler."""
    cache = stats.prefix_cache_stats
    return msgspec.structs.replace(
        totals,
        arrivals=(totals.arrivals or 0) + cache.requests,
        cache_queries=(totals.cache_queries or 0) + cache.queries,
        cache_hits=(totals.cache_hits or 0) + cache.hits,
        running=stats.num_running_reqs,
        waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
        kv_usage_ppm=min(PPM, int(stats.kv_cache_usage * PPM)),
        step_us=now_us,
    )


def gave(totals: Totals, stats: IterationStats) -> Totals:
    """Return the totals after what a step gave out."""
    latencies_ms = [latency_ms(int(request.e2e_latency * US_PER_S)) for request in stats.finished_requests]
    return msgspec.structs.replace(
        totals,
        finished=(totals.finished or 0) + len(latencies_ms),
        latency_sum_us=(totals.latency_sum_us or 0) + sum(latencies_ms) * US_PER_MS,
        latency_squares_ms2=(totals.latency_squares_ms2 or 0) + sum(ms * ms for ms in latencies_ms),
        preemptions=(totals.preemptions or 0) + stats.num_preempted_reqs,
    )


class Recorder:
    """Adds up what vLLM tells, and lets a thread send it. Does nothing unless the environment names a socket."""

    def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
        del vllm_config
        self._totals: Totals | None = ZERO
        self._lock = threading.Lock()
        self.sender = sender.start(self.read) if engine_index == 0 else None  # an instance of KITE has one engine

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Add one step. Never raises."""
        del mm_cache_stats, engine_idx
        if self.sender is None or self._totals is None:
            return
        try:
            self._add(scheduler_stats, iteration_stats)
        except Exception:  # vLLM's output loop would end with it, and the engine: the outermost loop is not ours
            self._totals = None
            log.exception("KITE's stat logger cannot read this vLLM; yoco falls back to /metrics")

    def read(self) -> Totals | None:
        """Return what was added up, None after vLLM's interface was not as expected."""
        with self._lock:
            return self._totals

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Nothing to do: the arbitrator knows who sleeps."""

    def _add(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        with self._lock:
            totals = self._totals or ZERO
            if scheduler_stats is not None:
                totals = stepped(totals, scheduler_stats, mono_us())
            if iteration_stats is not None:
                totals = gave(totals, iteration_stats)
            self._totals = totals


class Loggers(Protocol):
    """The part of vLLM's module of loggers that is used here."""

    StatLoggerBase: type[object]


def __getattr__(name: str) -> type[object]:
    """Return `StatLogger`, the class that vLLM asks for: a Recorder that is a stat logger of vLLM."""
    if name != "StatLogger":
        raise AttributeError(name)
    loggers = cast("Loggers", import_module("vllm.v1.metrics.loggers"))
    return types.new_class(name, (Recorder, loggers.StatLoggerBase))
