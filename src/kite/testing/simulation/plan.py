"""What one run is like: how large the fleet is, who is unlucky, and what its policy is changed to. From the seed."""

from dataclasses import dataclass
from random import Random

from pydantic import JsonValue

from kite.clock import US_PER_S
from kite.testing.simulation.upcycle import digest
from kite_schemas.policy import Change, Pool
from kite_schemas.yoco import EngineSpec, SleepMode

GIB = 1024**3
AGENTS = 1_000
LOSS_PPM = 120_000
"""The loss at which decisions once went wrong."""

CALM_LOSS_PPM = 2_000
EXPIRIES_S = {
    "verify": 5,
    "blend": 8,
    "load": 6,
    "compare": 5,
    "start": 20,
    "prewarm": 20,
    "wake": 5,
    "drain": 15,
    "sleep": 6,
    "retire": 6,
    "delete": 5,
}
"""Orders take less time than real ones, and their time is over sooner."""

RETAINED_PPM = 1
"""So little on average of a week that one version crosses it in half a minute."""

CHANNEL_LIMITS = (
    "arbitration.fragmentation_max_ppm",
    "arbitration.hit_rate_min_ppm",
    "arbitration.latency_sigma_max_us",
)

SECONDS, SETTLE_S = 80, 50
"""How long a run is troubled, and how long it may then come to rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. The nodes serve the `bases` in turn; so many of them as are `lossy` lose LOSS_PPM of their windows."""

    bases: tuple[str, ...] = ("alpha", "beta")
    nodes: int = 3
    ready: int = 2
    standbys: int = 1
    prewarmed: int = 0
    standby_mode: SleepMode = SleepMode.PAUSED
    modes: tuple[SleepMode, ...] = (SleepMode.PAUSED,)
    adopting_ppm: int = 500_000
    """Share of the restarts in which the yoco alone ends, and finds its processes running."""

    devices: int = 2
    device_bytes: int = 48 * GIB
    process_bytes: int = 14 * GIB
    agents: int = AGENTS
    seconds: int = SECONDS
    settle_s: int = SETTLE_S
    failing_ppm: int = 30_000
    lossy: int = 1
    troubles: int = 8
    surges: int = 2
    guard: bool = False
    channel: bool = True
    """Whether the limits of the Upcycle channel are set; without them capacity follows pressure alone."""

    concurrency_max: int = 90
    injection_rate_max_milli: int = 8_000

    @property
    def end_us(self) -> int:
        """When the troubles are over, from the beginning."""
        return self.seconds * US_PER_S


def plan_of(seed: int, seconds: int = SECONDS) -> Plan:
    """Return the plan of a seed: fleets differ, and so does what happens to them."""
    rng = Random(f"{seed}/plan")  # noqa: S311 # a test's numbers have to be known, not secret
    return Plan(
        nodes=rng.choice((2, 3, 3, 4)),
        ready=rng.choice((1, 2, 2)),
        standbys=rng.choice((1, 1, 2)),
        device_bytes=rng.choice((24, 32, 48, 48)) * GIB,
        seconds=seconds,
        lossy=rng.choice((1, 1, 2)),
        troubles=max(1, seconds // rng.choice((4, 6, 12))),
        failing_ppm=rng.choice((0, 20_000, 80_000)),
        guard=rng.choice((True, False)),
        channel=rng.choice((True, True, False)),
        concurrency_max=rng.choice((60, 90)),
        injection_rate_max_milli=rng.choice((4_000, 8_000, 20_000)),
        prewarmed=rng.choice((0, 1, 1, 2)),
        standby_mode=rng.choice((SleepMode.PAUSED, SleepMode.PAUSED, SleepMode.L1)),
        modes=rng.choice(((SleepMode.PAUSED,), tuple(SleepMode), (SleepMode.L1,))),
    )


def node_names(plan: Plan) -> tuple[str, ...]:
    """Return the names of the nodes."""
    return tuple(f"n{number}" for number in range(1, plan.nodes + 1))


def base_of(plan: Plan, number: int) -> str:
    """Return the base that the `number`-th node serves."""
    return plan.bases[number % len(plan.bases)]


def pool_of(plan: Plan, node: str, base: str) -> Pool:
    """Return the pool of a node."""
    spec = EngineSpec(
        kind="fake",
        base_path=f"/bases/{base}",
        served_name=base,
        dtype="bfloat16",
        max_model_len=8_192,
        max_loras=8,
        max_lora_rank=64,
        block_size=32,
        kv_cache_bytes=plan.process_bytes,
        cpus="",
    )
    return Pool(
        node=node,
        base_path=f"/bases/{base}",
        base_digest=digest(base),
        spec=spec,
        ready=plan.ready,
        standbys=plan.standbys,
        standby_mode=plan.standby_mode,
        prewarmed=plan.prewarmed,
    )


def changes(plan: Plan) -> tuple[Change, ...]:
    """Return what is changed of the shipped policy: the fleet, the limits that depend on it, and shorter waits."""
    pools: JsonValue = [
        pool_of(plan, node, base_of(plan, number)).model_dump(mode="json")
        for number, node in enumerate(node_names(plan))
    ]
    values: dict[str, JsonValue] = {
        "fleet.pools": pools,
        "arbitration.concurrency_max": plan.concurrency_max,
        "arbitration.injection_rate_max_milli": plan.injection_rate_max_milli,
        "arbitration.idle_us": 8 * US_PER_S,
        "yoco.start_backoff_us": US_PER_S,
        "yoco.start_backoff_max_us": 20 * US_PER_S,
        "yoco.prewarm_interval_us": 12 * US_PER_S,
        "yoco.prewarm_interval_critical_us": 6 * US_PER_S,
        "yoco.quarantine_us": 5 * US_PER_S,
        "upcycle.retention_us": 8 * US_PER_S,
        "upcycle.retained_share_max_ppm": RETAINED_PPM,
        "upcycle.drift_interval_us": 2 * US_PER_S,
        "guard.enabled": plan.guard,
        "guard.interval_us": 10 * US_PER_S,
        "guard.freeze_us": 5 * US_PER_S,
        **{f"expiry.{what}_us": seconds * US_PER_S for what, seconds in EXPIRIES_S.items()},
        **({} if plan.channel else dict.fromkeys(CHANNEL_LIMITS)),
    }
    return tuple(Change(key=key, value=value) for key, value in values.items())
