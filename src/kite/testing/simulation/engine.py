"""A simulated engine process and the memory of its device: requests, prefix cache, loaded versions, counters."""

from dataclasses import dataclass, field
from random import Random

from kite.clock import US_PER_S
from kite_schemas.model import PPM
from kite_schemas.telemetry import InstanceWindow, Source

STRANGER = "by-hand"
"""What somebody loads into an engine by hand is called so; it is no version."""

RUNNING_MAX = 64
"""Requests computed at once; the others wait."""

PROMPT_TOKENS, BLOCK_TOKENS = 512, 32
"""A repeated prompt hits all blocks but its last: something has to be computed."""

SERVICE_US, SPREAD_US = 35_000, 5_000
"""A request alone, with its prompt in the cache, and what it varies by."""

TOKEN_US = 12
"""Each token of the prompt that is not in the cache."""

NEIGHBOUR_US = 1_200
"""Each other request in flight."""

COLD_US, COLD_PPM = 2 * US_PER_S, 500_000
"""How long a newly loaded version finds less in the cache, and which share of the repeated prompts then misses."""

RETAINED_BYTES = 300_000_000
"""What a loaded version takes of the device until its process ends or it is taken out."""

FLOOR_PPM, LOADED_PPM, FRAGMENTATION_MAX_PPM = 100_000, 110_000, 900_000
"""Fragmentation of a device at rest, what one load adds, and the most there is."""

HALVING = 6
"""A sixty-fourth of what is above the floor goes with every window."""


@dataclass(slots=True)
class Memory:
    """The memory of one device. What is in pieces cannot be given to a process that needs it in one.

    `loaded_ppm` is how much more fragmented it is after a version was loaded; `pinned` keeps it so.
    """

    id: str
    total_bytes: int
    fragmentation_ppm: int = FLOOR_PPM
    loaded_ppm: int = LOADED_PPM
    pinned: bool = False
    taken: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def piece_bytes(self) -> int:
        """The largest piece that is free."""
        return (self.total_bytes - sum(self.taken.values())) * (PPM - self.fragmentation_ppm) // PPM

    def take(self, owner: str, wanted_bytes: int) -> bool:
        """Take a piece, if there is one so large."""
        if wanted_bytes > self.piece_bytes:
            return False
        self.taken[owner] = wanted_bytes
        return True

    def free(self, owner: str) -> None:
        """Give back all that belongs to an owner, or to something of it."""
        self.taken = {name: held for name, held in self.taken.items() if name.partition(" ")[0] != owner}

    def fragment(self) -> None:
        """Leave the free memory in more pieces, as a load does."""
        self.fragmentation_ppm = min(FRAGMENTATION_MAX_PPM, self.fragmentation_ppm + self.loaded_ppm)

    def join(self) -> None:
        """Put all pieces together that are free."""
        self.pinned, self.fragmentation_ppm = False, FLOOR_PPM

    def settle(self) -> None:
        """Let a window pass: the allocator puts pieces together, unless something holds them apart."""
        if not self.pinned:
            self.fragmentation_ppm -= (self.fragmentation_ppm - FLOOR_PPM) >> HALVING


@dataclass(slots=True)
class Engine:
    """One process. `loads` counts how often each version was given to it, for the judge."""

    instance: str
    endpoint: str
    base: str
    memory: Memory
    rng: Random
    alive: bool = True
    paused: bool = False
    in_flight: int = 0
    cold_until_us: int = 0
    versions: list[str] = field(default_factory=list[str])
    loads: dict[str, int] = field(default_factory=dict[str, int])
    arrivals: int = 0
    finished: int = 0
    latency_sum_us: int = 0
    latency_squares_ms2: int = 0
    hits: int = 0

    def offer(self, now_us: int, repeated_ppm: int) -> int:
        """Take a request whose prompt was seen before with a probability; return how long it will take, in µs."""
        if now_us < self.cold_until_us:
            repeated_ppm = repeated_ppm * COLD_PPM // PPM
        hits = PROMPT_TOKENS - BLOCK_TOKENS if self.rng.randrange(PPM) < repeated_ppm else 0
        took_us = SERVICE_US + self.rng.randrange(SPREAD_US)
        took_us += (PROMPT_TOKENS - hits) * TOKEN_US + self.in_flight * NEIGHBOUR_US
        self.in_flight += 1
        self.arrivals += 1
        self.hits += hits
        return took_us

    def finish(self, took_us: int) -> None:
        """End a request."""
        latency_ms = (took_us + 500) // 1_000
        self.in_flight -= 1
        self.finished += 1
        self.latency_sum_us += latency_ms * 1_000
        self.latency_squares_ms2 += latency_ms * latency_ms

    def load(self, version: str, now_us: int) -> bool:
        """Load a version, if the device has room: its prompts are not in the cache, and memory is in more pieces."""
        if not self.memory.take(f"{self.endpoint} {version}", RETAINED_BYTES):
            return False
        self.versions.append(version)
        self.loads[version] = self.loads.get(version, 0) + 1
        self.cold_until_us = now_us + COLD_US
        self.memory.fragment()
        return True

    def unload(self, version: str) -> None:
        """Forget a version, if it is there."""
        if version in self.versions:
            self.versions.remove(version)
            self.memory.taken.pop(f"{self.endpoint} {version}", None)

    def end(self) -> None:
        """End the process: its requests break off, its memory is free."""
        self.alive = False
        self.memory.free(self.endpoint)

    def window(self, age_us: int) -> InstanceWindow:
        """Return what happened since the last window, and begin to count the next."""
        told = InstanceWindow(
            id=self.instance,
            source=Source.STAT_LOGGER,
            age_us=age_us,
            arrivals=self.arrivals,
            finished=self.finished,
            latency_sum_us=self.latency_sum_us,
            latency_squares_ms2=self.latency_squares_ms2,
            cache_queries=self.arrivals * PROMPT_TOKENS,
            cache_hits=self.hits,
            running=min(self.in_flight, RUNNING_MAX),
            waiting=max(0, self.in_flight - RUNNING_MAX),
        )
        self.arrivals = self.finished = self.latency_sum_us = self.latency_squares_ms2 = self.hits = 0
        return told
