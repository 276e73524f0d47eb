"""Events of YOCO: nodes and the life of their instances."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from kite_schemas.model import (
    AbsolutePath,
    Bytes,
    Count,
    Endpoint,
    EventId,
    Micronats,
    Model,
    Name,
    Ppm,
    Text,
    Us,
    Version,
)
from kite_schemas.upcycle import Resident
from kite_schemas.why import Decision, Fact, Order, Outcome, Request

DEVICES_MAX = 256

SHUTDOWN = "shutdown"
"""Code of the last change of an instance whose node stops: until it registers again, nothing is ordered there."""


class State(StrEnum):
    """Where an instance is in its life."""

    ABSENT = "absent"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    PREWARMED = "prewarmed"


class Path(StrEnum):
    """How an instance became ready."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


class SleepMode(StrEnum):
    """How a standby sleeps: what it gives back, and how fast it is there again; CPU engines can only pause."""

    PAUSED = "paused"
    KV = "kv"
    L1 = "l1"
    L2 = "l2"


PATHS: dict[SleepMode, Path] = {
    SleepMode.PAUSED: Path.HOT,
    SleepMode.KV: Path.HOT,
    SleepMode.L1: Path.WARM,
    SleepMode.L2: Path.WARM,
}
"""The path on which each mode wakes: hot while the weights stay where they are."""


class EngineSpec(Model):
    """The complete configuration of one engine process, but for its port."""

    kind: Literal["vllm", "fake"]
    base_path: AbsolutePath
    served_name: Name
    dtype: Literal["bfloat16", "float32"]
    max_model_len: Count = Field(description="tokens")
    max_loras: Count
    max_lora_rank: Count
    block_size: Count = Field(description="tokens per KV block")
    kv_cache_bytes: Bytes
    cpus: Text = Field(description="cores of a CPU engine, as in `0` or `0-3`; empty on a GPU")


class Device(Model):
    """A place an instance can run on: one GPU, or one core of a node without any."""

    id: Name
    kind: Literal["cpu", "gpu"]
    memory_bytes: Bytes


class Found(Model):
    """An instance that was running when its node registered."""

    instance: Name
    pid: Count
    state: State
    endpoint: Endpoint
    versions: tuple[Version, ...] = ()
    base: Name | None = None
    device: Name | None = None
    mode: SleepMode | None = Field(default=None, description="how it sleeps, if it does")
    noise_micronats: Micronats | None = None


class Source(StrEnum):
    """Where a duration comes from."""

    MEASURED = "measured"
    PUBLISHED = "published"
    COMPUTED = "computed"


class PathOffer(Model):
    """How fast an engine of a node is expected to be ready; without a mode it is a start."""

    path: Path
    mode: SleepMode | None = None
    expected_us: Us
    source: Source


class Lack(Model):
    """What an engine cannot do here, and why."""

    mode: SleepMode
    reason: Text


class EngineOffer(Model):
    """What one kind of engine can do on a node, as detected when the node registered."""

    kind: Literal["vllm", "fake"]
    version: Text
    modes: tuple[SleepMode, ...]
    lacks: tuple[Lack, ...] = ()
    paths: tuple[PathOffer, ...] = ()


class NodeRegistered(Fact):
    """A node's yoco has started: this replaces the arbitrator's view of the node."""

    TYPE = "kite.yoco.node_registered.v1"

    node: Name
    boot: EventId
    devices: tuple[Device, ...] = Field(min_length=1, max_length=DEVICES_MAX)
    memory_bytes: Bytes
    sleep_modes: tuple[SleepMode, ...]
    instances: tuple[Found, ...] = ()
    engines: tuple[EngineOffer, ...] = ()


class OrderRequested(Request):
    """One more ready instance of a base is wanted now."""

    TYPE = "kite.yoco.order_requested.v1"

    base: Name
    instance: Name | None = None
    deadline_us: Us | None = Field(default=None, description="until the first token; absent: the policy's")
    late: bool = Field(default=False, description="take the fastest path even when it cannot meet the deadline")


class DrainRequested(Request):
    """Take one instance out of service; it is left alone then until somebody orders it again."""

    TYPE = "kite.yoco.drain_requested.v1"

    instance: Name
    force: bool = Field(default=False, description="even when it is the last one that answers for its base")


class InstanceOrder(Order):
    """An order about the life of one instance."""

    instance: Name


class StartOrdered(InstanceOrder):
    """Start an engine process and warm it up."""

    TYPE = "kite.yoco.start_ordered.v1"

    device: Name
    standby: bool
    spec: EngineSpec
    request: EventId | None = None
    deadline_us: Us | None = Field(default=None, description="of the request that it answers")
    residents: tuple[Resident, ...] | None = Field(
        default=None, description="to be loaded and proven before it is ready"
    )


class PrewarmOrdered(InstanceOrder):
    """Bring a process as far as it gets without the base's weights, on cores that inference does not use."""

    TYPE = "kite.yoco.prewarm_ordered.v1"

    device: Name
    spec: EngineSpec
    cores: Text = Field(description="that it may run on until it is started, as in `0` or `0-3`; empty: any")


class DrainOrdered(InstanceOrder):
    """Give the instance no new requests, and wait for those it has."""

    TYPE = "kite.yoco.drain_ordered.v1"

    request: EventId | None = None


class SleepOrdered(InstanceOrder):
    """Put a drained instance to sleep."""

    TYPE = "kite.yoco.sleep_ordered.v1"

    mode: SleepMode


class WakeOrdered(InstanceOrder):
    """Wake a standby; it is ready when every resident is loaded and proven and a token came out."""

    TYPE = "kite.yoco.wake_ordered.v1"

    request: EventId | None = None
    path: Path
    deadline_us: Us
    residents: tuple[Resident, ...]
    noise_micronats: Micronats = Field(description="as measured when the instance started")


class StopOrdered(InstanceOrder):
    """End the engine process."""

    TYPE = "kite.yoco.stop_ordered.v1"


class InstanceChanged(Outcome):
    """One step in the life of an instance; `duration_us` is how long it took."""

    TYPE = "kite.yoco.instance_changed.v1"

    instance: Name
    node: Name
    from_state: State
    to_state: State
    code: Name
    message: Text = ""
    duration_us: Us


class InstanceReady(Outcome):
    """A warm-up token came out; durations are monotonic, from the moment the worker began the order."""

    TYPE = "kite.yoco.instance_ready.v1"

    instance: Name
    node: Name
    path: Path
    pid: Count
    endpoint: Endpoint
    versions: tuple[Version, ...]
    noise_micronats: Micronats
    t_wake_us: Us = Field(description="until the wake, or the start, returned")
    t_first_token_us: Us = Field(description="until a token came out of every resident, proven")


class OrderRefused(Outcome):
    """The worker did not begin the order."""

    TYPE = "kite.yoco.order_refused.v1"

    instance: Name
    code: Name
    message: Text
    path: Path | None = Field(default=None, description="the best one there is, when none meets the deadline")
    expected_us: Us | None = Field(default=None, description="how long that one takes")


class OrderFailed(Outcome):
    """The worker began the order and could not finish it; the instance is where `state` says."""

    TYPE = "kite.yoco.order_failed.v1"

    instance: Name
    state: State
    stage: Name
    code: Name
    message: Text


class PrewarmBlocked(Decision):
    """No standby of the node is started from here: memory is fragmented while injections come fast."""

    TYPE = "kite.yoco.prewarm_blocked.v1"

    node: Name


class PrewarmReleased(Decision):
    """Standbys of the node are started again."""

    TYPE = "kite.yoco.prewarm_released.v1"

    node: Name
    lasted_us: Us


class ChannelSampled(Fact):
    """How the YOCO channel of a node does; what is not known is absent."""

    TYPE = "kite.yoco.channel_sampled.v1"

    node: Name
    instances: Count
    healthy_ppm: Ppm | None = Field(default=None, description="share of the instances that did not fail")
    prewarm_success_ppm: Ppm | None = Field(default=None, description="of the last 20 starts and wakes")
    fragmentation_ppm: Ppm | None = Field(default=None, description="of the worst device")
