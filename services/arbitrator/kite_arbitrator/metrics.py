"""What an arbitrator tells Prometheus, read from its state when the page is asked for: a commit pays nothing for it.

Only what no state has is kept beside it: how long decisions took, and what the leader sees of bus and outbox.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kite import clock
from kite.bus import StreamState
from kite.bus.mark import PPM
from kite.clock import US_PER_S
from kite.metrics import SPANS, Metric, Sample, family, histogram, page
from kite_arbitrator.records import Feed, Passage
from kite_arbitrator.state import State, stale
from kite_schemas.yoco import State as Life

NODE = "name of a node that is registered"
BASE = "served name of a base of the policy"
PASSAGE = {"node": NODE, "base": BASE, "path": "`hot`, `warm` or `cold`"}
BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.017, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Of a decision: from a commit on a fast disk to a ledger that stands; the shipped deadline (17 ms) is one of them."""
ILL = (Life.FAILED, Life.QUARANTINED)
"""States that need somebody: told as 0 as well, so that an alert sees them begin and end."""

LEADING = Metric("kite_arbitrator_leading", "gauge", "1 while this arbitrator holds the lease, else 0", {})
POSITION = Metric("kite_ledger_position", "gauge", "the last position of the ledger that is folded here", {})
AGE = Metric(
    "kite_ledger_age_seconds",
    "gauge",
    "since the last row of the ledger, by the wall clock: a leader writes one each `arbitration.idle_tick_us`",
)
BEHIND = Metric(
    "kite_ledger_lag_messages", "gauge", "facts and requests on the bus that the ledger has not taken in, each second"
)
OUTBOX = Metric(
    "kite_outbox_wait_seconds",
    "gauge",
    "for how long decisions have waited to be published while the bus acknowledged none; 0 when none waits",
)
FILL = Metric(
    "kite_stream_fill_ratio",
    "gauge",
    "how full a stream is, as a share of its bound: when it is full the bus refuses what is published",
    {"stream": "`KITE_EVT` or `KITE_DEC`"},
)
LATENCY = Metric(
    "kite_decision_latency_seconds",
    "histogram",
    "from the arrival of what a decision answers until it is durable in the ledger (monotonic), since the process "
    "began",
    {},
    BOUNDS_S,
)
SILENT = Metric(
    "kite_telemetry_age_seconds", "gauge", "since the newest window of a node, in ledger time", {"node": NODE}
)
LAG = Metric(
    "kite_telemetry_lag_seconds", "gauge", "how late the newest window of a node came, its transport's", {"node": NODE}
)
STALE = Metric(
    "kite_telemetry_stale",
    "gauge",
    "1 while the windows of a node are too old to act on, or it is lost",
    {"node": NODE},
)
LOSS = Metric(
    "kite_telemetry_loss_ratio", "gauge", "share of the windows of a node that did not come, last span", {"node": NODE}
)
GAP = Metric("kite_bus_gap", "gauge", "1 while a gap of the bus is not acknowledged, and the fleet degraded by it", {})
INSTANCES = Metric(
    "kite_instances",
    "gauge",
    "instances that are known, by where they are in their life; a state without one is absent but `failed` and "
    "`quarantined`",
    {"node": NODE, "base": BASE, "state": "a state of [a life](lifecycle.md)"},
)
ORDERS = Metric("kite_orders_open", "gauge", "orders that were given and have no outcome yet", {})
INJECTIONS = Metric("kite_injections_open", "gauge", "injections that are under way", {})
FROZEN = Metric("kite_admissions_frozen", "gauge", "1 while the guard has stopped admissions", {})
PRESSURE = Metric("kite_pool_pressure", "gauge", "1 while a pool is under pressure", {"node": NODE, "base": BASE})
RETAINED = Metric(
    "kite_upcycle_adapter_retention_bytes_total",
    "gauge",
    "bytes that versions which no blend means take on a node, 1.2 MB of metadata for each; it falls when they are "
    "deleted: `total` is their sum, and this is no counter",
    {"node": NODE},
)
READY = Metric(
    "kite_yoco_passages_total",
    "counter",
    "how often an instance of a pool became ready on a path, over the whole ledger",
    PASSAGE,
)
DEADLINES = Metric(
    "kite_yoco_deadlines_total",
    "counter",
    "passages that had a deadline, by whether they met it in ledger time; one that never became ready missed it",
    {**PASSAGE, "met": "`yes` or `no`"},
)


class Meter(Collector):
    """The page of one arbitrator; `state` is the last one it committed as a leader, None while it waits.

    `streams` is what the bus last said of the streams, none while it does not answer; `behind` how many messages of
    the facts the ledger had not taken in then; `waiting_us` says for how long the outbox has waited for the bus.
    """

    def __init__(self) -> None:
        self.state: State | None = None
        self.streams: Sequence[StreamState] = ()
        self.behind = 0
        self.waiting_us: Callable[[], int] = int
        self.registry = page()
        self._latency = histogram(LATENCY, self.registry)
        self.registry.register(self)

    def decided(self, took_us: Iterable[int]) -> None:
        """Count decisions by how long each took."""
        for span_us in took_us:
            self._latency.observe(span_us / US_PER_S)

    def collect(self) -> Iterator[Family]:
        """Yield every metric. Runs in the thread of the page; the state is never changed, only replaced."""
        state = self.state
        yield family(LEADING, [((), 0.0 if state is None else 1.0)])
        if state is not None:
            yield from (family(metric, read(state)) for metric, read in READ.items())
            yield family(OUTBOX, [((), self.waiting_us() / US_PER_S)])
            yield from self._bus()

    def _bus(self) -> Iterator[Family]:
        """Yield what the bus said, nothing while it does not answer."""
        if self.streams:
            yield family(BEHIND, [((), self.behind)])
            yield family(FILL, [((one.stream,), one.fill_ppm / PPM) for one in self.streams])


def silent(state: State) -> Iterator[Sample]:
    """Yield for how long each registered node has sent no window."""
    yield from (((f.node,), (state.now_us - f.seen_us) / US_PER_S) for f in _feeds(state))


def stales(state: State) -> Iterator[Sample]:
    """Yield whether the windows of each node are too old to act on; nothing before there is a policy."""
    if state.policy is not None:
        yield from (((feed.node,), stale(state, feed.node)) for feed in _feeds(state))


def _feeds(state: State) -> list[Feed]:
    return [feed for node, feed in sorted(state.feeds.items()) if node in state.nodes]


def instances(state: State) -> Iterator[Sample]:
    """Yield how many instances of each pool are in each state; those that need somebody are told as 0 as well."""
    known = state.instances.values()
    found = Counter((one.node, one.base, one.state.value) for one in known)
    zeros = {(one.node, one.base, ill.value): 0 for one in known for ill in ILL}
    yield from sorted({**zeros, **found}.items())


def pressures(state: State) -> Iterator[Sample]:
    """Yield which pools are under pressure."""
    yield from (((found.node, found.base), found.on) for _, found in sorted(state.pressures.items()))


def retained(state: State) -> Iterator[Sample]:
    """Yield what old versions take now, by node."""
    yield from (((node,), account.retained_bytes) for node, account in sorted(state.accounts.items()))


def passages(state: State) -> Iterator[Sample]:
    """Yield how often each path was taken."""
    yield from ((_labels(found), found.ready) for found in _passages(state))


def deadlines(state: State) -> Iterator[Sample]:
    """Yield how many passages met their deadline and how many missed it, of the paths that had one."""
    for found in _passages(state):
        if found.met or found.missed:
            yield (*_labels(found), "yes"), found.met
            yield (*_labels(found), "no"), found.missed


def _passages(state: State) -> list[Passage]:
    return [found for _, found in sorted(state.passages.items())]


def _labels(found: Passage) -> tuple[str, ...]:
    return found.node, found.base, found.path


READ: Mapping[Metric, Callable[[State], Iterable[Sample]]] = {
    POSITION: lambda state: [((), state.pos)],
    AGE: lambda state: [((), max(0, clock.wall_us() - state.now_us) / US_PER_S)],
    SILENT: silent,
    LAG: lambda state: [((feed.node,), feed.lag_us / US_PER_S) for feed in _feeds(state)],
    STALE: stales,
    LOSS: lambda state: [((feed.node,), feed.span.loss_ppm / PPM) for feed in _feeds(state)],
    GAP: lambda state: [((), bool(state.gap_pos))],
    INSTANCES: instances,
    ORDERS: lambda state: [((), len(state.orders))],
    INJECTIONS: lambda state: [((), len(state.injections))],
    FROZEN: lambda state: [((), state.freeze is not None)],
    PRESSURE: pressures,
    RETAINED: retained,
    READY: passages,
    DEADLINES: deadlines,
}
"""Where the values of each metric are read."""

METRICS = (LEADING, LATENCY, BEHIND, OUTBOX, FILL, *READ, SPANS)
