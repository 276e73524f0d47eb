"""Who may compute: counts requests that run and have run, and holds new ones while paused."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Condition

from kite.clock import mono_us
from kite.telemetry import Totals
from kite.telemetry.reading import US_PER_MS, latency_ms

POLL_S = 0.05  # between two looks whether a held client has gone


class Gone(Exception):
    """The client of a held request has closed its connection."""


class Gate:
    """The door between the HTTP threads and the model."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._paused = False
        self._running = 0
        self._arrivals = 0
        self._finished = 0
        self._latency_ms = 0
        self._squares_ms2 = 0
        self._step_us: int | None = None

    @property
    def paused(self) -> bool:
        """Say whether new requests are held."""
        return self._paused

    @property
    def running(self) -> int:
        """The number of requests inside."""
        return self._running

    def totals(self) -> Totals:
        """Return what vLLM's stat logger tells, but for its cache; a fake has no KV blocks and preempts nobody."""
        with self._changed:
            return Totals(
                arrivals=self._arrivals,
                finished=self._finished,
                latency_sum_us=self._latency_ms * US_PER_MS,
                latency_squares_ms2=self._squares_ms2,
                running=self._running,
                waiting=0,
                step_us=self._step_us,
            )

    @contextmanager
    def inside(self, gone: Callable[[], bool]) -> Generator[None]:
        """Wait until not paused, then count as running. Raises Gone when `gone()` says so while held."""
        began_us = mono_us()
        with self._changed:
            while self._paused:
                if gone():
                    raise Gone
                self._changed.wait(POLL_S)
            self._running += 1
            self._arrivals += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._count(mono_us() - began_us)
                self._changed.notify_all()

    def _count(self, latency_us: int) -> None:
        latency = latency_ms(latency_us)
        self._finished += 1
        self._latency_ms += latency
        self._squares_ms2 += latency * latency
        self._step_us = mono_us()

    def pause(self) -> None:
        """Hold new requests and return once those inside have left."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._running == 0)

    def resume(self) -> None:
        """Let requests in again, the held ones first."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()
