"""One instance as a queue: requests in, and the counters that a window would hold, consistent with one another."""

from collections import deque
from dataclasses import dataclass, field
from heapq import heapreplace
from random import Random

from kite.clock import US_PER_S
from kite.testing.load.profiles import SLOT_US
from kite_schemas.model import PPM
from kite_schemas.telemetry import InstanceWindow, Source

RUNNING_MAX = 8
"""Requests that an instance computes at once; those beyond it wait, first come, first served."""

WAITING_MAX = 256
"""A request that finds so many waiting is turned away."""

PROMPT_TOKENS = 512
BLOCK_TOKENS = 32
"""A repeated prompt hits all blocks but its last one: something has to be computed."""

SERVICE_US = 60_000
"""Time of a request without its misses."""

SERVICE_SPREAD_US = 8_000
TOKEN_US = 20
"""Time of one token that is not in the cache."""

COLD_US = 2 * US_PER_S
"""How long a new version finds less in the cache: its prompts have other keys."""

COLD_PPM = 500_000
"""Share of the repeated prompts that miss all the same in that time."""


@dataclass(slots=True)
class Job:
    """One request: when it came, when it began, when it is done, and how much of its prompt was cached."""

    came_us: int
    begins_us: int
    ends_us: int
    hits: int


@dataclass(slots=True)
class Serving:
    """The queue of one instance. Times are ledger time; give requests in the order in which they come."""

    id: str
    rng: Random
    cold_until_us: int = 0
    worked_us: int = 0
    free_us: list[int] = field(default_factory=lambda: [0] * RUNNING_MAX)
    waiting: deque[Job] = field(default_factory=deque[Job])
    running: list[Job] = field(default_factory=list[Job])

    @property
    def in_flight(self) -> int:
        """Requests inside, as of the last window."""
        return len(self.waiting) + len(self.running)

    def offer(self, at_us: int, shared_ppm: int) -> bool:
        """Take a request unless too many wait; return whether it was taken. Its prompt repeats with `shared_ppm`."""
        if len(self.waiting) >= WAITING_MAX:
            return False
        hits = self._hits(at_us, shared_ppm)
        begins_us = max(at_us, self.free_us[0])
        ends_us = begins_us + SERVICE_US + self.rng.randrange(SERVICE_SPREAD_US) + (PROMPT_TOKENS - hits) * TOKEN_US
        heapreplace(self.free_us, ends_us)
        self.waiting.append(Job(at_us, begins_us, ends_us, hits))
        return True

    def chill(self, at_us: int) -> None:
        """Make the cache miss for a while: a version was loaded."""
        self.cold_until_us = at_us + COLD_US

    def window(self, until_us: int, age_us: int) -> InstanceWindow:
        """Return what happened since the last window, and how things stand at its end."""
        begun = self._begun(until_us)
        ended = [job for job in self.running if job.ends_us <= until_us]
        self.running = [job for job in self.running if job.ends_us > until_us]
        self.worked_us = until_us if self.running else max([self.worked_us, *(job.ends_us for job in ended)])
        latencies_ms = [(job.ends_us - job.came_us + 500) // 1_000 for job in ended]
        return InstanceWindow(
            id=self.id,
            source=Source.STAT_LOGGER,
            age_us=age_us,
            arrivals=len(begun),
            finished=len(ended),
            latency_sum_us=sum(latencies_ms) * 1_000,
            latency_squares_ms2=sum(latency * latency for latency in latencies_ms),
            cache_queries=PROMPT_TOKENS * len(begun),
            cache_hits=sum(job.hits for job in begun),
            preemptions=0,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage_ppm=len(self.running) * PPM // (2 * RUNNING_MAX),
            engine_step_age_us=max(0, until_us - self.worked_us) if self.worked_us else SLOT_US,
        )

    def _begun(self, until_us: int) -> list[Job]:
        begun: list[Job] = []
        while self.waiting and self.waiting[0].begins_us <= until_us:
            begun.append(self.waiting.popleft())
        self.running += begun
        return begun

    def _hits(self, at_us: int, shared_ppm: int) -> int:
        if at_us < self.cold_until_us:
            shared_ppm = shared_ppm * (PPM - COLD_PPM) // PPM
        return PROMPT_TOKENS - BLOCK_TOKENS if self.rng.randrange(PPM) < shared_ppm else 0
