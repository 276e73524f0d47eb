"""How long orders take and how they end, for the page of metrics of a service that carries them out."""

from collections.abc import Callable, Iterator
from typing import Never, TypeAlias

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from kite import clock
from kite.clock import US_PER_S
from kite.errors import KiteError
from kite.metrics import SPANS, Metric, family, histogram, page
from kite.orders.task import Emit, Handler, Received, Task, Tasks
from kite.orders.worker import Worker
from kite_schemas.why import Order, Outcome

BOUNDS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""From a look at an engine to the blend of a large base."""

ERROR, CANCELLED = "error", "cancelled"

LABELS = {
    "order": "short name of the order ([events](events.md))",
    "outcome": "short name of the fact that ended it, `error`, or `cancelled` (too late, given up, end of the service)",
}

REDELIVERED = Metric(
    "kite_order_redeliveries_total",
    "counter",
    "deliveries of an order that the bus had delivered before: it was not acknowledged in time, or its worker ended",
)

End: TypeAlias = Outcome | KiteError | None
"""How an order ended; None when it was cancelled."""

Ended: TypeAlias = Callable[[type[Order], End, int], None]
"""Called with the type of an order, how it ended and after how many microseconds."""


def timed(tasks: Tasks, ended: Ended) -> Tasks:
    """Return the same table, with `ended` called at the end of each order."""
    return {kind: _timed(kind, task, ended) for kind, task in tasks.items()}


def _timed(kind: type[Order], task: Task[Never], ended: Ended) -> Task[Never]:
    handler: Handler[Never] = task.handler

    async def timing(received: Received[Never], emit: Emit) -> Outcome:
        began_us = clock.mono_us()
        end: End = None
        try:
            end = await handler(received, emit)
        except KiteError as error:
            end = error
            raise
        else:
            return end
        finally:  # cancelled as well: late, given up, or the end of the service
            ended(kind, end, clock.mono_us() - began_us)

    return Task(timing, task.failed)


class Deliveries(Collector):
    """How often the bus had to deliver an order again, as a worker counts."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Family]:
        """Yield the count."""
        yield family(REDELIVERED, [((), self._worker.redelivered)])


class WorkerPage:
    """The page of a service that carries out orders, with what every one of them tells."""

    def __init__(self) -> None:
        self.registry = page()

    def watch(self, worker: Worker) -> None:
        """Put on the page what a worker counts."""
        self.registry.register(Deliveries(worker))


class Meter(WorkerPage):
    """Such a page, on which `seconds` is the histogram of how long orders take."""

    def __init__(self, seconds: Metric) -> None:
        super().__init__()
        self._seconds = histogram(seconds, self.registry)

    def measured(self, tasks: Tasks) -> Tasks:
        """Return the same table, with what each order takes on the page."""
        return timed(tasks, self.see)

    def see(self, kind: type[Order], end: End, took_us: int) -> None:
        """Count an order that ended."""
        self._seconds.labels(_short(kind.TYPE), outcome(end)).observe(took_us / US_PER_S)


def seconds(service: str) -> Metric:
    """Return the histogram of how long the orders of a service take."""
    meaning = "from taking up an order until its outcome (monotonic); `_count` is how many orders ended so"
    return Metric(f"kite_{service}_order_seconds", "histogram", meaning, LABELS, BOUNDS_S)


def outcome(end: End) -> str:
    """Return how an order ended as a label.

    >>> outcome(None)
    'cancelled'
    """
    if end is None:
        return CANCELLED
    return ERROR if isinstance(end, KiteError) else _short(end.TYPE)


def _short(event_type: str) -> str:
    return event_type.split(".")[2]


COMMON = (REDELIVERED, SPANS)
"""What the page of every worker has beside its own."""
