"""How much a leader takes: a real bus that syncs every message, a real arbitrator and a publisher, on the same cores.

The ledger begins with the rows that brought the fleet up. Then come the windows alone, as fast as the ledger takes
them, and then facts and requests alone, as many as are wanted: those of the run again and again, under new ids.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TypedDict, cast

import psutil
from fleet import ORIGIN, Made, arbitrator, processor_s, say, share, short
from publisher import Item, save

from kite.bus import Bus, EmbeddedServer, evt_subject, tel_subject
from kite.clock import US_PER_S
from kite.events import compose
from kite.ledger import Ledger, Reader
from kite.testing.eventually import eventually
from kite_schemas.telemetry import Window

SETTLE_S = 60.0  # how long the rest of what was published may take


class Sustained(TypedDict):
    """What one flood of events came to. `cpu_us` is what each process used for one event."""

    per_s: float
    published: int
    lost: int
    decisions_share: float
    decisions: dict[str, int]
    cpu_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Flood:
    """A file of events to publish, and their ids."""

    path: Path
    ids: frozenset[str]


def windows(rows: Sequence[Made], path: Path) -> Flood:
    """Write the windows of a run, in their order, with the ids that they have."""
    found = [one for one in rows if isinstance(one.data, Window)]
    items: list[Item] = [
        (tel_subject(one.draft.subject.partition("/")[2]), one.draft.event_id, one.draft.raw) for one in found
    ]
    return _flood(items, path)


def facts(rows: Sequence[Made], number: int, path: Path) -> Flood:
    """Write facts and requests of a run, again and again under new ids, until there are enough."""
    found = [one for one in rows if one.data.KIND in {"fact", "request"} and not isinstance(one.data, Window)]
    items: list[Item] = []
    for one in islice(cycle(found), number):
        event = compose(one.draft.subject, one.data, ORIGIN)
        items.append((evt_subject(event.header.type, event.header.subject), event.header.id, event.raw))
    return _flood(items, path)


def _flood(items: Sequence[Item], path: Path) -> Flood:
    save(path, items)
    return Flood(path, frozenset(event_id for _, event_id, _ in items))


async def saturated(begun: Sequence[Made], floods: Sequence[Flood], folder: Path) -> list[Sustained]:
    """Let a new arbitrator lead a ledger that begins with some rows, and flood it with one file after the other."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    with Ledger.open(url) as ledger:
        ledger.append([one.draft for one in begun])
    async with EmbeddedServer(folder / "nats") as server, await Bus.connect(server.url, "bench") as bus:
        await bus.provision()
        async with arbitrator(server, url) as leader:
            await eventually(lambda: _head(url) > len(begun), SETTLE_S)
            processes = {"arbitrator": leader, "bus": psutil.Process(server.pid)}
            return [await _flooded(flood, server.url, url, processes) for flood in floods]


async def _flooded(flood: Flood, bus_url: str, url: str, processes: dict[str, psutil.Process]) -> Sustained:
    begin, used_s = _head(url), processor_s(processes)
    publisher = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("publisher.py")),
        str(flood.path),
        bus_url,
        url,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await publisher.communicate()
    told = cast("dict[str, float]", json.loads(out.splitlines()[-1]))
    published = int(told["published"])
    with suppress(AssertionError):
        await eventually(lambda: _head(url) >= begin + published, SETTLE_S)
        await eventually(lambda: _kept(url, begin, flood)[0] >= published, SETTLE_S)
    spent_s = {name: now_s - used_s[name] for name, now_s in processor_s(processes).items()}
    spent_s["publisher"] = told["cpu_s"]
    kept, took_us, decided = _kept(url, begin, flood)
    say(f"saturation: {kept} of {published} in {took_us // 1_000} ms")
    return Sustained(
        per_s=round((kept - 1) * US_PER_S / took_us, 1),
        published=published,
        lost=published - kept,
        decisions_share=share(sum(decided.values()), kept),
        decisions=short(decided),
        cpu_us={name: round(used_s * US_PER_S / published, 1) for name, used_s in spent_s.items()},
    )


def _head(url: str) -> int:
    with Reader.open(url) as reader:
        return reader.head.pos


def _kept(url: str, begin: int, flood: Flood) -> tuple[int, int, Counter[str]]:
    """Return how many of a flood the ledger has, the µs between its first and its last row, and what was decided."""
    times_us: list[int] = []
    decided: Counter[str] = Counter()
    with Reader.open(url) as reader:
        for row in reader.find(first=begin + 1):
            if row.event_id in flood.ids:
                times_us.append(row.ledger_us)
            elif not row.bus_stream and not row.type.startswith("kite.ledger."):
                decided[row.type] += 1
    return len(times_us), times_us[-1] - times_us[0] if times_us else 0, decided
