"""How a fleet is, in one sentence, from its ledger."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kite.ledger import Head, Reader
from kite_arbitrator import core
from kite_arbitrator.records import Instance, Row
from kite_arbitrator.state import State, instance_id, pressing, stale
from kite_cli.output import count, duration, moment
from kite_cli.view import telling
from kite_schemas.arbitration import Channel
from kite_schemas.ledger import DeadlineMissed, LeaseTaken, Tick
from kite_schemas.policy import Pool
from kite_schemas.yoco import State as Life

SILENT_US = 5_000_000
"""The arbitrator writes at least a tick a second."""

DAY_US = 86_400_000_000
"""How far back missed deadlines are counted, in ledger time."""

STOPPED_IN_GAP = "no sleep, drain, retire, delete or rollback"
END_OF_GAP = "kite gap acknowledge --reason …"

ILL = frozenset({Life.FAILED, Life.QUARANTINED})

RULES: dict[str, str] = {
    "upcycle.weight_decay_pressure_ppm": "another weight decay under pressure",
    "upcycle.residual_max_ppm": "recompression of what needs a higher rank than the servers hold",
    "upcycle.blend_share_max_ppm": "refusal of blends that are too large a share of their base",
    "upcycle.retention_us": "retirement of the version before",
    "upcycle.retained_share_max_ppm": "deletion of old versions",
    "upcycle.drift_interval_us": "the look at what engines hold",
    "yoco.reserve_bytes": "the memory bound of starts",
    "yoco.reserve_pressure_ppm": "the reserve under pressure",
    "yoco.prewarm_interval_us": "prewarms",
    "yoco.prewarm_interval_critical_us": "more frequent prewarms of critical pools",
    "yoco.quarantine_us": "the end of quarantine",
    "arbitration.tick_us": "the fast clock",
    "arbitration.concurrency_max": "pressure",
    "arbitration.sustained_us": "pressure",
    "arbitration.miss_jump_ppm": "pressure",
    "arbitration.fragmentation_max_ppm": "the fragmentation limit of channel and shedding",
    "arbitration.hit_rate_min_ppm": "the hit-rate limit of the channel",
    "arbitration.latency_sigma_max_us": "the latency limit of the channel",
    "arbitration.switch_window_us": "discarding jitter",
    "arbitration.injection_rate_max_milli": "shedding",
    "arbitration.idle_us": "sleep when idle",
    "arbitration.decision_deadline_us": "the watch over late decisions",
    "arbitration.sync_timeout_us": "staleness and loss of nodes",
    "arbitration.sync_timeout_reliable_us": "staleness over reliable transport",
    "arbitration.loss_max_ppm": "reliable transport",
    "arbitration.loss_windows": "reliable transport",
    "expiry.retire_us": "retirement of the version before",
    "expiry.delete_us": "deletion of old versions",
    "expiry.prewarm_us": "prewarms",
}
"""The limits that may be unset, and the rule that each of them then switches off."""


@dataclass(slots=True)
class Late:
    """Decisions that were durable after their deadline, over the last day."""

    number: int = 0
    worst_us: int = 0
    deadline_us: int = 0
    pos: int = 0

    def add(self, pos: int, data: DeadlineMissed) -> None:
        """Count one row of them."""
        self.number += 1
        self.worst_us = max(self.worst_us, data.took_us)
        self.deadline_us = data.deadline_us
        self.pos = pos

    def record(self) -> dict[str, object]:
        """Return it as JSON; `pos` is the last row of them, null without one."""
        return {
            "number": self.number,
            "worst_us": self.worst_us,
            "deadline_us": self.deadline_us or None,
            "pos": self.pos or None,
        }


@dataclass(slots=True)
class Seen:
    """What the rows told: the state, and what the state does not keep."""

    state: State = field(default_factory=core.initial)
    holder: str = ""
    tick_us: int | None = None
    late: Late = field(default_factory=Late)


@dataclass(frozen=True, slots=True)
class Health:
    """A fleet at one moment: `verdict` is one word, `sentence` begins with it. Ages are against the wall clock."""

    state: State
    head: Head
    holder: str
    tick_age_us: int | None
    silent_us: int
    late: Late
    verdict: str
    sentence: str

    @property
    def ledger(self) -> str:
        """Leader and ledger in one line."""
        tick = "none yet" if self.tick_age_us is None else f"{duration(self.tick_age_us)} ago"
        return (
            f"guard {guard(self.state)}; leader {self.holder or 'unknown'}, epoch {self.head.epoch}; "
            f"ledger at position {self.head.pos}, {moment(self.head.ledger_us)}; last tick {tick}"
        )


def look(reader: Reader, now_us: int) -> Health:
    """Read the ledger and judge it at `now_us` of the wall clock."""
    head = reader.head
    seen = Seen()
    for row in telling(reader):
        _see(seen, row, head.ledger_us - DAY_US)
    silent_us = max(0, now_us - head.ledger_us)
    verdict, said = judge(seen.state, silent_us)
    return Health(
        state=seen.state,
        head=head,
        holder=seen.holder,
        tick_age_us=None if seen.tick_us is None else max(0, now_us - seen.tick_us),
        silent_us=silent_us,
        late=seen.late,
        verdict=verdict,
        sentence=f"{verdict}: {said}",
    )


def _see(seen: Seen, row: Row, day_us: int) -> None:
    seen.state = core.evolve(seen.state, row)
    match row.data:
        case LeaseTaken(holder=holder):
            seen.holder = holder
        case Tick():
            seen.tick_us = row.ledger_us
        case DeadlineMissed() if row.ledger_us >= day_us:
            seen.late.add(row.pos, row.data)
        case _:
            pass


def judge(state: State, silent_us: int) -> tuple[str, str]:
    """Return one word for the state of a fleet, and what stands behind it."""
    pools = state.policy.fleet.pools if state.policy else ()
    if silent_us > SILENT_US:
        return "stopped", f"the arbitrator has written nothing for {duration(silent_us)}"
    if gap(state):
        return "degraded", f"{gap(state)}; {_counts(state, _wanted(state))}"
    if not pools:
        return "empty", "the policy asks for no instance"
    gone = sorted({pool.node for pool in pools} - state.nodes.keys())
    if gone:
        return "stopped" if state.instances else "settling", f"node {', '.join(gone)} is not registered"
    wanted = _wanted(state)
    if ills := list(_ills(state, wanted)):
        return "degraded", "; ".join([*ills, _counts(state, wanted), *troubles(state)])
    resting = sum(rests(state.instances.get(name), where) for name, where in wanted)
    said = "; ".join([_counts(state, wanted), *troubles(state)])
    return ("healthy" if resting == len(wanted) else "settling"), said


def gap(state: State) -> str:
    """Say what a gap that nobody has acknowledged stops, and what ends that; empty without one."""
    if not (state.gap_pos or state.degraded):
        return ""
    where = f" (position {state.gap_pos})" if state.gap_pos else ""
    return f"the bus may have lost messages{where}: {STOPPED_IN_GAP} until `{END_OF_GAP}`"


def troubles(state: State) -> Iterator[str]:
    """Yield what is out of the ordinary and does not make the fleet ill."""
    for found in pressing(state):
        yield f"{found.base} on {found.node} under pressure for {duration(state.now_us - found.since_us)}"
    if on_yoco := sorted(found.blend for found in state.channels.values() if found.channel is Channel.YOCO):
        yield f"{', '.join(on_yoco)} on yoco"
    if old := [node for node in sorted(state.feeds) if freshness(state, node) == "stale"]:
        yield f"windows of {', '.join(old)} stale"
    if state.blocks:
        yield f"prewarms of {', '.join(sorted(state.blocks))} blocked"
    if state.freeze is not None:
        yield "admissions frozen"


def freshness(state: State, node: str) -> str:
    """Return how the windows of a node are: `fresh`, `stale` or `lost`; `none` when there never was one."""
    feed = state.feeds.get(node)
    if feed is None:
        return "none"
    if feed.lost:
        return "lost"
    return "stale" if state.policy is not None and stale(state, node) else "fresh"


def off(state: State) -> Iterator[tuple[str, str]]:
    """Yield each limit that is unset with the rule that is off because of it."""
    if state.policy is None:
        return
    policy = state.policy
    for key, rule in RULES.items():
        section, _, name = key.partition(".")
        if getattr(getattr(policy, section), name) is None:
            yield key, rule


def guard(state: State) -> str:
    """Return how the divergence breaker is: `off` unless the policy switches it on."""
    if state.freeze is not None:
        return f"frozen until {moment(state.freeze.until_us)}, severity {state.freeze.severity}"
    return "on" if state.policy and state.policy.guard.enabled else "off"


def _wanted(state: State) -> list[tuple[str, Life]]:
    """Return the instances of the policy, and where each rests."""
    return [post for pool in (state.policy.fleet.pools if state.policy else ()) for post in posts(pool)]


def posts(pool: Pool) -> Iterator[tuple[str, Life]]:
    """Yield the instances of a pool by number, and where each rests: ready ones, then standbys, then prewarmed ones."""
    rests = (Life.READY,) * pool.ready + (Life.ASLEEP,) * pool.standbys + (Life.PREWARMED,) * (pool.prewarmed or 0)
    yield from ((instance_id(pool, number), where) for number, where in enumerate(rests))


def _ills(state: State, wanted: list[tuple[str, Life]]) -> Iterator[str]:
    if lost := sorted(node for node, feed in state.feeds.items() if feed.lost):
        yield f"node {', '.join(lost)} lost"
    if ill := [name for name, _ in wanted if name in state.instances and state.instances[name].state in ILL]:
        yield f"{', '.join(ill)} failed"


def _counts(state: State, wanted: list[tuple[str, Life]]) -> str:
    found = [state.instances[name].state for name, _ in wanted if name in state.instances]
    kept = f", {prewarmed} prewarmed" if (prewarmed := found.count(Life.PREWARMED)) else ""
    awake, asleep = found.count(Life.READY), found.count(Life.ASLEEP)
    counts = f"{awake} ready, {asleep} asleep{kept} of {count(len(wanted), 'instance')}"
    open_now = len(state.injections)
    under_way = f", {count(open_now, 'injection')} under way" if open_now else ""
    return f"{counts}, {count(len(state.blends), 'blend')}{under_way}"


def rests(instance: Instance | None, where: Life) -> bool:
    """Tell whether an instance rests: where its pool has it, awake because it is needed, or drained by somebody."""
    if instance is None:
        return False
    if instance.parked:
        return instance.state is Life.ASLEEP
    return instance.state is (Life.READY if instance.summoned else where)
