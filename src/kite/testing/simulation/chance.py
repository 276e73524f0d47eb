"""Luck: what fails, and how long things take, from the seed of the run."""

from dataclasses import dataclass
from random import Random

from kite_schemas.model import PPM

SPREAD_PPM = 400_000
"""By how much a thing may take longer, or shorter, than it does on average."""


@dataclass(slots=True)
class Chance:
    """`failing_ppm` is the share of orders that fail somewhere; 0 once the run is to come to rest."""

    rng: Random
    failing_ppm: int

    def bad(self) -> bool:
        """Tell whether this one goes wrong."""
        return self.rng.randrange(PPM) < self.failing_ppm

    def about(self, us: int) -> int:
        """Return how long something takes that takes `us` on average."""
        spread_us = us * SPREAD_PPM // PPM
        return us - spread_us + self.rng.randrange(2 * spread_us + 1)

    def share(self, ppm: int) -> bool:
        """Tell whether this one belongs to a share of all."""
        return self.rng.randrange(PPM) < ppm
