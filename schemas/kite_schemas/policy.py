"""The policy: every number that decisions follow, as one record, and the events that change it."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationError

from kite_schemas.model import AbsolutePath, Bytes, Count, Digest, EventId, Micronats, Model, Name, Ppm, Text, Us
from kite_schemas.why import Decision, Request
from kite_schemas.yoco import EngineSpec, SleepMode

POOLS_MAX = 256
POOL_INSTANCES_MAX = 64
CHANGES_MAX = 64
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as `--max-lora-rank`."""

PositiveUs = Annotated[Us, Field(ge=1)]
PositiveCount = Annotated[Count, Field(ge=1)]


class Pool(Model):
    """Equal instances of one base on one node."""

    node: Name
    base_path: AbsolutePath
    base_digest: Digest
    spec: EngineSpec = Field(description="`spec.served_name` is the base's name; `cpus` is set per instance")
    ready: Annotated[Count, Field(le=POOL_INSTANCES_MAX)]
    standbys: Annotated[Count, Field(le=POOL_INSTANCES_MAX)]
    standby_mode: SleepMode
    prewarmed: Annotated[Count, Field(le=POOL_INSTANCES_MAX)] | None = Field(
        default=None, description="processes kept without the weights, beside ready ones and standbys"
    )
    critical: Annotated[bool, Field(strict=True)] | None = Field(default=None, description="prewarmed more often")


class Fleet(Model):
    """What should run."""

    pools: tuple[Pool, ...] = Field(max_length=POOLS_MAX, description="what should run, as `kite up` sets it")


class UpcyclePolicy(Model):
    """Numbers of the Upcycle channel."""

    weight_decay_ppm: Ppm = Field(description="factor on free members at each injection")
    weight_min_ppm: Ppm = Field(description="a member below it leaves the blend")
    params_share_max_ppm: Ppm = Field(description="parameters that one injection brings, share of the base")
    weight_decay_pressure_ppm: Ppm | None = Field(default=None, description="the same factor under pressure")
    residual_max_ppm: Ppm | None = Field(default=None, description="what a blend may lose when it is recompressed")
    blend_share_max_ppm: Ppm | None = Field(default=None, description="parameters of a whole blend, share of the base")
    retention_us: PositiveUs | None = Field(default=None, description="so long the version before stays loaded")
    retained_share_max_ppm: Ppm | None = Field(
        default=None, description="mean of 7 days of what old versions take, share of a node's device memory"
    )
    drift_interval_us: PositiveUs | None = Field(default=None, description="between two looks at what engines hold")


class YocoPolicy(Model):
    """Numbers of the YOCO channel."""

    cold_start_deadline_us: PositiveUs = Field(description="from the order to the first token")
    start_backoff_us: PositiveUs = Field(description="wait before a failed start is ordered again; doubles each time")
    start_backoff_max_us: PositiveUs = Field(description="the longest of these waits")
    reserve_bytes: Bytes | None = Field(default=None, description="memory that one instance takes of its device")
    reserve_pressure_ppm: Ppm | None = Field(default=None, description="standbys moved to the hot path under pressure")
    prewarm_interval_us: PositiveUs | None = Field(default=None, description="distance of two prewarms of a pool")
    prewarm_interval_critical_us: PositiveUs | None = Field(default=None, description="the same of a critical pool")
    quarantine_us: PositiveUs | None = Field(default=None, description="a quarantined instance is kept for a look")


class GuardPolicy(Model):
    """Numbers of the divergence breaker; effect proofs do not depend on it."""

    enabled: Annotated[bool, Field(strict=True)] = Field(description="whether blends are compared and conflicts freeze")
    kl_max_micronats: Micronats = Field(description="mean KL of two instances above which they conflict")
    freeze_us: PositiveUs = Field(description="how long a conflict stops admissions, at least")
    interval_us: PositiveUs = Field(description="distance of two comparisons of a blend")


class ExpiryPolicy(Model):
    """How long an order may stay open, in ledger time."""

    verify_us: PositiveUs = Field(description="to check an adapter")
    blend_us: PositiveUs = Field(description="to compute and store a blend")
    load_us: PositiveUs = Field(description="to load a version and prove it, or to take it out")
    start_us: PositiveUs = Field(description="to start an engine until its first token")
    wake_us: PositiveUs = Field(description="to wake a standby until its first token")
    drain_us: PositiveUs = Field(description="until a drained instance has no request left")
    sleep_us: PositiveUs = Field(description="to put a drained instance to sleep")
    compare_us: PositiveUs = Field(description="to compare two instances")
    retire_us: PositiveUs | None = Field(default=None, description="until no request uses an unloaded version")
    delete_us: PositiveUs | None = Field(default=None, description="to delete a version from the store")
    prewarm_us: PositiveUs | None = Field(default=None, description="to bring a process as far as without weights")


class ArbitrationPolicy(Model):
    """Numbers of the arbitrator itself. A limit that is unset switches its rule off: it came after the first policy."""

    idle_tick_us: PositiveUs = Field(description="distance of two clock rows when nothing is due sooner")
    tick_us: PositiveUs | None = Field(default=None, description="the same while a condition or a timer is pending")
    concurrency_max: Count | None = Field(default=None, description="requests in flight in a pool above it: pressure")
    sustained_us: PositiveUs | None = Field(default=None, description="how long, for pressure on and for pressure off")
    miss_jump_ppm: Ppm | None = Field(default=None, description="and rise of the cache misses, 1 s against 5 s before")
    fragmentation_max_ppm: Ppm | None = Field(default=None, description="upcycle channel only at or below")
    hit_rate_min_ppm: Ppm | None = Field(default=None, description="upcycle channel only at or above")
    latency_sigma_max_us: Us | None = Field(default=None, description="upcycle channel only at or below")
    switch_window_us: PositiveUs | None = Field(default=None, description="opposite decisions closer than it: jitter")
    injection_rate_max_milli: Count | None = Field(default=None, description="injections per 1 000 min: shedding above")
    idle_us: PositiveUs | None = Field(default=None, description="quiet for so long: a standby goes back to sleep")
    decision_deadline_us: PositiveUs | None = Field(default=None, description="from the event to the decision, durable")
    sync_timeout_us: PositiveUs | None = Field(default=None, description="transport lag above it: the source is stale")
    sync_timeout_reliable_us: PositiveUs | None = Field(default=None, description="the same for reliable transport")
    loss_max_ppm: Ppm | None = Field(default=None, description="share of a span's windows that may be lost")
    loss_windows: PositiveCount | None = Field(default=None, description="so many such spans in a row: reliable")


class Policy(Model):
    """The whole policy. It has no defaults: the first is an event like any other, and what it leaves unset is off."""

    rules: Literal[1] = Field(description="version of the rules that decide")
    upcycle: UpcyclePolicy
    yoco: YocoPolicy
    arbitration: ArbitrationPolicy
    guard: GuardPolicy
    expiry: ExpiryPolicy
    fleet: Fleet


class Change(Model):
    """One setting by its dotted key; `value` is JSON, absent to unset it."""

    key: Text
    value: JsonValue = None


class ChangeRequested(Request):
    """Change settings, or set the whole policy (the first time)."""

    TYPE = "kite.policy.change_requested.v1"

    changes: tuple[Change, ...] = Field(default=(), max_length=CHANGES_MAX)
    policy: Policy | None = None
    force: bool = Field(default=False, description="also what is refused for being harmful")


class PolicySet(Decision):
    """From here this policy is in force."""

    TYPE = "kite.policy.set.v1"

    request: EventId
    policy: Policy
    digest: Digest


class ChangeRejected(Decision):
    """The policy stays as it was."""

    TYPE = "kite.policy.change_rejected.v1"

    request: EventId
    detail: Text


class PolicyInvalid(ValueError):
    """A change names an unknown key or a value that its setting does not take."""


def digest(policy: Policy) -> str:
    """Return the hex SHA-256 of a policy's canonical JSON (sorted keys, integers and strings only, nothing unset).

    An unset limit is left out, so that a policy keeps its digest when a later version of KITE knows more limits.
    """
    text = json.dumps(
        policy.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return sha256(text.encode()).hexdigest()


def flatten(policy: Policy) -> dict[str, JsonValue]:
    """Return every setting by its dotted key, in the order of the model; `fleet.pools` is one setting."""
    flat: dict[str, JsonValue] = {}
    for section, value in policy.model_dump(mode="json").items():
        if isinstance(value, Mapping):
            flat |= {f"{section}.{key}": inner for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType] # model_dump returns JSON
        else:
            flat[section] = value
    return flat


def amend(policy: Policy, changes: Sequence[Change]) -> Policy:
    """Return the policy with the changes made. Raises PolicyInvalid, naming the key and what it takes."""
    flat = flatten(policy)
    for change in changes:
        if change.key not in flat:
            raise PolicyInvalid(f"unknown setting {change.key!r}")
        flat[change.key] = change.value
    try:
        return Policy.model_validate(_nested(flat))
    except ValidationError as error:
        raise PolicyInvalid(_first(error)) from error


def _nested(flat: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    tree: dict[str, JsonValue] = {}
    for key, value in flat.items():
        section, _, leaf = key.partition(".")
        if leaf:
            branch = tree.setdefault(section, {})
            assert isinstance(branch, dict)  # noqa: S101 # `flatten` made the keys: a section is never also a leaf
            branch[leaf] = value
        else:
            tree[section] = value
    return tree


def _first(error: ValidationError) -> str:
    detail = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {detail['msg']}, got {detail['input']!r}"
