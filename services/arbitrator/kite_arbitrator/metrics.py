"""What an arbitrator tells Prometheus, read from its state when the page is asked for: a commit pays nothing for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kite.metrics import Metric
from kite_arbitrator.state import Passage, State

NODE = "name of a node of the policy"
PASSAGE = {"node": NODE, "base": "served name of a base of the policy", "path": "`hot`, `warm` or `cold`"}

LEADING = Metric("kite_arbitrator_leading", "gauge", "1 while this arbitrator holds the lease, else 0", {})
POSITION = Metric("kite_ledger_position", "gauge", "the last position of the ledger that is folded here", {})
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
HIT = Metric("kite_yoco_hit_ratio", "gauge", "share of a pool's passages that went on this path", PASSAGE)
ON_TIME = Metric(
    "kite_yoco_on_time_ratio",
    "gauge",
    "share of the passages with a deadline that met it, by ledger time; absent before the first",
    PASSAGE,
)
METRICS = (LEADING, POSITION, RETAINED, READY, HIT, ON_TIME)

Sample = tuple[tuple[str, ...], float]
"""Label values in the order of the metric's labels, and the value."""


class Meter(Collector):
    """The page of one arbitrator; `state` is the last one it committed as a leader, None while it waits."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Family]:
        """Yield every metric. Runs in the thread of the page; the state is never changed, only replaced."""
        state = self.state
        yield _family(LEADING, [((), 0.0 if state is None else 1.0)])
        if state is not None:
            yield from (_family(metric, read(state)) for metric, read in READ.items())


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.meaning, labels=tuple(metric.labels))
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def retained(state: State) -> Iterator[Sample]:
    """Yield what old versions take now, by node."""
    yield from (((node,), account.retained_bytes) for node, account in sorted(state.accounts.items()))


def passages(state: State) -> Iterator[Sample]:
    """Yield how often each path was taken."""
    yield from ((_labels(found), found.ready) for found in _passages(state))


def hits(state: State) -> Iterator[Sample]:
    """Yield each path's share of its pool's passages."""
    totals: dict[tuple[str, str], int] = {}
    for found in _passages(state):
        totals[found.node, found.base] = totals.get((found.node, found.base), 0) + found.ready
    yield from ((_labels(one), one.ready / totals[one.node, one.base]) for one in _passages(state) if one.ready)


def on_time(state: State) -> Iterator[Sample]:
    """Yield each path's share of what met its deadline."""
    judged = ((found, found.met + found.missed) for found in _passages(state))
    yield from ((_labels(found), found.met / number) for found, number in judged if number)


def _passages(state: State) -> list[Passage]:
    return [found for _, found in sorted(state.passages.items())]


def _labels(found: Passage) -> tuple[str, ...]:
    return found.node, found.base, found.path


READ: Mapping[Metric, Callable[[State], Iterable[Sample]]] = {
    POSITION: lambda state: [((), state.pos)],
    RETAINED: retained,
    READY: passages,
    HIT: hits,
    ON_TIME: on_time,
}
"""Where the values of each metric are read."""
