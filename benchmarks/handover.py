"""What handing over costs: `python benchmarks/handover.py [--engine vllm] [--base tiny] [-n 200]`.

An embedded fleet of one ready instance and one standby that sleeps on its hot path, with one blend that its base
serves. Again and again the standby is ordered, and drained back to sleep once it is ready. Every hand-over is the whole
way: the order is decided and committed, yoco resumes the engine, reads one probe of the blend and holds it against its
print, and `instance_ready` is committed.

`t_first_token_ms` is ledger time (the arbitrator's one clock) from the row of `wake_ordered` to that of
`instance_ready`, so it holds the way to yoco and back; `t_worker_ms` is yoco's own monotonic time from taking the order
to the proven first token. `t_engine_ms` is how long requests to the engine were under way in it (resume, list, proof),
as yoco's client sees them, from yoco's log; `control_plane_ms` is the rest of `t_first_token_ms`. The first hand-over,
which loads the blend, is told apart and not counted. Limits that the benchmark's own requests could cross are raised
before, as by `kite config set`, so that no other rule wakes the standby.

Each run prints one JSON object. Without arguments: the fake engine with the tiny base 200 times, vLLM with the 135 M
base 50 times, then vLLM with the tiny base 200 times, whose object is the last line.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from fleet import UNMOVED, quantile, say

from kite.errors import KiteError
from kite.ledger import Reader
from kite_cli.asking import capacity, request
from kite_cli.demo.material import ANCHOR, EXAMPLES, BaseKind, prepare
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import EngineKind, Options
from kite_cli.output import quiet
from kite_cli.place import reading
from kite_schemas.envelope import decode
from kite_schemas.model import PPM
from kite_schemas.upcycle import Ending
from kite_schemas.yoco import InstanceReady, WakeOrdered

US_PER_MS = 1_000
WEIGHT_PPM = 600_000
WOKEN = re.compile(r"t_first_token_us=(\d+) engine_us=(\d+) event=woken")
"""yoco's log line of a wake: its own time, and how long requests to the engine were under way in it."""

Record = dict[str, object]


class NotMeasured(KiteError):
    """A hand-over did not come about: what was measured until then is no figure."""

    code = "not_measured"


@dataclass(frozen=True, slots=True)
class Run:
    """What is measured: which engine, on which base, how often; where it may write."""

    engine: EngineKind
    base: BaseKind
    number: int
    folder: Path


EVERY = (("fake", "tiny", 200), ("vllm", "smollm2", 50), ("vllm", "tiny", 200))


@dataclass(frozen=True, slots=True)
class Handover:
    """One hand-over; times in us, as the head of this file explains them."""

    path: str
    took_us: int
    deadline_us: int
    worker_us: int
    engine_us: int

    @property
    def own_us(self) -> int:
        """What is not the engine's."""
        return self.took_us - self.engine_us


async def measured(run: Run) -> Record:
    """Bring a fleet up, hand over, and return the figures. Raises KiteError."""
    before = os.getloadavg()[0]
    material = prepare(run.base, EXAMPLES, run.folder / "material")
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if run.base == "smollm2" else "float32"
    options = Options(
        base=material.base, name=run.base, engine=run.engine, dir=run.folder / "fleet", dtype=dtype, node="bench"
    )
    async with embedded(options) as fleet:
        say(f"{run.engine} on {run.base}: waiting for the instances")
        await fleet.wait_settled()
        await _furnished(fleet, material.good[ANCHOR])
        first = await _ordered(fleet)
        say(f"the first hand-over, which loads the blend, took {first.took_us // US_PER_MS} ms; now {run.number} more")
        for number in range(run.number):
            await _back(fleet)
            await _ordered(fleet)
            if (number + 1) % 25 == 0:
                say(f"{number + 1} done")
        with reading(fleet) as reader:
            found = list(_handovers(reader, _logged(fleet.logs / "yoco.log")))[1:]
    return _figures(run, first, found, before)


async def _furnished(fleet: Fleet, adapter: Path) -> None:
    """Give the base a blend, and raise the limits that only the benchmark itself would cross."""
    changed = await request.change(fleet, list(UNMOVED.items()), reason="benchmark")
    if not changed.ok:
        raise NotMeasured(f"the limits were refused: {changed.detail}")
    injected = await request.inject(fleet, adapter=adapter, base=fleet.base, blend="risk", weight_ppm=WEIGHT_PPM)
    if injected.ending is not Ending.PROMOTED:
        raise NotMeasured(f"the blend was {injected.ending}: {injected.detail or injected.reason}")


async def _ordered(fleet: Fleet) -> capacity.Handover:
    handover = await capacity.order(fleet, fleet.base, instance=_standby(fleet), reason="benchmark")
    if not handover.ok:
        raise NotMeasured(f"no hand-over ({handover.code}): {handover.detail}")
    return handover


async def _back(fleet: Fleet) -> None:
    drained = await capacity.drain(fleet, _standby(fleet), reason="benchmark")
    if not drained.ok:
        raise NotMeasured(f"not drained ({drained.code}): {drained.detail}")


def _standby(fleet: Fleet) -> str:
    return f"{fleet.node}-{fleet.base}-1"


def _logged(log: Path) -> list[tuple[int, int]]:
    """Return yoco's own time of each wake, and how long requests to the engine were under way in it."""
    return [(int(found[1]), int(found[2])) for found in WOKEN.finditer(log.read_text(encoding="utf-8"))]


def _handovers(reader: Reader, logged: Sequence[tuple[int, int]]) -> Iterator[Handover]:
    """Yield the hand-overs of a ledger, in its order, which is that of yoco's log. Raises NotMeasured."""
    told = iter(logged)
    ordered: dict[str, tuple[int, int]] = {}
    for row in reader.find(types={WakeOrdered.TYPE, InstanceReady.TYPE}):
        match decode(row.raw).data:
            case WakeOrdered(deadline_us=deadline_us):
                ordered[row.event_id] = row.ledger_us, deadline_us
            case InstanceReady(order=order) as ready if order in ordered:
                began_us, deadline_us = ordered[order]
                worker_us, engine_us = next(told, (0, 0))
                if worker_us != ready.t_first_token_us:
                    raise NotMeasured("yoco's log has other wakes than the ledger")
                yield Handover(ready.path, row.ledger_us - began_us, deadline_us, worker_us, engine_us)
            case _:
                pass


def _figures(run: Run, first: capacity.Handover, found: Sequence[Handover], load_before: float) -> Record:
    if len(found) != run.number:
        raise NotMeasured(f"{len(found)} of {run.number} hand-overs are in the ledger")
    return {
        "engine": "vllm-cpu" if run.engine == "vllm" else run.engine,
        "base": run.base,
        "path": ",".join(sorted({one.path for one in found})),
        "n": len(found),
        **_spread("t_first_token_ms", [one.took_us for one in found]),
        **_spread("t_worker_ms", [one.worker_us for one in found]),
        **_spread("t_engine_ms", [one.engine_us for one in found]),
        **_spread("control_plane_ms", [one.own_us for one in found]),
        "deadline_ms": found[0].deadline_us / US_PER_MS,
        "deadline_met_ppm": sum(one.took_us <= one.deadline_us for one in found) * PPM // len(found),
        "t_first_load_ms": first.took_us / US_PER_MS,
        "cores": os.cpu_count(),
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def _spread(name: str, values_us: Sequence[int]) -> Record:
    return {
        f"{name}_p50": quantile(values_us, 0.5, US_PER_MS),
        f"{name}_p99": quantile(values_us, 0.99, US_PER_MS),
        f"{name}_max": quantile(values_us, 1.0, US_PER_MS),
    }


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("fake", "vllm"))
    parser.add_argument("--base", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("-n", type=int, default=200)
    return parser.parse_args(argv)


def _runs(found: argparse.Namespace, folder: Path) -> list[Run]:
    chosen = EVERY if found.engine is None else [(found.engine, found.base, found.n)]
    return [
        Run(cast("EngineKind", engine), cast("BaseKind", base), number, folder / f"{engine}-{base}")
        for engine, base, number in chosen
    ]


def main() -> int:
    """Measure what is asked for; an object is printed as soon as it is known."""
    quiet()
    with tempfile.TemporaryDirectory(prefix="kite-handover-") as folder:
        for run in _runs(_arguments(sys.argv[1:]), Path(folder)):
            run.folder.mkdir()
            try:
                print(json.dumps(asyncio.run(measured(run))), flush=True)
            except KiteError as error:
                say(f"error: {error}\n\nhint: {error.hint}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
