"""What a yoco tells Prometheus: how instances became ready, and how starts, wakes and prewarms ended."""

from collections.abc import Mapping
from enum import StrEnum

from kite.clock import US_PER_S
from kite.errors import KiteError
from kite.metrics import Metric, counter, histogram
from kite.orders import Tasks
from kite.orders.measure import COMMON, End, WorkerPage, timed
from kite_schemas.why import Order
from kite_schemas.yoco import InstanceReady, OrderFailed, OrderRefused, PrewarmOrdered, StartOrdered, WakeOrdered

KINDS: Mapping[type[Order], str] = {StartOrdered: "start", WakeOrdered: "wake", PrewarmOrdered: "prewarm"}
"""The orders that are counted."""

BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.417, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""From a resume (5 ms) to a start on a busy machine; the shipped deadline is one of them."""


class Code(StrEnum):
    """How an order can end; whatever else an error calls itself is `other`, so that labels have an end."""

    DONE = "done"
    BASE_MISSING = "base_missing"
    CANCELLED = "cancelled"
    EFFECT_MISSING = "effect_missing"
    ENGINE_ANSWER = "engine_answer"
    ENGINE_DIED = "engine_died"
    ENGINE_LATE = "engine_late"
    ENGINE_REFUSED = "engine_refused"
    ENGINE_TOO_OLD = "engine_too_old"
    ENGINE_UNPLACED = "engine_unplaced"
    ENGINE_UNREACHABLE = "engine_unreachable"
    OUT_OF_MEMORY = "out_of_memory"
    SPAWN_FAILED = "spawn_failed"
    WRONG_STATE = "wrong_state"
    OTHER = "other"


CODES = frozenset(code.value for code in Code)

READY = Metric(
    "kite_yoco_ready_seconds",
    "histogram",
    "from the moment yoco began a start or a wake until the first token, with every resident proven (monotonic)",
    {"path": "`hot`, `warm` or `cold`"},
    BOUNDS_S,
)
ORDERS = Metric(
    "kite_yoco_orders_total",
    "counter",
    "orders that ended, by what they were and how they ended",
    {"order": "`start`, `wake` or `prewarm`", "code": ", ".join(f"`{code}`" for code in Code)},
)
METRICS = (READY, ORDERS, *COMMON)


class Meter(WorkerPage):
    """The page of one yoco."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = histogram(READY, self.registry)
        self._orders = counter(ORDERS, self.registry)

    def measured(self, tasks: Tasks) -> Tasks:
        """Return the same table, with what the orders of `KINDS` come to on the page."""
        return {**tasks, **timed({kind: task for kind, task in tasks.items() if kind in KINDS}, self.see)}

    def see(self, kind: type[Order], end: End, took_us: int) -> None:
        """Count how an order ended, and how long an instance took to be ready, which its outcome tells."""
        del took_us
        if isinstance(end, InstanceReady):
            self._ready.labels(end.path).observe(end.t_first_token_us / US_PER_S)
        self._orders.labels(KINDS[kind], code(end)).inc()


def code(end: End) -> Code:
    """Return how an order ended as a label.

    >>> code(None)
    <Code.CANCELLED: 'cancelled'>
    """
    if end is None:
        return Code.CANCELLED
    return bounded(end.code) if isinstance(end, OrderRefused | OrderFailed | KiteError) else Code.DONE


def bounded(found: str) -> Code:
    """Return a code as a label.

    >>> bounded("engine_died"), bounded("something new")
    (<Code.ENGINE_DIED: 'engine_died'>, <Code.OTHER: 'other'>)
    """
    return Code(found) if found in CODES else Code.OTHER
