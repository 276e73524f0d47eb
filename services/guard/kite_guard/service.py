"""The guard at work: orders in, distributions read from two engines, one fact out."""

import asyncio

import structlog

from kite import __version__, clock, probes
from kite.bus import Bus
from kite.clock import US_PER_S
from kite.engine import Engine, EngineError
from kite.events import Origin
from kite.orders import GRACE_US, Emit, Received, Task, Tasks, Worker, stage
from kite.probes import Probes
from kite.proof import Comparison, read_pair
from kite_guard import core
from kite_guard.settings import Settings
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered

SERVICE = "guard"
TIME_SHARE = 0.9
"""Share of an order's time to measure in: the arbitrator must have the answer before the order expires."""

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Guard:
    """Compares instances with one set of probes."""

    def __init__(self, chosen: Probes) -> None:
        self._probes = chosen

    @property
    def tasks(self) -> Tasks:
        """What the worker calls for each type of order."""
        return {ComparisonOrdered: Task(self.compare, failed)}

    async def compare(self, received: Received[ComparisonOrdered], emit: Emit) -> Compared | ComparisonFailed:
        """Measure the model on both sides; whatever keeps an engine from answering is the outcome, not an error."""
        del emit  # one fact is all there is to say
        stage("measure")
        order, began_us = received.data, clock.mono_us()
        limit_s = measure_s(received.deadline_us, clock.wall_us())
        try:
            async with asyncio.timeout(limit_s):
                found = await self._measure(order)
        except TimeoutError:
            return core.failure(order, core.LATE, f"not measured within {limit_s:.1f} s")
        except EngineError as error:
            return core.failure(order, core.reason(error), str(error))
        duration_us = clock.mono_us() - began_us
        log.info("compared", request=order.request, kl_micronats=found.kl_micronats, covered_ppm=found.covered_ppm)
        return core.verdict(order, found, duration_us)

    async def _measure(self, order: ComparisonOrdered) -> Comparison:
        first, second = order.sides
        async with Engine(first.endpoint) as one, Engine(second.endpoint) as other:
            return await read_pair(one, order.model, other, order.model, self._probes.prompts)


def measure_s(deadline_us: int, now_us: int) -> float:
    """Return how many seconds to measure for, of an order that the worker stops at `deadline_us`."""
    return max(0, deadline_us - GRACE_US - now_us) / US_PER_S * TIME_SHARE


def failed(received: Received[ComparisonOrdered], at: str, code: str, message: str) -> ComparisonFailed:
    """Return the outcome of an order that was cut off."""
    return core.failure(received.data, code, f"{at}: {message}")


async def serve(settings: Settings) -> None:
    """Work for one node until cancelled. Raises the errors of the bus and the journal."""
    origin = Origin(source=f"kite/{SERVICE}/{settings.node}", producer=f"{SERVICE}@{__version__}")
    async with await Bus.connect(settings.nats_url, f"{SERVICE}-{settings.node}") as bus:
        worker = Worker(
            bus=bus,
            origin=origin,
            service=SERVICE,
            node=settings.node,
            journal=settings.journal,
            handlers=Guard(probes.default()).tasks,
        )
        log.info("guarding", node=settings.node, probes=probes.default().digest)
        await worker.run()
