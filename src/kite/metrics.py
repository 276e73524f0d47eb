"""What services tell Prometheus: one page a service, on a port of its own, when it is named one.

A `Metric` says once what is measured; the page of documentation is made from it, and so is what prometheus_client
serves. Label values are names of the policy, or members of an enum: there is an end to how many there are.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kite import tracing
from kite.errors import Fault, KiteError
from kite.settings import MetricsSettings

Kind = Literal["counter", "gauge", "histogram"]

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class MetricsUnserved(KiteError):
    """The address for metrics cannot be listened on."""

    code = "metrics_unserved"
    fault = Fault.OPERATOR

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(
            f"no metrics can be served at {host}:{port}: {why}",
            hint="name another port by KITE_METRICS_PORT (and address by KITE_METRICS_HOST), or unset it to go without",
        )
        self.host = host
        self.port = port


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `labels` says what each label's values are; `bounds` are the upper ones of a histogram's buckets."""

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    bounds: tuple[float, ...] = ()


Sample = tuple[tuple[str, ...], float]
"""Label values in the order of the metric's labels, and the value."""

SPANS = Metric(
    "kite_trace_spans_total",
    "counter",
    "spans of this process by what became of them; all 0 while tracing is off",
    {"outcome": "`sent`, `failed` (the collector did not take the batch) or `dropped` (the queue was full)"},
)
METRICS = (SPANS,)
"""What every page has."""


class Spans(Collector):
    """What became of the spans of this process."""

    def collect(self) -> Iterator[Family]:
        """Yield the counts of the export."""
        told = tracing.counts()
        yield family(SPANS, [(("sent",), told.sent), (("failed",), told.failed), (("dropped",), told.dropped)])


def page() -> CollectorRegistry:
    """Return a page with what every service tells."""
    registry = CollectorRegistry()
    registry.register(Spans())
    return registry


def family(metric: Metric, samples: Iterable[Sample]) -> Family:
    """Return the values of a counter or gauge that is read when the page is asked for."""
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    found = make(metric.name, metric.meaning, labels=tuple(metric.labels))
    for labels, value in samples:
        found.add_metric(labels, value)
    return found


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """Return the counter that a metric describes, as a part of the page."""
    return Counter(metric.name, metric.meaning, tuple(metric.labels), registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """Return the histogram that a metric describes, as a part of the page."""
    return Histogram(metric.name, metric.meaning, tuple(metric.labels), registry=registry, buckets=metric.bounds)


@contextmanager
def served(registry: CollectorRegistry, settings: MetricsSettings) -> Generator[None]:
    """Serve the page for the time of the block, from a thread; without a port nothing is served.

    Raises MetricsUnserved.
    """
    if settings.metrics_port is None:
        yield
        return
    host, port = settings.metrics_host, settings.metrics_port
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise MetricsUnserved(host, port, error.strerror or str(error)) from error
    log.info("metrics_served", host=host, port=port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
