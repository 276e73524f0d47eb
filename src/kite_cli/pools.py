"""`kite yoco pool`: what each pool should hold and holds, how fast its paths are, and when it is prewarmed next."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

from kite_arbitrator.records import Instance, Passage, pool_subject
from kite_arbitrator.rules.v1.paths import offer_of
from kite_arbitrator.state import State, instances_of, passage_key, stale
from kite_cli.output import Record, duration, percent
from kite_schemas.model import PPM
from kite_schemas.policy import Pool
from kite_schemas.why import Reason
from kite_schemas.yoco import EngineOffer, Path, PathOffer, Source
from kite_schemas.yoco import State as Life

POOLS = ("POOL", "NODE", "READY", "STANDBY", "PREWARMED", "STANDBYS SLEEP", "OFFERED", "PREWARMS")
PATHS = ("POOL", "NODE", "PATH", "READY", "ON TIME", "P50", "P99", "EXPECTED", "SOURCE")
SHOWN_PER_PART = 2
PERCENTILES = 100


@dataclass(frozen=True, slots=True)
class Way:
    """One path of a pool: what was counted on it, and how fast it is expected to be. Durations in ledger time."""

    path: Path
    ready: int
    met: int
    missed: int
    took_us: tuple[int, ...]
    expected_us: int | None
    source: Source | None

    @property
    def on_time_ppm(self) -> int | None:
        """Share of what had a deadline and met it, None without any."""
        judged = self.met + self.missed
        return self.met * PPM // judged if judged else None

    @property
    def p50_us(self) -> int | None:
        """Median of the last durations, None without any."""
        return percentile(self.took_us, 50)

    @property
    def p99_us(self) -> int | None:
        """99th percentile of the last durations, the longest while there are few."""
        return percentile(self.took_us, 99)


@dataclass(frozen=True, slots=True)
class Prewarm:
    """When spares are prewarmed: `interval_us` is None when the rule is off, `due_us` 0 when one may be ordered now.

    `blocked` is empty, or why none is ordered.
    """

    interval_us: int | None
    due_us: int
    blocked: str


def percentile(values: Sequence[int], share: int) -> int | None:
    """Return a percentile of some values, between two of them in proportion.

    >>> percentile([], 50), percentile([7], 99), percentile([1, 2, 3], 50)
    (None, 7, 2)
    """
    if len(values) < SHOWN_PER_PART:
        return values[0] if values else None
    return round(quantiles(values, n=PERCENTILES, method="inclusive")[share - 1])


def pools(state: State, base: str | None = None) -> list[Pool]:
    """Return the pools of the policy, in its order; those of one base, if it is named."""
    found = state.policy.fleet.pools if state.policy else ()
    return [pool for pool in found if base in (None, pool.spec.served_name)]


def offer(state: State, pool: Pool) -> EngineOffer | None:
    """Return what the pool's engine can do on its node, None while the node has not said."""
    node = state.nodes.get(pool.node)
    return offer_of(node, pool.spec.kind)


def ways(state: State, pool: Pool) -> list[Way]:
    """Return the paths that were taken or are offered, the fastest kind first."""
    found = offer(state, pool)
    return [way for path in Path if (way := _way(state, pool, path, found.paths if found else ())) is not None]


def _way(state: State, pool: Pool, path: Path, offered: Iterable[PathOffer]) -> Way | None:
    known = state.passages.get(passage_key(pool.node, pool.spec.served_name, path))
    best = min((one for one in offered if one.path is path), key=lambda one: one.expected_us, default=None)
    if known is None and best is None:
        return None
    counted = known or Passage(node=pool.node, base=pool.spec.served_name, path=path)
    expected_us, source = (best.expected_us, best.source) if best else (None, None)
    if counted.took_us:  # as the arbitrator chooses: what was measured last goes before what is offered
        expected_us, source = sorted(counted.took_us)[len(counted.took_us) // 2], Source.MEASURED
    return Way(path, counted.ready, counted.met, counted.missed, counted.took_us, expected_us, source)


def prewarm(state: State, pool: Pool) -> Prewarm:
    """Return when the pool's spares are prewarmed next, and what is in the way of it."""
    interval_us = _interval_us(state, pool)
    last_us = state.prewarmed_us.get(pool_subject(pool.node, pool.spec.served_name))
    due_us = 0 if last_us is None or interval_us is None else max(0, last_us + interval_us - state.now_us)
    return Prewarm(interval_us, due_us, _blocked(state, pool))


def _interval_us(state: State, pool: Pool) -> int | None:
    if state.policy is None:
        return None
    yoco = state.policy.yoco
    critical_us = yoco.prewarm_interval_critical_us if pool.critical else None
    return critical_us or yoco.prewarm_interval_us


def _blocked(state: State, pool: Pool) -> str:
    if pool.node in state.blocks:
        return f"{Reason.PREWARM_BLOCKED} for {duration(state.now_us - state.blocks[pool.node])}: {pool.node} sheds"
    if pool.node not in state.nodes:
        return f"{pool.node} is not registered"
    if stale(state, pool.node):
        return f"{Reason.STALE}: the windows of {pool.node} are too old to act on"
    return ""


def records(state: State, found: Iterable[Pool]) -> list[Record]:
    """Return each pool as JSON."""
    return [_record(state, pool) for pool in found]


def _record(state: State, pool: Pool) -> dict[str, object]:
    offered, due = offer(state, pool), prewarm(state, pool)
    return {
        "kind": "pool",
        "pool": pool_subject(pool.node, pool.spec.served_name),
        "base": pool.spec.served_name,
        "node": pool.node,
        "wanted": {"ready": pool.ready, "standbys": pool.standbys, "prewarmed": pool.prewarmed or 0},
        "found": _found(state, pool),
        "standby_mode": pool.standby_mode,
        "engine": {"kind": pool.spec.kind, "version": offered.version if offered else None},
        "modes": list(offered.modes) if offered else [],
        "lacks": {lack.mode: lack.reason for lack in offered.lacks} if offered else {},
        "paths": [_path(way) for way in ways(state, pool)],
        "prewarm": {
            "critical": bool(pool.critical),
            "interval_us": due.interval_us,
            "due_us": due.due_us,
            "blocked": due.blocked or None,
        },
    }


def signature(state: State, found: Iterable[Pool]) -> list[object]:
    """Return what is to be drawn again when it changes: of what runs by itself only whether it is over."""
    dues = ((pool, prewarm(state, pool)) for pool in found)
    return [
        ({**_record(state, pool), "prewarm": None}, bool(due.due_us), due.interval_us, bool(due.blocked))
        for pool, due in dues
    ]


def _path(way: Way) -> Record:
    return {
        "path": way.path,
        "ready": way.ready,
        "met": way.met,
        "missed": way.missed,
        "on_time_ppm": way.on_time_ppm,
        "p50_us": way.p50_us,
        "p99_us": way.p99_us,
        "expected_us": way.expected_us,
        "source": way.source,
    }


def _found(state: State, pool: Pool) -> dict[str, int]:
    """Count what there is: awake, asleep and prewarmed instances, those on the way, and those that failed."""
    instances = instances_of(state, pool)
    ill = (Life.FAILED, Life.QUARANTINED)
    counts = {life: sum(one.state is life for one in instances) for life in (Life.READY, Life.ASLEEP, Life.PREWARMED)}
    failed = sum(one.state in ill for one in instances)
    there = sum(one.state is not Life.ABSENT for one in instances)
    return {
        "ready": counts[Life.READY],
        "asleep": counts[Life.ASLEEP],
        "prewarmed": counts[Life.PREWARMED],
        "parked": sum(one.parked for one in instances),
        "under_way": there - sum(counts.values()) - failed,
        "failed": failed,
    }


def rows(state: State, found: Iterable[Pool]) -> list[tuple[str, ...]]:
    """Return each pool as cells; a count is what there is of what there should be."""
    return [_row(state, pool) for pool in found]


def _row(state: State, pool: Pool) -> tuple[str, ...]:
    offered, counts = offer(state, pool), _found(state, pool)
    return (
        pool.spec.served_name,
        pool.node,
        f"{_serving(state, pool)}/{pool.ready}",
        f"{counts['asleep']}/{pool.standbys}",
        f"{counts['prewarmed']}/{pool.prewarmed or 0}",
        pool.standby_mode,
        ", ".join(offered.modes) if offered else "not told",
        _due(pool, prewarm(state, pool)),
    )


def _serving(state: State, pool: Pool) -> int:
    return sum(one.state is Life.READY for one in instances_of(state, pool))


def _due(pool: Pool, found: Prewarm) -> str:
    if found.blocked:
        return f"blocked: {found.blocked}"
    if not pool.prewarmed:
        return "none kept"
    if found.interval_us is None:
        return "off: yoco.prewarm_interval_us is unset"
    return f"every {duration(found.interval_us)}, next {f'in {duration(found.due_us)}' if found.due_us else 'at need'}"


def path_rows(state: State, found: Iterable[Pool]) -> list[tuple[str, ...]]:
    """Return each path of each pool as cells."""
    return [
        (
            pool.spec.served_name,
            pool.node,
            way.path,
            str(way.ready),
            "" if way.on_time_ppm is None else f"{percent(way.on_time_ppm)} of {way.met + way.missed}",
            *(_span(us) for us in (way.p50_us, way.p99_us, way.expected_us)),
            way.source or "",
        )
        for pool in found
        for way in ways(state, pool)
    ]


def _span(us: int | None) -> str:
    return "" if us is None else duration(us)


def notes(state: State, found: Iterable[Pool]) -> Iterator[str]:
    """Yield what an engine cannot do and why, and who was drained by somebody."""
    for pool in found:
        base = pool.spec.served_name
        for lack in offered.lacks if (offered := offer(state, pool)) else ():
            yield f"{base} on {pool.node} cannot sleep by {lack.mode}: {lack.reason}"
        for one in _parked(instances_of(state, pool)):
            yield f"{one.id} is parked: `kite yoco order {base} --instance {one.id}` takes it back into service"


def _parked(instances: Iterable[Instance]) -> Iterator[Instance]:
    return (one for one in instances if one.parked)
