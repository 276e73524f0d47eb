"""Telemetry: what a node's instances and devices did, ten times a second. What is not known is absent, never 0."""

from enum import StrEnum

from pydantic import Field

from kite_schemas.model import Count, EventId, Model, Name, Ppm, Us
from kite_schemas.why import Decision, Fact
from kite_schemas.yoco import DEVICES_MAX

INSTANCES_MAX = 256


class Source(StrEnum):
    """Where the numbers of an instance come from."""

    STAT_LOGGER = "stat_logger"
    METRICS = "metrics"


class FragmentationSource(StrEnum):
    """Where a fragmentation comes from: torch's allocator, or the memory ledger of the node."""

    TORCH = "torch"
    ESTIMATE = "estimate"


class InstanceWindow(Model):
    """One instance in one window. One that did not answer has its id only.

    Counts and sums are increments since the last window in which this instance had them, so that a sum over windows is
    exact whatever was late. `age_us` is how old the newest reading was.

    Latencies are whole milliseconds in both sums, rounded per request: the deviation of n requests is
    √(squares/n - (sum/n)²) without a rounding error of its own, and 25 million requests of 10 minutes fit 63 bits.
    """

    id: Name
    source: Source | None = None
    age_us: Us | None = None
    arrivals: Count | None = Field(default=None, description="requests first scheduled")
    finished: Count | None = Field(default=None, description="requests that ended with an answer")
    latency_sum_us: Us | None = Field(default=None, description="end to end, of the finished; multiples of 1 000")
    latency_squares_ms2: Count | None = Field(default=None, description="of the same latencies, in ms²")
    cache_queries: Count | None = Field(default=None, description="prompt tokens looked up in the prefix cache")
    cache_hits: Count | None = Field(default=None, description="those found")
    preemptions: Count | None = None
    running: Count | None = None
    waiting: Count | None = None
    kv_usage_ppm: Ppm | None = None
    engine_step_age_us: Us | None = Field(default=None, description="since the engine last computed; grows when idle")


class DeviceWindow(Model):
    """One device in one window."""

    id: Name
    bandwidth_ppm: Ppm | None = Field(default=None, description="of the memory's theoretical bandwidth")
    fragmentation_ppm: Ppm | None = None
    fragmentation_source: FragmentationSource | None = None


class Window(Fact):
    """One node since its last window, sent idle or not; `seq` counts windows from 1, those that were lost too."""

    TYPE = "kite.telemetry.window.v1"

    node: Name
    boot: EventId
    seq: Count
    interval_us: Us = Field(description="what the window covers; 100 000 unless the node was held up")
    sampled_us: Us = Field(description="wall clock at the end of the window")
    emitted_us: Us = Field(description="wall clock when it was handed to the bus")
    instances: tuple[InstanceWindow, ...] = Field(default=(), max_length=INSTANCES_MAX)
    devices: tuple[DeviceWindow, ...] = Field(default=(), max_length=DEVICES_MAX)


class NodeLost(Decision):
    """No window of the node has come for too long: nothing is ordered there."""

    TYPE = "kite.telemetry.node_lost.v1"

    node: Name
    silence_us: Us


class NodeFound(Decision):
    """A window of a lost node has come."""

    TYPE = "kite.telemetry.node_found.v1"

    node: Name
    silence_us: Us
