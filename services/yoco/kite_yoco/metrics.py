"""What a yoco tells Prometheus: how instances became ready, and how starts, wakes and prewarms ended."""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Never

from prometheus_client import CollectorRegistry

from kite.clock import US_PER_S
from kite.errors import KiteError
from kite.metrics import Metric, counter, histogram
from kite.orders import Emit, Handler, Received, Task, Tasks
from kite_schemas.why import Order, Outcome
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
METRICS = (READY, ORDERS)


class Meter:
    """The page of one yoco."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ready = histogram(READY, self.registry)
        self._orders = counter(ORDERS, self.registry)

    def measured(self, tasks: Tasks) -> Tasks:
        """Return the same table, with what the orders of `KINDS` come to on the page."""
        return {kind: self._task(KINDS[kind], task) if kind in KINDS else task for kind, task in tasks.items()}

    def see(self, kind: str, outcome: Outcome) -> None:
        """Count an outcome, and how long an instance took to be ready."""
        if isinstance(outcome, InstanceReady):
            self._ready.labels(outcome.path).observe(outcome.t_first_token_us / US_PER_S)
        failed = outcome.code if isinstance(outcome, OrderRefused | OrderFailed) else Code.DONE
        self._count(kind, failed)

    def _count(self, kind: str, code: str) -> None:
        self._orders.labels(kind, bounded(code)).inc()

    def _task(self, kind: str, task: Task[Never]) -> Task[Never]:
        handler: Handler[Never] = task.handler

        async def measuring(received: Received[Never], emit: Emit) -> Outcome:
            try:
                outcome = await handler(received, emit)
            except KiteError as error:
                self._count(kind, error.code)
                raise
            except asyncio.CancelledError:  # late, given up, or the end of this yoco
                self._count(kind, Code.CANCELLED)
                raise
            self.see(kind, outcome)
            return outcome

        return Task(measuring, task.failed)


def bounded(code: str) -> Code:
    """Return a code as a label.

    >>> bounded("engine_died"), bounded("something new")
    (<Code.ENGINE_DIED: 'engine_died'>, <Code.OTHER: 'other'>)
    """
    return Code(code) if code in CODES else Code.OTHER
