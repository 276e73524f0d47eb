"""Requests to real engines: so many at a time, or as a profile has them come, with prompts that repeat or do not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import TypeAlias

from kite.clock import US_PER_S, mono_us
from kite.engine import Engine, EngineError
from kite.testing.load.chance import chance
from kite.testing.load.profiles import SLOT_US, Profile, arrivals
from kite_schemas.model import PPM

TOKEN_FIRST, TOKEN_END = 100, 1_000
"""Prompts are of these token ids, which every base has."""

NO_ROUTE = "no_route"
NO_ROUTE_S = 0.1
"""How long a worker waits when no endpoint is known."""

Routes: TypeAlias = Callable[[str], Sequence[str]]
"""Takes a served name and returns the endpoints (`http://HOST:PORT`) that answer it now; none is an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What is asked. Repeated prompts are in the prefix cache but for their last block, fresh ones are not at all."""

    tokens: int = 256
    """Length of each; engines cache whole blocks only, so a few blocks at least."""

    shared_ppm: int = 900_000
    """Share of the requests that repeat one of the `variety` prompts."""

    variety: int = 4

    answer_tokens: int = 1
    """Length of the longest answers; the shortest are half as long, so that workers do not march in step.

    An engine tells of a request in flight only between two of its steps: never of one for a single token.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """A closed loop: each of `number` workers asks again when it has its answer, after a pause."""

    number: int = 8
    pause_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where a drive ends, or holds back; what is under way at the end is waited for."""

    seconds: float
    requests: int = 10_000
    concurrency: int = 64
    """An arrival that finds so many under way is not sent, and counted as `skipped`."""

    answer_s: float = 60.0


@dataclass(slots=True)
class Report:
    """What came of the requests so far; it can be read while they are driven.

    `failures` counts by the error's code; latencies are those of the finished requests, in the order they ended.
    """

    sent: int = 0
    finished: int = 0
    skipped: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    latencies_us: list[int] = field(default_factory=list[int])

    @property
    def failed(self) -> int:
        """Requests that were sent and had no answer, or could not be sent for lack of an endpoint."""
        return self.failures.total()

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self.sent - self.finished - (self.failed - self.failures[NO_ROUTE])

    def latency_us(self, share_ppm: int) -> int | None:
        """Return a quantile of the latencies, None before the first."""
        ranked = sorted(self.latencies_us)
        return ranked[min(len(ranked) - 1, len(ranked) * share_ppm // PPM)] if ranked else None


def prompts(wanted: Prompts, seed: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts as token ids, for ever."""
    rng = chance(seed, "prompts")
    shared = [_prompt(rng, wanted.tokens) for _ in range(wanted.variety)]
    while True:
        repeats = bool(shared) and rng.randrange(PPM) < wanted.shared_ppm
        yield rng.choice(shared) if repeats else _prompt(rng, wanted.tokens)


def lengths(wanted: Prompts, seed: int) -> Iterator[int]:
    """Yield how many tokens the answers have, for ever."""
    rng = chance(seed, "lengths")
    while True:
        yield rng.randint((wanted.answer_tokens + 1) // 2, wanted.answer_tokens)


async def drive(
    routes: Routes,
    name: str,
    pattern: Profile | Workers,
    bounds: Bounds,
    *,
    seed: int = 0,
    asked: Prompts | None = None,
    model: str | None = None,
    report: Report | None = None,
) -> Report:
    """Ask the endpoints of a served name in turn until a bound is met; return what came of it.

    `pattern` is a profile (that of one node) or a number of workers; `model` is what the engines call it, when that is
    not `name`. Failures are counted, not raised; a `report` that is given is filled meanwhile.
    """
    async with AsyncExitStack() as stack:
        find = partial(routes, name)
        wanted = asked or Prompts()
        questions = zip(prompts(wanted, seed), lengths(wanted, seed), strict=True)
        drive = Drive(find, model or name, bounds, questions, report or Report(), stack)
        async with asyncio.TaskGroup() as tasks:
            if isinstance(pattern, Workers):
                for _ in range(min(pattern.number, bounds.concurrency)):
                    tasks.create_task(drive.work(pattern.pause_us))
            else:
                async for _ in drive.moments(pattern, seed):
                    drive.arrive(tasks)
    return drive.report


@dataclass(slots=True)
class Drive:
    """One drive under way. Use `drive`."""

    find: Callable[[], Sequence[str]]
    model: str
    bounds: Bounds
    questions: Iterator[tuple[tuple[int, ...], int]]
    report: Report
    stack: AsyncExitStack
    begun_us: int = field(default_factory=mono_us)
    turns: Iterator[int] = field(default_factory=count)
    engines: dict[str, Engine] = field(default_factory=dict[str, Engine])

    @property
    def over(self) -> bool:
        """Whether nothing more is to be sent."""
        tried = self.report.sent + self.report.skipped + self.report.failures[NO_ROUTE]
        return self._elapsed_us >= self.bounds.seconds * US_PER_S or tried >= self.bounds.requests

    async def work(self, pause_us: int) -> None:
        """Ask again and again, one request at a time."""
        while not self.over:
            engine = self._chosen()
            if engine is not None:
                await self._ask(engine)
            await asyncio.sleep(pause_us / US_PER_S if engine is not None else NO_ROUTE_S)

    async def moments(self, profile: Profile, seed: int) -> AsyncIterator[None]:
        """Yield when a request arrives."""
        rng = chance(seed, "moments")
        for slot, number in enumerate(arrivals(profile, seed)):
            for offset_us in sorted(rng.randrange(SLOT_US) for _ in range(number)):
                await self._until(slot * SLOT_US + offset_us)
                if self.over:
                    return
                yield
            await self._until((slot + 1) * SLOT_US)
            if self.over:
                return

    def arrive(self, tasks: asyncio.TaskGroup) -> None:
        """Send one request, unless too many are under way."""
        if self.report.in_flight >= self.bounds.concurrency:
            self.report.skipped += 1
            return
        engine = self._chosen()
        if engine is not None:
            tasks.create_task(self._ask(engine))

    def _chosen(self) -> Engine | None:
        """Return the next engine, whose request counts as sent from here on; None when there is none."""
        endpoints = self.find()
        if not endpoints:
            self.report.failures[NO_ROUTE] += 1
            return None
        self.report.sent += 1
        return self._engine(endpoints[next(self.turns) % len(endpoints)])

    def _engine(self, endpoint: str) -> Engine:
        if endpoint not in self.engines:
            self.engines[endpoint] = Engine(endpoint)
            self.stack.push_async_callback(self.engines[endpoint].close)
        return self.engines[endpoint]

    async def _ask(self, engine: Engine) -> None:
        began_us = mono_us()
        try:
            await engine.complete(self.model, *next(self.questions), self.bounds.answer_s)
        except EngineError as error:
            self.report.failures[error.code] += 1
        else:
            self.report.finished += 1
            self.report.latencies_us.append(mono_us() - began_us)

    @property
    def _elapsed_us(self) -> int:
        return mono_us() - self.begun_us

    async def _until(self, after_us: int) -> None:
        await asyncio.sleep(max(0, after_us - self._elapsed_us) / US_PER_S)


def _prompt(rng: Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(TOKEN_FIRST, TOKEN_END) for _ in range(tokens))
