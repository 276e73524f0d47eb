"""Load from a seed: arrival profiles, synthetic fleets for ledgers, and requests to real engines."""

from kite.testing.load.profiles import (
    PROFILES,
    SLOT_US,
    Bursty,
    Calm,
    Correlated,
    Diurnal,
    Profile,
    arrivals,
    injections,
    rates,
    repeats,
)
from kite.testing.load.traffic import Bounds, Prompts, Report, Routes, Workers, drive, prompts
from kite.testing.load.world import Input, Size, World, run

__all__ = [
    "PROFILES",
    "SLOT_US",
    "Bounds",
    "Bursty",
    "Calm",
    "Correlated",
    "Diurnal",
    "Input",
    "Profile",
    "Prompts",
    "Report",
    "Routes",
    "Size",
    "Workers",
    "World",
    "arrivals",
    "drive",
    "injections",
    "prompts",
    "rates",
    "repeats",
    "run",
]
