"""What deciding costs: `python benchmarks/decide.py [--nodes 100] [--seconds 20] [--profile calm] [--seed 1]`.

A synthetic fleet (kite.testing.load) sends full windows, ten a second from each node, and facts and requests that lead
to decisions. First the core alone: each call of `step` is timed. Then the whole: a real bus, a real arbitrator in its
own process with a SQLite ledger on disk, and this process as all nodes, workers and people at once, on the same cores.
There, latency is from the publication of an event until a decision that it caused has come back over the bus, and
`lost` is how many windows the bus took that the ledger does not have. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
from fleet import (
    ORIGIN,
    WARM_S,
    Core,
    arbitrator,
    ended,
    kind_of,
    leading,
    processor_s,
    quantile,
    say,
    share,
    short,
    world,
)

from kite.bus import DEC, Bus, EmbeddedServer, evt_subject, tel_subject
from kite.clock import NS_PER_US, US_PER_S, mono_us, wall_us
from kite.errors import KiteError
from kite.events import compose
from kite.ledger import Reader
from kite.testing.eventually import eventually
from kite.testing.load import PROFILES, Input, World, run
from kite_schemas.envelope import decode
from kite_schemas.telemetry import Window

START_US = US_PER_S
PACE_S = 0.001
SETTLE_S = 30.0
FLIGHTS_MAX = 4_096  # messages that the bus has not acknowledged: then it does not keep up, and the load is late


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    nodes: int
    seconds: float
    profile: str
    seed: int

    def world(self, start_us: int) -> World:
        """Return the fleet of both parts."""
        return world(self.nodes, self.profile, self.seed, start_us)


# --- the core alone


def stepped(options: Options) -> dict[str, object]:
    """Step over a synthetic ledger and return how long that took."""
    fleet, alone = options.world(START_US), Core()
    warm_us = alone.warm(fleet, START_US)
    for _ in run(fleet, warm_us + int(options.seconds * US_PER_S), alone.tell):
        pass
    every = [span for spans in alone.spans_ns.values() for span in spans]
    say(f"core: {len(every)} steps, {sum(took for took, _ in every) // NS_PER_US // 1_000} ms")
    whole = spread(every)
    return {
        "step_us_p50": whole["p50"],
        "step_us_p99": whole["p99"],
        "step_cpu_us_p50": whole["cpu_p50"],
        "step_cpu_us_p99": whole["cpu_p99"],
        "step_us": {kind: spread(spans) for kind, spans in sorted(alone.spans_ns.items())},
        "step_decisions_share": share(sum(alone.decided.values()), len(every)),
        "step_decisions": short(alone.decided),
    }


def spread(spans_ns: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return quantiles in µs: what the clock says, and the processor's time, which other processes do not lengthen."""
    took, used = [took for took, _ in spans_ns], [used for _, used in spans_ns]
    by_clock = {f"p{share}": quantile(took, share / 100, NS_PER_US) for share in (50, 99)}
    of_cpu = {f"cpu_p{share}": quantile(used, share / 100, NS_PER_US) for share in (50, 99)}
    return {**by_clock, **of_cpu, "steps": len(spans_ns)}


# --- the whole


@dataclass(slots=True)
class Fleet:
    """All nodes, workers and people in one process: publishes what they say, hears what is decided.

    Windows have a connection of their own, as they never wait for a fact to be safe on the bus's disk.
    """

    facts: Bus
    windows: Bus
    world: World
    measuring: bool = False
    published: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    decided: Counter[str] = field(default_factory=Counter[str])
    sent_us: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    answered_us: dict[str, int] = field(default_factory=dict[str, int])
    flights: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    late_us: int = 0

    async def speak(self) -> None:
        """Publish what is due, for ever; nobody waits for an acknowledgement before the next event."""
        while True:
            due_us = wall_us()
            for one in self.world.inputs(due_us):
                flight = asyncio.create_task(self._send(one))
                self.flights.add(flight)
                flight.add_done_callback(self.flights.discard)
                self.late_us = max(self.late_us, wall_us() - one.at_us)
            await asyncio.sleep(PACE_S)
            if len(self.flights) > FLIGHTS_MAX:
                await asyncio.wait({next(iter(self.flights))})

    async def hear(self) -> None:
        """Answer the orders, and measure, for ever."""
        async with aclosing(self.facts.follow(DEC, after_seq=0)) as followed:
            async for message in followed:
                here_us = mono_us()
                event = decode(message.payload)
                header, data = event.header, event.data
                if data is not None:
                    self.world.answer(wall_us(), header.id, header.subject, data)
                self.decided[header.type] += 1
                self.answered_us[header.causationid or ""] = here_us  # the last decision of an event is what counts

    def latencies_us(self) -> dict[str, list[int]]:
        """Return, by kind of event, how long it took from its publication until all its decisions were back."""
        found: dict[str, list[int]] = {}
        for event, (sent_us, kind) in self.sent_us.items():
            if event in self.answered_us:
                found.setdefault(kind, []).append(self.answered_us[event] - sent_us)
        return found

    async def _send(self, one: Input) -> None:
        window = one.data if isinstance(one.data, Window) else None
        event = compose(one.subject, one.data, ORIGIN)
        subject = tel_subject(window.node) if window else evt_subject(event.header.type, event.header.subject)
        if self.measuring:
            self.sent_us[event.header.id] = (mono_us(), kind_of(one.data))
        try:
            await (self.windows if window else self.facts).publish(subject, event.raw, event.header.id)
        except KiteError:
            self.failed[one.data.TYPE] += 1
        else:
            self.published[one.data.TYPE] += 1


def windows_in(url: str) -> int:
    """Return how many windows the ledger has."""
    with Reader.open(url) as reader:
        return sum(1 for _ in reader.find(types=[Window.TYPE]))


async def drained(fleet: Fleet, url: str) -> int:
    """Wait until the ledger has every window that the bus took; return how many it lacks."""
    await asyncio.gather(*fleet.flights)
    taken = fleet.published[Window.TYPE]
    with suppress(AssertionError):
        await eventually(lambda: windows_in(url) >= taken, SETTLE_S)
    return taken - windows_in(url)


async def measured(fleet: Fleet, processes: Mapping[str, psutil.Process], options: Options) -> dict[str, object]:
    """Let the fleet come up, then measure a span."""
    await asyncio.sleep(WARM_S)
    say(f"whole: {sum(fleet.decided.values())} decisions to bring the fleet up")
    before, decided = fleet.published.copy(), fleet.decided.copy()
    fleet.measuring, fleet.late_us = True, 0
    began_us, began_s = mono_us(), processor_s(processes)
    await asyncio.sleep(options.seconds)
    took_us, used_s = mono_us() - began_us, {name: now - began_s[name] for name, now in processor_s(processes).items()}
    inputs, made = fleet.published - before, fleet.decided - decided
    latencies_us = fleet.latencies_us()
    spans = [span for found in latencies_us.values() for span in found]
    return {
        "p50_ms": quantile(spans, 0.5, 1_000),
        "p99_ms": quantile(spans, 0.99, 1_000),
        "max_ms": quantile(spans, 1.0, 1_000),
        "rate": round(inputs[Window.TYPE] * US_PER_S / took_us),
        "latency_ms": {
            kind: {"p50": quantile(found, 0.5, 1_000), "p99": quantile(found, 0.99, 1_000), "events": len(found)}
            for kind, found in sorted(latencies_us.items())
        },
        "facts_per_s": round((sum(inputs.values()) - inputs[Window.TYPE]) * US_PER_S / took_us, 1),
        "decisions_share": share(sum(made.values()), sum(inputs.values())),
        "decisions": short(made),
        "publisher_late_ms_max": round(fleet.late_us / 1_000, 1),
        "cpu_share": {name: round(used * US_PER_S / took_us, 3) for name, used in used_s.items()},
    }


async def whole(options: Options, folder: Path) -> dict[str, object]:
    """Run a bus, an arbitrator and a fleet, and measure."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    async with (
        EmbeddedServer(folder / "nats") as server,
        await Bus.connect(server.url, "facts") as bus,
        await Bus.connect(server.url, "windows") as windows,
    ):
        await bus.provision()
        async with arbitrator(server, url) as process:
            await leading(bus)
            fleet = Fleet(bus, windows, options.world(wall_us()))
            tasks = [asyncio.create_task(fleet.hear()), asyncio.create_task(fleet.speak())]
            processes = {"arbitrator": process, "bus": psutil.Process(server.pid), "publisher": psutil.Process()}
            found = await measured(fleet, processes, options)
            await ended(tasks[1:])
            lost = await drained(fleet, url)
            await ended(tasks[:1])
    figures = {"windows": fleet.published[Window.TYPE], "lost": lost, "refused_by_bus": sum(fleet.failed.values())}
    return {**found, **figures, "ledger_bytes": (folder / "ledger.db").stat().st_size}


def main() -> int:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100, help="each sends ten windows a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part, after a warm-up of 15")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="calm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["core", "whole"], help="one of the two parts")
    parsed = parser.parse_args()
    options = Options(
        cast("int", parsed.nodes),
        cast("float", parsed.seconds),
        cast("str", parsed.profile),
        cast("int", parsed.seed),
    )
    print(json.dumps(figures(options, cast("str | None", parsed.only))))
    return 0


def figures(options: Options, only: str | None) -> dict[str, object]:
    """Measure what was asked for."""
    before = os.getloadavg()
    found: dict[str, object] = {}
    if only != "whole":
        found |= stepped(options)
    if only != "core":
        with tempfile.TemporaryDirectory(prefix="kite-bench-") as folder:
            found |= asyncio.run(whole(options, Path(folder)))
    return {
        **found,
        "nodes": options.nodes,
        "seconds": options.seconds,
        "profile": options.profile,
        "seed": options.seed,
        "load_average": [round(value, 2) for value in (before[0], os.getloadavg()[0])],
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    sys.exit(main())
