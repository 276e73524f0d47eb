"""Watching for engines that live and do not serve: stopped, hung, or answering what nobody can read.

A slow machine must not look like a hang. An engine answers its health check while it computes, and while it is paused
or asleep; a look that fails counts only together with others, over HUNG_S; and when this loop itself was late, all
that was counted is forgotten, because then the machine stood still and not the engine.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kite.clock import US_PER_S, mono_us
from kite.engine import Engine, EngineAnswer, EngineError, EngineProcess
from kite.engine.identity import states
from kite_yoco.instances import IDLE, Instance, Instances

EVERY_S = 5.0  # between two looks: a look costs vLLM some milliseconds
HUNG_S = 30.0  # without an answer: longer than the longest pause seen of a loaded machine, shorter than a cold start
LOOK_S = 4.0  # for one answer, on loopback
LATE = 3.0  # times the interval: then it was this loop that did not run
STOPPED = "T"  # <man 5 proc>: stopped by a signal; under a debugger it is `t`


class Sight(StrEnum):
    """What a look found; but for `well`, the code of the failure that it becomes."""

    WELL = "well"
    HUNG = "engine_hung"
    STOPPED = "engine_stopped"
    RUBBISH = "engine_rubbish"


LOOKS: Mapping[Sight, int] = {Sight.STOPPED: 2, Sight.RUBBISH: 3, Sight.HUNG: 4}
"""So many looks in a row have to find the same: a debugger stops a process for a moment, and an answer can be cut."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the last looks at one process found: `seen` so often in a row, since `since_us` (monotonic)."""

    seen: Sight = Sight.WELL
    looks: int = 0
    since_us: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How often to look, and how long nothing may be heard."""

    hung_s: float = HUNG_S

    @property
    def every_us(self) -> int:
        """Time between two looks: at least one more than has to fail fits into the time without an answer."""
        return int(min(EVERY_S, self.hung_s / (LOOKS[Sight.HUNG] + 1)) * US_PER_S)

    @property
    def look_s(self) -> float:
        """Time for one answer."""
        return min(LOOK_S, self.hung_s / LOOKS[Sight.HUNG])


def felt(pulse: Pulse, seen: Sight, now_us: int) -> Pulse:
    """Return the pulse after one more look."""
    if seen is pulse.seen:
        return Pulse(seen, pulse.looks + 1, pulse.since_us)
    return Pulse(seen, 1, now_us)


def failed(pulse: Pulse, now_us: int, bounds: Bounds) -> bool:
    """Say whether an instance has to be given up."""
    if pulse.seen is Sight.WELL or pulse.looks < LOOKS[pulse.seen]:
        return False
    return pulse.seen is not Sight.HUNG or now_us - pulse.since_us >= bounds.hung_s * US_PER_S


def is_stopped(group: str) -> bool:
    """Say whether a process of a group is stopped, from their states: the rest can only wait for it."""
    return STOPPED in group


async def look(engine: Engine, limit_s: float = LOOK_S) -> tuple[Sight, str]:
    """Ask an engine for its names and its health; return what that shows, with the words for it."""
    try:
        async with asyncio.timeout(limit_s):
            await engine.models()
            healthy = await engine.healthy()
    except TimeoutError:
        return Sight.HUNG, f"no answer within {limit_s:g} s"
    except EngineAnswer as error:
        return Sight.RUBBISH, str(error)
    except EngineError as error:
        return Sight.HUNG, str(error)
    return (Sight.WELL, "") if healthy else (Sight.HUNG, "its health check fails")


@dataclass(slots=True)
class Watch:
    """Looks at the instances of a node that no order holds."""

    instances: Instances
    bounds: Bounds = field(default_factory=Bounds)
    _pulses: dict[EngineProcess, Pulse] = field(default_factory=dict[EngineProcess, Pulse])
    _looks: dict[EngineProcess, "asyncio.Task[None]"] = field(default_factory=dict[EngineProcess, "asyncio.Task[None]"])

    async def run(self) -> None:
        """Look until cancelled. One that takes its time to answer keeps nobody waiting but itself."""
        looked_us = mono_us()
        try:
            while True:
                await asyncio.sleep(self.bounds.every_us / US_PER_S)
                if mono_us() - looked_us > LATE * self.bounds.every_us:
                    self._pulses.clear()
                looked_us = mono_us()
                await self.round()
        finally:
            for task in self._looks.values():
                task.cancel()

    async def round(self) -> None:
        """Begin to look at each that nobody looks at or holds; what went wrong with a look ends the watch."""
        groups = await asyncio.to_thread(states)
        for process in [process for process, task in self._looks.items() if task.done()]:
            self._looks.pop(process).result()
        idle = {one.running: one for one in self.instances if one.lives and not one.busy and one.state in IDLE}
        self._pulses = {process: self._pulses.get(process, Pulse()) for process in idle}
        for process, one in idle.items():
            if process not in self._looks:
                self._looks[process] = asyncio.create_task(self._at(one, process, one.engine, groups))

    async def _at(self, instance: Instance, process: EngineProcess, engine: Engine, groups: Mapping[int, str]) -> None:
        if is_stopped(groups.get(process.pid, "")):
            seen, words = Sight.STOPPED, "a process of it was stopped by a signal, and not continued"
        else:
            seen, words = await look(engine, self.bounds.look_s)
        if instance.busy or instance.process is not process or not instance.lives:
            self._pulses.pop(process, None)  # an order holds it, or it has ended: others tell
            return
        pulse = self._pulses[process] = felt(self._pulses.get(process, Pulse()), seen, mono_us())
        if seen is Sight.WELL:
            process.mark()
        elif failed(pulse, mono_us(), self.bounds):
            lasted_s = (mono_us() - pulse.since_us) / US_PER_S
            await self.instances.fail(instance, process, seen, f"{words} ({pulse.looks} looks in {lasted_s:.1f} s)")
