"""The crowd: agents that think, ask, wait for the answer, and think again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.engine import Engine

THINK_US, HURRY_US, REST_US = 2_500_000, 350_000, 6_000_000
"""Between an answer and the next request, on average: on an ordinary day, in a surge, and at the end."""

REPEATED_PPM, FRESH_PPM = 970_000, 500_000
"""Share of the prompts that were seen before, and the same in a surge: it comes with new prompts."""

Ways = Callable[[str], Sequence[str]]
"""Returns the endpoints that answer for a name."""


@dataclass(slots=True)
class Mood:
    """What all agents have in common: how long they think, and how new their prompts are."""

    think_us: int = THINK_US
    repeated_ppm: int = REPEATED_PPM

    def hurry(self) -> None:
        """A surge begins."""
        self.think_us, self.repeated_ppm = HURRY_US, FRESH_PPM

    def relax(self) -> None:
        """A surge is over."""
        self.think_us, self.repeated_ppm = THINK_US, REPEATED_PPM

    def rest(self) -> None:
        """The run comes to its end."""
        self.think_us, self.repeated_ppm = REST_US, REPEATED_PPM


@dataclass(slots=True)
class Agent:
    """One client. It asks for a blend, or for its base while there is none; `failed` counts what broke off."""

    names: tuple[str, ...]
    agenda: Agenda
    rng: Random
    mood: Mood
    ways: Ways
    engines: dict[str, Engine]
    answered: int = 0
    failed: int = 0
    _engine: Engine | None = None
    _took_us: int = 0

    def think(self) -> None:
        """Think for a while, then ask."""
        self.agenda.after(self.rng.randrange(2 * self.mood.think_us), self.ask)

    def ask(self) -> None:
        """Send a request where the routes lead; without one, or to an engine that is gone, it fails."""
        engine = self._found()
        if engine is None or not engine.alive or engine.paused:
            self.failed += 1
            self.think()
            return
        self._engine = engine
        self._took_us = engine.offer(self.agenda.now_us, self.mood.repeated_ppm)
        self.agenda.after(self._took_us, self.read)

    def read(self) -> None:
        """Take the answer, if the engine has lived to give it."""
        engine = self._engine
        if engine is not None and engine.alive:
            engine.finish(self._took_us)
            self.answered += 1
        else:
            self.failed += 1
        self.think()

    def _found(self) -> Engine | None:
        for name in self.names:
            endpoints = self.ways(name)
            if endpoints:
                return self.engines.get(endpoints[self.rng.randrange(len(endpoints))])
        return None
