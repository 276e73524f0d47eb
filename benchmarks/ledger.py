"""What keeping costs: `python benchmarks/ledger.py [--seconds 25] [--repeats 3] [--seed 1] [--quick]`.

A synthetic fleet of 100 nodes (kite.testing.load) and a core make a ledger's worth of events: full windows, facts,
requests, ticks, and the decisions that follow. Then, on the same events:

- KITE's durable append in batches of 1 000, on SQLite and on PostgreSQL: rows are hashed into the chain, decisions put
  into the outbox, and each batch is one transaction with its fsync;
- `eventsourcing` in three ways, on SQLite: its application saves 1 000 events a call (`eventsourcing_save_…`, what the
  ratio is taken from), it saves one event a call, and its recorder alone inserts 1 000 events a call that are ready;
- saturation: a real bus that syncs every message, a real arbitrator and a publisher, each a process of its own, on the
  same cores; first windows only, then facts and requests only, as fast as the ledger takes them.

Figures are medians over the repeats. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter_ns
from typing import TypeAlias, cast

import peers
import saturation
from fleet import Events, Made, generated, quantile, say, share, short
from spending import Spent, spending

from kite.clock import NS_PER_US
from kite.ledger import Ledger, Outgoing
from kite.testing.load import PROFILES
from kite.testing.postgres import Postgres, PostgresFailed
from kite_schemas.telemetry import Window

BATCH = 1_000
SINGLES = 2_000  # events that are saved one by one: each waits for the disk
SYNCS = 200
SYNC_BYTES = 4_096


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    nodes: int
    seconds: float
    facts: int
    repeats: int
    profile: str
    seed: int

    @classmethod
    def quick(cls, seed: int) -> "Options":
        """Return a run that shows that everything works, and measures nothing worth reading."""
        return cls(nodes=10, seconds=3.0, facts=200, repeats=1, profile="calm", seed=seed)


Way: TypeAlias = Callable[[Path], Spent]
"""Saves all events in a folder of its own."""


def described(rows: Sequence[Made]) -> dict[str, object]:
    """Say what the events are."""
    decisions = sum(bool(one.send) for one in rows)
    return {
        "events": len(rows),
        "mean_bytes": round(mean(len(one.draft.raw) for one in rows)),
        "window_bytes": round(mean(len(one.draft.raw) for one in rows if isinstance(one.data, Window))),
        "decisions_share": share(decisions, len(rows) - decisions),
        "mix": short(Counter(one.draft.type for one in rows)),
    }


def appended(rows: Sequence[Made], url: str) -> Spent:
    """Append everything to a new ledger, as the arbitrator does."""
    batches = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
    loads = [([one.draft for one in batch], _sends(batch)) for batch in batches]
    with Ledger.open(url) as ledger, spending(len(rows)) as spent:
        for drafts, sends in loads:
            ledger.append(drafts, sends=sends)
    return spent[0]


def _sends(batch: Sequence[Made]) -> list[Outgoing]:
    return [Outgoing(draft=index, subject=one.send) for index, one in enumerate(batch) if one.send]


def ways(rows: Sequence[Made], server: Postgres | None) -> dict[str, Way]:
    """Return each way to save the events, by the name of its figures."""
    drafts = [one.draft for one in rows]
    found: dict[str, Way] = {
        "append": lambda folder: appended(rows, f"sqlite:///{folder / 'ledger.db'}"),
        "eventsourcing_save": lambda folder: peers.saved(drafts, folder),
        "eventsourcing_single_save": lambda folder: peers.saved(drafts[:SINGLES], folder, 1),
        "eventsourcing_recorder": lambda folder: peers.recorded(drafts, folder),
    }
    if server is not None:
        found["append_pg"] = lambda folder: appended(rows, server.create_database(folder.name))
    return found


def saved(rows: Sequence[Made], repeats: int) -> dict[str, object]:
    """Save the same events in each way, one way after the other, `repeats` times; return the medians."""
    with postgres() as server:
        taken: dict[str, list[Spent]] = {}
        for _ in range(repeats):
            for name, way in ways(rows, server).items():
                with tempfile.TemporaryDirectory(prefix="kite-bench-") as folder:
                    taken.setdefault(name, []).append(way(Path(folder)))
    rates = {name: median(one.per_s for one in found) for name, found in taken.items()}
    costs = {name: median(one.cpu_us for one in found) for name, found in taken.items()}
    return {
        "append_pg_events_per_s": None,
        **{f"{name}_events_per_s": round(rate) for name, rate in rates.items()},
        **{f"{name}_cpu_us": round(cost, 1) for name, cost in costs.items()},
        "ratio_append": round(rates["append"] / rates["eventsourcing_save"], 2),
        "ratio_append_single_save": round(rates["append"] / rates["eventsourcing_single_save"], 2),
        "ratio_append_recorder": round(rates["append"] / rates["eventsourcing_recorder"], 2),
    }


@contextmanager
def postgres() -> Generator[Postgres | None]:
    """Run a PostgreSQL server, if there is one."""
    try:
        server = Postgres.start()
    except PostgresFailed as error:
        say(f"no PostgreSQL: {error}")
        yield None
        return
    with server:
        yield server


async def flooded(events: Events, options: Options) -> dict[str, object]:
    """Saturate an arbitrator, a new one for each repeat; return the medians, and the last repeat in full."""
    taken: list[list[saturation.Sustained]] = []
    with tempfile.TemporaryDirectory(prefix="kite-bench-") as place:
        folder = Path(place)
        floods = [
            saturation.windows(events.measured, folder / "windows"),
            saturation.facts(events.measured, options.facts, folder / "facts"),
        ]
        for repeat in range(options.repeats):
            own = folder / str(repeat)
            own.mkdir()
            taken.append(await saturation.saturated(events.begun, floods, own))
    telemetry, facts = zip(*taken, strict=True)
    return {
        "saturation_facts_per_s": median(one["per_s"] for one in facts),
        "saturation_telemetry_per_s": median(one["per_s"] for one in telemetry),
        "lost": sum(one["lost"] for one in (*facts, *telemetry)),
        "saturation_facts": facts[-1],
        "saturation_telemetry": telemetry[-1],
    }


def syncs_ns(folder: Path) -> list[int]:
    """Return how long the disk takes to write a page and sync it, in ns."""
    took_ns: list[int] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            began_ns = perf_counter_ns()
            file.write(bytes(SYNC_BYTES))
            file.flush()
            os.fdatasync(file.fileno())
            took_ns.append(perf_counter_ns() - began_ns)
    return took_ns


def figures(options: Options) -> dict[str, object]:
    """Measure everything."""
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kite-bench-") as folder:
        sync_us = quantile(syncs_ns(Path(folder)), 0.5, NS_PER_US)
    events = generated(options.nodes, options.profile, options.seed, options.seconds)
    return {
        **described(events.measured),
        **saved(events.measured, options.repeats),
        **asyncio.run(flooded(events, options)),
        **asdict(options),
        "fsync_us_p50": sync_us,
        "load_average": [round(value, 2) for value in (before[0], os.getloadavg()[0])],
        "cores": os.cpu_count(),
    }


def main() -> int:
    """Print one JSON object on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100, help="each sends ten windows a second")
    parser.add_argument("--seconds", type=float, default=25.0, help="of ledger time, after a warm-up of 15")
    parser.add_argument("--facts", type=int, default=12_000, help="published in each saturation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="calm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="only show that everything works")
    parsed = parser.parse_args()
    seed = cast("int", parsed.seed)
    options = (
        Options.quick(seed)
        if cast("bool", parsed.quick)
        else Options(
            nodes=cast("int", parsed.nodes),
            seconds=cast("float", parsed.seconds),
            facts=cast("int", parsed.facts),
            repeats=cast("int", parsed.repeats),
            profile=cast("str", parsed.profile),
            seed=seed,
        )
    )
    print(json.dumps(figures(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
