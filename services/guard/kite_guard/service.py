"""The guard at work: orders in, distributions read from the engines of its node, one fact out."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import structlog

from kite import __version__, clock, probes, proof
from kite.clock import US_PER_S
from kite.engine import Engine, EngineError
from kite.events import Origin
from kite.metrics import served
from kite.orders import GRACE_US, Emit, Received, Task, Tasks, Worker, stage
from kite.orders.measure import Meter
from kite.probes import Probes
from kite.proof import Comparison
from kite_guard import core
from kite_guard.metrics import SECONDS
from kite_guard.settings import Settings
from kite_schemas.guard import (
    Compared,
    ComparisonFailed,
    ComparisonOrdered,
    DistributionMeasured,
    Logprobs,
    MeasurementOrdered,
)

SERVICE = "guard"
TIME_SHARE = 0.9
"""Share of an order's time to measure in: the arbitrator must have the answer before the order expires."""

Result = TypeVar("Result")

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Guard:
    """Measures instances with the sets of probes that its orders name; `root` is the adapter root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def tasks(self) -> Tasks:
        """What the worker calls for each type of order."""
        return {ComparisonOrdered: Task(self.compare, failed), MeasurementOrdered: Task(self.measure, failed)}

    async def compare(self, received: Received[ComparisonOrdered], emit: Emit) -> Compared | ComparisonFailed:
        """Measure the model on both sides; whatever keeps an engine from answering is the outcome, not an error.

        Raises ProbesMissing, ProbesAltered and ProbesDiffer.
        """
        del emit  # one fact is all there is to say
        order, began_us = received.data, clock.mono_us()
        chosen = await self._probes(order)
        found = await _answer(received, _comparison(order, chosen))
        if isinstance(found, ComparisonFailed):
            return found
        log.info("compared", request=order.request, kl_micronats=found.kl_micronats, covered_ppm=found.covered_ppm)
        return core.verdict(order, found, chosen.digest, clock.mono_us() - began_us)

    async def measure(
        self, received: Received[MeasurementOrdered], emit: Emit
    ) -> DistributionMeasured | ComparisonFailed:
        """Measure the model on one side, for a comparison with an instance of another node. Raises as `compare`."""
        del emit  # as above
        order, began_us = received.data, clock.mono_us()
        chosen = await self._probes(order)
        found = await _answer(received, _measurement(order, chosen))
        if isinstance(found, ComparisonFailed):
            return found
        log.info("measured", request=order.request, instance=order.side.instance, positions=len(found))
        return DistributionMeasured(
            request=order.request,
            first=order.first,
            second=order.second,
            instance=order.side.instance,
            model=order.model,
            probes=chosen.digest,
            positions=tuple(found),
            duration_us=clock.mono_us() - began_us,
        )

    async def _probes(self, order: core.Wanted) -> Probes:
        stage("probes")
        chosen = await asyncio.to_thread(proof.load_probes, self._root, order.probes)
        core.check(order, chosen)
        return chosen


async def _answer(received: Received[core.Wanted], reading: Awaitable[Result]) -> Result | ComparisonFailed:
    """Return what was read, or why nothing was within the order's time."""
    stage("measure")
    order, limit_s = received.data, measure_s(received.deadline_us, clock.wall_us())
    try:
        async with asyncio.timeout(limit_s):
            return await reading
    except TimeoutError:
        return core.failure(order, core.LATE, f"not measured within {limit_s:.1f} s")
    except EngineError as error:
        return core.failure(order, core.reason(error), str(error))


async def _comparison(order: ComparisonOrdered, chosen: Probes) -> Comparison:
    first, second = order.sides
    async with Engine(first.endpoint) as one:
        if order.measured is not None:
            return await proof.read_against(one, order.model, chosen.prompts, order.measured)
        async with Engine(second.endpoint) as other:
            return await proof.read_pair(one, order.model, other, order.model, chosen.prompts)


async def _measurement(order: MeasurementOrdered, chosen: Probes) -> list[Logprobs]:
    async with Engine(order.side.endpoint) as engine:
        return await proof.read_side(engine, order.model, chosen.prompts, order.tokens)


def measure_s(deadline_us: int, now_us: int) -> float:
    """Return how many seconds to measure for, of an order that the worker stops at `deadline_us`."""
    return max(0, deadline_us - GRACE_US - now_us) / US_PER_S * TIME_SHARE


def failed(received: Received[core.Wanted], at: str, code: str, message: str) -> ComparisonFailed:
    """Return the outcome of an order that was cut off."""
    return core.failure(received.data, code, f"{at}: {message}")


async def serve(settings: Settings) -> None:
    """Work for one node until cancelled. Raises the errors of the bus and the journal."""
    origin = Origin(source=f"kite/{SERVICE}/{settings.node}", producer=f"{SERVICE}@{__version__}")
    async with await settings.connect(SERVICE) as bus:
        meter = Meter(SECONDS)
        worker = Worker(
            bus=bus,
            origin=origin,
            service=SERVICE,
            node=settings.node,
            journal=settings.journal,
            handlers=meter.measured(Guard(settings.adapters).tasks),
        )
        log.info("guarding", node=settings.node, probes=probes.default().digest)
        meter.watch(worker)
        with served(meter.registry, settings):
            await worker.run()
