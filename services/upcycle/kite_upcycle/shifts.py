"""How far injections moved the answers of their blends: measured in the background, where it delays nothing.

KL of the new version from the one before, over the probes of this package. What counts in the end is the shift on the
probes of the *other* members; no member has probes of its own yet.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

import structlog

from kite import clock, tracing
from kite.engine import EngineError
from kite.proof import Reader, read_pair
from kite_schemas.upcycle import Shift
from kite_upcycle import cache
from kite_upcycle.engines import Engines

KEPT_MAX = 3  # shifts in a report
WAITING_MAX = 8  # injections whose shift is not measured yet
ASKED_MAX = 32  # versions of which it is remembered that their shift was asked for
LIMIT_S = 30.0  # for one shift: as long as a load with its proof, which reads as much
WAIT_S = cache.SPAN_US / clock.US_PER_S
"""How long after the load: the probes would count as the injection's misses (cache.py)."""

POLL_S = 0.5  # between looks whether an engine is free

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class VersionGone(Exception):
    """One of the two versions is not loaded any more. Never leaves this module."""


@dataclass(frozen=True, slots=True)
class Move:
    """A blend went from one version to the next on an engine. `traceparent` is the load's; empty when it has none."""

    endpoint: str
    former: str
    version: str
    traceparent: str = ""


class Shifts:
    """Measures shifts one at a time; `known` are the last three, the newest last.

    It makes way for orders: in one batch, reads of two kinds can spoil each other's answers (vLLM 0.32 on CPU), and a
    proof must not fail for a shift. `wait_s` and `limit_s` are the constants of this module but in tests.
    """

    def __init__(
        self, engines: Engines, prompts: tuple[str, ...], *, wait_s: float = WAIT_S, limit_s: float = LIMIT_S
    ) -> None:
        self.known: tuple[Shift, ...] = ()
        self._engines = engines
        self._prompts = prompts
        self._wait_s = wait_s
        self._limit_s = limit_s
        self._asked: deque[str] = deque(maxlen=ASKED_MAX)
        self._waiting: asyncio.Queue[tuple[float, Move]] = asyncio.Queue(WAITING_MAX)
        self._under_way: tuple[str, asyncio.Timeout] | None = None

    def ask(self, move: Move) -> None:
        """Have a shift measured later, that of each version once. Returns at once."""
        if move.version in self._asked:
            return
        self._asked.append(move.version)
        try:
            self._waiting.put_nowait((asyncio.get_running_loop().time() + self._wait_s, move))
        except asyncio.QueueFull:
            log.warning("shift_unknown", version=move.version, reason="too many wait")

    def make_way(self, endpoint: str) -> None:
        """Give up the measurement on an engine, if there is one: an order needs it."""
        if self._under_way is not None and self._under_way[0] == endpoint and not self._under_way[1].expired():
            self._under_way[1].reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Measure what is asked for, for ever."""
        while True:
            due_s, move = await self._waiting.get()
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            while self._engines.busy(move.endpoint):  # noqa: ASYNC110 - for seconds, and nobody is in a hurry
                await asyncio.sleep(POLL_S)
            await self._take(move)

    async def _take(self, move: Move) -> None:
        """Measure one shift and keep it; what cannot be measured is logged, and absent."""
        limit = asyncio.timeout(self._limit_s)
        self._under_way = move.endpoint, limit
        try:
            async with limit, self._engines.lend(move.endpoint) as engine:
                shift = await measure(engine, move, self._prompts)
        except TimeoutError:
            log.warning("shift_unknown", version=move.version, reason="out of time, or an order needed the engine")
        except (EngineError, VersionGone) as error:
            log.warning("shift_unknown", version=move.version, reason=str(error))
        else:
            self.known = (*self.known, shift)[-KEPT_MAX:]
        finally:
            self._under_way = None


async def measure(engine: Reader, move: Move, prompts: tuple[str, ...]) -> Shift:
    """Read KL(former ‖ version) while both are loaded. Raises VersionGone and the engine's errors.

    It is a lower bound of the divergence (kite.proof), exact to the share of the mass that the log names.
    """
    with tracing.span("measure shift", links=[move.traceparent] if move.traceparent else []):
        gone = {move.former, move.version} - set(await engine.models())
        if gone:
            raise VersionGone(f"no longer loaded: {', '.join(sorted(gone))}")
        found = await read_pair(engine, move.former, engine, move.version, prompts)
    log.info("shift_measured", version=move.version, kl_micronats=found.kl_micronats, covered_ppm=found.covered_ppm)
    return Shift(version=move.version, former=move.former, kl_micronats=found.kl_micronats)
