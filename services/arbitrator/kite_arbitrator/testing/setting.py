"""What a story is set in: engines and pools, names, and what instances tell of themselves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID, uuid5

from pydantic import JsonValue

from kite_arbitrator.records import Row
from kite_schemas.model import Data
from kite_schemas.telemetry import InstanceWindow, Source
from kite_schemas.upcycle import AdapterRef
from kite_schemas.yoco import PATHS, EngineOffer, Lack, Path, PathOffer, SleepMode
from kite_schemas.yoco import Source as Measure
from kite_schemas.yoco import State as Life

AnyData = TypeVar("AnyData", bound=Data)
LEDGER = "00000000-0000-4000-8000-000000000001"
BASE = "tiny"
NODE = "n1"
STEP_US = 200_000
WINDOW_US = 100_000
SECOND_US = 1_000_000

WALL_US = 1_767_225_600_000_000
"""Wall clock of the nodes when the ledger's time is 0."""

LAG_US, HELD_US = 1_000, 500
"""How long a window is on its way to the arbitrator, and from its sample to the bus, when nothing is wrong."""

RUNNING = frozenset({Life.READY, Life.DRAINING, Life.ASLEEP})
"""States in which an instance has a process that tells its numbers."""


def of(rows: Iterable[Row], kind: type[AnyData]) -> list[AnyData]:
    """Return what the rows of one type say."""
    return [row.data for row in rows if isinstance(row.data, kind)]


def node_of(instance: str) -> str:
    """Return the node of an instance, by its name."""
    return instance.rpartition(f"-{BASE}-")[0]


def offer(*modes: SleepMode, hot_us: int = 10_000, warm_us: int = 300_000, cold_us: int = 60_000_000) -> EngineOffer:
    """Return what an engine can do on a node: to sleep in some modes, and so long until it is ready again."""
    times_us = {mode: warm_us if mode in (SleepMode.L1, SleepMode.L2) else hot_us for mode in modes}
    wakes = (
        PathOffer(path=PATHS[mode], mode=mode, expected_us=us, source=Measure.COMPUTED) for mode, us in times_us.items()
    )
    start = PathOffer(path=Path.COLD, expected_us=cold_us, source=Measure.PUBLISHED)
    lacks = tuple(Lack(mode=mode, reason="not on this node") for mode in SleepMode if mode not in modes)
    return EngineOffer(kind="fake", version="1", modes=modes, lacks=lacks, paths=(*wakes, start))


PAUSES = offer(SleepMode.PAUSED)
"""An engine that can pause, as one on a CPU."""


def pool(node: str, ready: int, standbys: int, **fields: JsonValue) -> dict[str, JsonValue]:
    """Return a pool of fake engines, as the policy has it."""
    return {
        **fields,
        "node": node,
        "base_path": "/bases/tiny",
        "base_digest": digest_of("base"),
        "ready": ready,
        "standbys": standbys,
        "standby_mode": fields.get("standby_mode", "paused"),
        "spec": {
            "kind": "fake",
            "base_path": "/bases/tiny",
            "served_name": BASE,
            "dtype": "float32",
            "max_model_len": 128,
            "max_loras": 4,
            "max_lora_rank": 8,
            "block_size": 32,
            "kv_cache_bytes": 1 << 30,
            "cpus": "",
        },
    }


def digest_of(text: str) -> str:
    return uuid5(UUID(LEDGER), text).hex * 2


def adapter(name: str) -> AdapterRef:
    return AdapterRef(name=name, path=f"adapters/{name}", digest=digest_of(name))


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What an instance tells in one window; None is not known. By default it is inside every limit."""

    running: int | None = 1
    waiting: int | None = 0
    queries: int | None = 100
    hits: int | None = 95
    latencies_ms: Sequence[int] | None = (100, 100)
    squares: bool = True  # a page of metrics has none

    def window(self, instance: str) -> InstanceWindow:
        """Return it as the window says it."""
        known = self.latencies_ms
        return InstanceWindow(
            id=instance,
            source=Source.STAT_LOGGER if self.squares else Source.METRICS,
            running=self.running,
            waiting=self.waiting,
            cache_queries=self.queries,
            cache_hits=self.hits,
            finished=None if known is None else len(known),
            latency_sum_us=None if known is None else sum(known) * 1_000,
            latency_squares_ms2=None if known is None or not self.squares else sum(ms * ms for ms in known),
        )


Told = Mapping[str, Doing | None]
"""What instances tell, by name; None did not answer."""

HEALTHY = Doing()
IDLE = Doing(running=0, queries=0, hits=0, latencies_ms=())
