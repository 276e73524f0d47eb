"""The slots of the fake: which adapters its engine holds, as vLLM's cache does it.

A name that is unloaded leaves its adapter where it is until another takes the place. An adapter that was evicted is
read again at its next request; when its folder is gone then, the engine dies of it, as vLLM's does.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kite.engine.reading import USE

EXIT_ENGINE_DEAD = 1


@dataclass(frozen=True, slots=True)
class Held:
    """One adapter: its number, which never changes, and where it was read from."""

    slot: int
    path: str


@dataclass(slots=True)
class Slots:
    """At most `most` adapters, the least recently used leaves first."""

    most: int = 8
    _held: dict[int, None] = field(default_factory=dict[int, None])  # the one used last at the end
    _named: dict[str, Held] = field(default_factory=dict[str, Held])
    _users: Counter[str] = field(default_factory=Counter[str])
    _told: dict[str, float] = field(default_factory=dict[str, float])
    _taken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def held(self) -> list[int]:
        """Return the numbers of what is held."""
        with self._lock:
            return sorted(self._held)

    def take(self, name: str, path: str) -> None:
        """Put a new adapter in, in place of the one not used for longest when all slots are taken."""
        with self._lock:
            self._taken += 1
            self._named[name] = Held(self._taken, path)
            self._touch(self._taken)

    def forget(self, name: str) -> None:
        """Forget a name; what it stood for stays."""
        with self._lock:
            self._named.pop(name, None)

    def drop(self, slot: int) -> None:
        """Let go of what is in a slot."""
        with self._lock:
            self._held.pop(slot, None)

    @contextmanager
    def used(self, name: str) -> Generator[None]:
        """Count a request of a name while it runs; the base has no slot."""
        with self._lock:
            found = self._named.get(name)
            if found is not None:
                self._read_again(found)
                self._touch(found.slot)
                self._count(name, 1)
        try:
            yield
        finally:
            if found is not None:
                with self._lock:
                    self._count(name, -1)

    def lines(self) -> list[str]:
        """Return the series of who uses adapters: one for each combination there ever was."""
        with self._lock:
            return [
                f'{USE}{{max_lora="{self.most}",running_lora_adapters="{names}",waiting_lora_adapters=""}} {at_s}\n'
                for names, at_s in self._told.items()
            ]

    def _count(self, name: str, by: int) -> None:
        self._users[name] += by
        running = ",".join(sorted(user for user, number in self._users.items() if number))
        self._told[running] = time.time()

    def _touch(self, slot: int) -> None:
        self._held.pop(slot, None)
        self._held[slot] = None
        while len(self._held) > self.most:
            del self._held[next(iter(self._held))]

    def _read_again(self, found: Held) -> None:
        if found.slot not in self._held and not Path(found.path).is_dir():
            os._exit(EXIT_ENGINE_DEAD)
