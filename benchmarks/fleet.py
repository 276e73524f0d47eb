"""What the benchmarks share: a synthetic fleet, a core that decides about it, an arbitrator in its own process."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import TypeAlias
from uuid import UUID, uuid5

import psutil

from kite.bus import DEC, Bus, EmbeddedServer
from kite.clock import US_PER_S, parse_us, wall_us
from kite.events import Origin, compose
from kite.launch import command
from kite.ledger import Draft
from kite.testing.load import PROFILES, Input, Size, World, run
from kite_arbitrator import core, pace, shipped
from kite_arbitrator.records import Row
from kite_arbitrator.routing import destination
from kite_arbitrator.state import State
from kite_schemas.ledger import Created, Tick
from kite_schemas.model import PPM, Data
from kite_schemas.policy import ChangeRequested
from kite_schemas.telemetry import Window

LEDGER = "00000000-0000-4000-8000-000000000001"
ORIGIN = Origin("kite/load/bench", "load@0")
WARM_S = 15.0  # all instances of the fleet start, the standbys fall asleep, the first blends are promoted
LEADING_S = 30.0
LOOK_US = 100_000  # how often the pace of the ticks is looked at, at least
UNMOVED = {
    "arbitration.fragmentation_max_ppm": PPM,
    "arbitration.hit_rate_min_ppm": 0,
    "arbitration.latency_sigma_max_us": 3_600_000_000,
}
"""Limits that only a benchmark's own load would cross, out of its way."""

SETTINGS = {"arbitration.concurrency_max": 8, "arbitration.injection_rate_max_milli": 60_000}

Answered: TypeAlias = tuple[int, str, str, Data]
"""A decision: ledger time in µs, id, subject, data."""

Kept: TypeAlias = Callable[[Row, Sequence[Row]], None]
"""Takes an input as the ledger has it, and the decisions that directly follow it."""


def world(nodes: int, profile: str, seed: int, start_us: int) -> World:
    """Return a fleet with one base for ten nodes."""
    size = Size(nodes=nodes, bases=max(1, nodes // 10))
    return World(size, PROFILES[profile], seed, start_us=start_us, settings=SETTINGS)


def quantile(values: Iterable[int], share: float, unit: int) -> float:
    """Return a quantile in another unit, with a tenth's precision; 0 of none."""
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(len(ranked) * share))] / unit, 1) if ranked else 0.0


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)


def kind_of(data: Data) -> str:
    """Return the kind of an input: windows and ticks apart from facts and requests."""
    return "window" if isinstance(data, Window) else "tick" if isinstance(data, Tick) else data.KIND


def share(decisions: int, inputs: int) -> float:
    """Return the share of the decisions among all rows."""
    return round(decisions / (decisions + inputs), 4) if inputs else 0.0


def short(counts: Counter[str]) -> dict[str, int]:
    """Return counts by the short name of their type."""
    return {name.split(".", 1)[1].rsplit(".", 1)[0]: number for name, number in sorted(counts.items())}


@dataclass(slots=True)
class Core:
    """The core, and how long its steps took, in ns by the clock and of the processor, by kind of input."""

    state: State = field(default_factory=core.initial)
    kept: Kept | None = None
    spans_ns: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    decided: Counter[str] = field(default_factory=Counter[str])
    ticked_us: int = 0
    looked_us: int = 0

    def begin(self, at_us: int) -> None:
        """Create the ledger and its policy."""
        self.tell(Input(at_us, "ledger/fleet", Created(ledger=LEDGER, format=core.FORMAT)))
        self.tell(Input(at_us + 1, "policy/fleet", ChangeRequested(actor="bench", policy=shipped.policy())))

    def warm(self, fleet: World, start_us: int) -> int:
        """Bring a fleet up, and begin to measure; return when that is, in µs of ledger time."""
        self.begin(start_us - 2)
        warm_us = start_us + int(WARM_S * US_PER_S)
        for _ in run(fleet, warm_us, self.tell):
            pass
        say(f"core: {sum(self.decided.values())} decisions to bring {len(self.state.instances)} instances up")
        self.spans_ns.clear()
        self.decided.clear()
        return warm_us

    def tell(self, one: Input) -> list[Answered]:
        """Let the core decide about an input, and before it about the time that has passed, at the service's pace."""
        if one.at_us - self.looked_us < LOOK_US:
            return self._step(one)
        self.looked_us = one.at_us
        if one.at_us - self.ticked_us < pace.tick_us(self.state):
            return self._step(one)
        self.ticked_us = one.at_us
        return self._step(Input(one.at_us, "ledger/fleet", Tick())) + self._step(one)

    def _step(self, one: Input) -> list[Answered]:
        pos = self.state.pos + 1
        row = Row(
            pos=pos,
            id=str(uuid5(UUID(LEDGER), f"row {pos}")),
            type=one.data.TYPE,
            subject=one.subject,
            ledger_us=max(one.at_us, self.state.now_us + 1),
            data=one.data,
        )
        began_ns, used_ns = perf_counter_ns(), thread_time_ns()
        self.state, decisions = core.step(self.state, row)
        used_ns, took_ns = thread_time_ns() - used_ns, perf_counter_ns() - began_ns
        self.spans_ns.setdefault(kind_of(one.data), []).append((took_ns, used_ns))
        self.decided.update(decision.type for decision in decisions)
        if self.kept is not None:
            self.kept(row, decisions)
        return [(d.ledger_us, d.id, d.subject, d.data) for d in decisions if d.data is not None]


@dataclass(frozen=True, slots=True)
class Made:
    """One row to be: an input, or a decision with its subject on the bus."""

    draft: Draft
    data: Data
    send: str = ""


@dataclass(slots=True)
class Events:
    """All rows of a run of the load generator. `warm` is how many brought the fleet up, which is not measured."""

    rows: list[Made] = field(default_factory=list[Made])
    warm: int = 0

    @property
    def begun(self) -> list[Made]:
        """Return what brought the fleet up."""
        return self.rows[: self.warm]

    @property
    def measured(self) -> list[Made]:
        """Return what came then."""
        return self.rows[self.warm :]

    def keep(self, row: Row, decisions: Sequence[Row]) -> None:
        """Take an input and its decisions as the arbitrator would write them."""
        cause = self._put(row, None)
        for decision in decisions:
            self._put(decision, cause)

    def _put(self, row: Row, cause: Made | None) -> Made:
        """Add a row; an input gets an id as producers make them, in the order of time."""
        assert row.data is not None  # noqa: S101 # the generator knows every type
        event_id, of = (row.id, cause.draft.event_id) if cause else (None, None)
        event = compose(row.subject, row.data, ORIGIN, event_id=event_id, correlation=of, causation=of)
        draft = Draft(
            event_id=event.header.id,
            type=row.type,
            subject=row.subject,
            occurred_us=parse_us(event.header.time),
            ledger_us=row.ledger_us,
            raw=event.raw,
        )
        made = Made(draft, row.data, destination(row) if cause else "")
        self.rows.append(made)
        return made


def generated(nodes: int, profile: str, seed: int, seconds: float) -> Events:
    """Run the load generator against a core; the fleet is up about now, and runs on for `seconds` of ledger time."""
    start_us = wall_us() - int(WARM_S * US_PER_S)
    fleet, events = world(nodes, profile, seed, start_us), Events()
    alone = Core(kept=events.keep)
    warm_us = alone.warm(fleet, start_us)
    events.warm = len(events.rows)
    for _ in run(fleet, warm_us + int(seconds * US_PER_S), alone.tell):
        pass
    return events


@asynccontextmanager
async def arbitrator(server: EmbeddedServer, ledger_url: str) -> AsyncGenerator[psutil.Process]:
    """Run an arbitrator in a process of its own, which makes sure that the bus syncs what it acknowledges."""
    environment = {
        "KITE_NATS_URL": server.url,
        "KITE_NATS_MONITOR_URL": server.monitor_url,
        "KITE_LEDGER_URL": ledger_url,
        "KITE_LOG_LEVEL": "warning",
    }
    process = await asyncio.create_subprocess_exec(
        *command([sys.executable, "-m", "kite_arbitrator"]), env={**os.environ, **environment}
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def leading(bus: Bus) -> None:
    """Wait for the first decision: the policy that a new ledger begins with."""
    async with asyncio.timeout(LEADING_S), aclosing(bus.follow(DEC, after_seq=0)) as followed:
        await anext(followed)


def processor_s(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Return the processor time of each process, in seconds."""
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End tasks that run for ever; what ended one of them before is raised."""
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
