"""Who may compute: counts requests that run and wait, and holds new ones while paused."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Condition

POLL_S = 0.05  # between two looks whether a held client has gone


class Gone(Exception):
    """The client of a held request has closed its connection."""


class Gate:
    """The door between the HTTP threads and the model."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._paused = False
        self._running = 0

    @property
    def paused(self) -> bool:
        """Say whether new requests are held."""
        return self._paused

    @property
    def running(self) -> int:
        """The number of requests inside."""
        return self._running

    @contextmanager
    def inside(self, gone: Callable[[], bool]) -> Generator[None]:
        """Wait until not paused, then count as running. Raises Gone when `gone()` says so while held."""
        with self._changed:
            while self._paused:
                if gone():
                    raise Gone
                self._changed.wait(POLL_S)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

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
