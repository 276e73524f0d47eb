"""What it saves to hold an engine before its weights: `python benchmarks/prewarm.py [--engine vllm] [-n 5]`.

Again and again, in turn: an engine on the tiny base is started from nothing (`cold_ms`), and one that was prewarmed is
let on (`held_ms`), each until its first token. `prewarm_ms` is how long it took to get the second one to where it
waits, niceness and all. `held_ppm` is the median of the ratios of each pair.

The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, cast

from fleet import say

from kite.clock import mono_us
from kite.engine import Engine, EngineProcess
from kite.testing import bases
from kite.testing.engine import tiny_spec
from kite_schemas.model import PPM

START_S = 240.0  # for one start on a machine that is busy with other things
US_PER_MS = 1_000
ANY_CORE = ""

Kind = Literal["vllm", "fake"]


@dataclass(frozen=True, slots=True)
class Pair:
    """One start from nothing and one that was prewarmed, in us."""

    cold_us: int
    prewarm_us: int
    held_us: int


async def measured(kind: Kind, base: Path, folder: Path) -> Pair:
    """Start one engine both ways. Raises EngineError."""
    cold_us = await started(kind, base, folder / "cold.log")
    began_us = mono_us()
    process = await EngineProcess.start(tiny_spec(kind, base), log=folder / "held.log", held=True)
    try:
        process.restrain(ANY_CORE)
        await process.wait_held(START_S)
        held_us = mono_us()
        await process.let_on()
        await first_token(process)
        return Pair(cold_us, held_us - began_us, mono_us() - held_us)
    finally:
        await process.stop()


async def started(kind: Kind, base: Path, log: Path) -> int:
    """Return how long an engine takes from nothing to its first token."""
    began_us = mono_us()
    process = await EngineProcess.start(tiny_spec(kind, base), log=log)
    try:
        await first_token(process)
        return mono_us() - began_us
    finally:
        await process.stop()


async def first_token(process: EngineProcess) -> None:
    """Wait for it. Raises EngineError."""
    await process.wait_healthy(START_S)
    async with Engine(process.url) as engine:
        await engine.complete(process.spec.served_name, (1,), 1)


async def repeated(kind: Kind, number: int) -> list[Pair]:
    """Measure pair after pair."""
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="kite-prewarm-") as folder:
        for count in range(number):
            pairs.append(await measured(kind, bases.tiny(bases.cache()), Path(folder)))
            say(f"{count + 1} of {number}: {pairs[-1]}")
    return pairs


def main() -> int:
    """Measure, and print one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("fake", "vllm"), default="vllm")
    parser.add_argument("-n", type=int, default=5)
    found = parser.parse_args()
    load_before = os.getloadavg()[0]
    pairs = asyncio.run(repeated(cast("Kind", found.engine), found.n))
    record = {
        "engine": found.engine,
        "n": len(pairs),
        "cold_ms_p50": median(pair.cold_us for pair in pairs) / US_PER_MS,
        "prewarm_ms_p50": median(pair.prewarm_us for pair in pairs) / US_PER_MS,
        "held_ms_p50": median(pair.held_us for pair in pairs) / US_PER_MS,
        "held_ppm": int(median(pair.held_us * PPM // pair.cold_us for pair in pairs)),
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
