"""What a piece of work costs: by the clock, and of this process's processors, which other processes do not lengthen."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time

from kite.clock import US_PER_S


@dataclass(frozen=True, slots=True)
class Spent:
    """What it took to handle some events, in seconds."""

    events: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Events a second."""
        return self.events / self.wall_s

    @property
    def cpu_us(self) -> float:
        """Processor time of one event."""
        return self.cpu_s * US_PER_S / self.events


@contextmanager
def spending(events: int) -> Generator[list[Spent]]:
    """Measure a block; afterwards the list holds what it took."""
    found: list[Spent] = []
    began_s, used_s = perf_counter(), process_time()
    yield found
    found.append(Spent(events, perf_counter() - began_s, process_time() - used_s))
