"""Upcycle's life: take an order, look, act, say what came of it.

Nothing here decides: a version that has no effect stays loaded until the arbitrator orders it out again.
"""

from functools import partial

import structlog

from kite import __version__, clock, probes
from kite.bus import Bus
from kite.events import Origin
from kite.metrics import served
from kite.orders import GRACE_US, Received, Task, Tasks, Worker
from kite.orders.measure import Meter
from kite.watches import Watch, beside, tell
from kite_schemas.upcycle import (
    AdapterRefused,
    BlendFailed,
    ChannelSampled,
    DecaySet,
    DeleteFailed,
    DeleteOrdered,
    DriftObserved,
    InjectionAdmitted,
    LoadFailed,
    LoadOrdered,
    RebuildOrdered,
    ResidentsSet,
    RetireFailed,
    RetireOrdered,
    RollbackFailed,
    RollbackOrdered,
    VerificationOrdered,
)
from kite_schemas.why import Order
from kite_upcycle import channel, core
from kite_upcycle.channel import Channel
from kite_upcycle.drift import Drift
from kite_upcycle.engines import Engines
from kite_upcycle.holding import Holding
from kite_upcycle.making import Making, require_root
from kite_upcycle.metrics import SECONDS
from kite_upcycle.settings import Settings
from kite_upcycle.shifts import Shifts

SERVICE = "upcycle"

log: structlog.stdlib.BoundLogger = structlog.get_logger()


def tasks(making: Making, holding: Holding) -> Tasks:
    """Return the table of what this service carries out."""
    return {
        VerificationOrdered: Task(making.verify, _verification_failed),
        InjectionAdmitted: Task(making.blend, _blend_failed),
        RebuildOrdered: Task(making.rebuild, _blend_failed),
        DeleteOrdered: Task(making.delete, _delete_failed),
        LoadOrdered: Task(holding.load, _load_failed),
        RollbackOrdered: Task(holding.roll_back, _rollback_failed),
        RetireOrdered: Task(holding.retire, _retire_failed),
    }


async def serve(settings: Settings) -> None:
    """Carry out the orders of one node until cancelled. Raises MissingPath, and the bus's and the journal's errors."""
    require_root(settings)
    origin = Origin(source=f"kite/{SERVICE}/{settings.node}", producer=f"{SERVICE}@{__version__}")
    async with await settings.connect(SERVICE) as bus, Engines() as engines:
        watched = Channel(settings.node, Shifts(engines, probes.default().prompts))
        drift = Drift(engines, settings.store)
        making = Making(settings, engines, drift.endpoints)
        holding = Holding(making, engines, probes.default(), watched, settings.adapters)
        await making.warm()
        meter = Meter(SECONDS)
        worker = Worker(
            bus=bus,
            origin=origin,
            service=SERVICE,
            node=settings.node,
            journal=settings.journal,
            handlers=meter.measured(tasks(making, holding)),
            notices={DecaySet: watched.hear_decay, ResidentsSet: drift.hear},
        )
        log.info(
            "upcycle_ready", node=settings.node, adapter_root=str(settings.adapters), probes=probes.default().digest
        )
        meter.watch(worker)
        with served(meter.registry, settings):
            async with beside(watches(bus, worker, watched, drift, settings.node)):
                await worker.run()


def watches(bus: Bus, worker: Worker, watched: Channel, drift: Drift, node: str) -> dict[str, Watch]:
    """Return what looks on beside the orders."""

    async def say(sampled: ChannelSampled) -> None:
        await worker.publish(f"node/{node}", sampled)

    async def report(observed: DriftObserved) -> None:
        await worker.publish(f"instance/{observed.instance}", observed)

    return {
        "windows": partial(channel.follow, bus, node, watched.hear),
        "shifts": watched.shifts.run,
        "channel": partial(tell, watched.sample, say),
        "drift": partial(drift.run, report),
    }


def _verification_failed(
    received: Received[VerificationOrdered], stage_name: str, code: str, message: str
) -> AdapterRefused:
    return core.refused(received.data, (core.unfinished(stage_name, code, message),), _age_us(received))


def _blend_failed(
    received: Received[InjectionAdmitted] | Received[RebuildOrdered], stage_name: str, code: str, message: str
) -> BlendFailed:
    del stage_name
    return BlendFailed(request=received.data.request, code=code, message=message, duration_us=_age_us(received))


def _load_failed(received: Received[LoadOrdered], stage_name: str, code: str, message: str) -> LoadFailed:
    order = received.data
    version = order.resident.version
    return LoadFailed(instance=order.instance, version=version, stage=stage_name, code=code, message=message)


def _rollback_failed(received: Received[RollbackOrdered], stage_name: str, code: str, message: str) -> RollbackFailed:
    del stage_name
    order = received.data
    return RollbackFailed(
        request=order.request, instance=order.instance, version=order.version, code=code, message=message
    )


def _retire_failed(received: Received[RetireOrdered], stage_name: str, code: str, message: str) -> RetireFailed:
    del stage_name
    order = received.data
    return RetireFailed(instance=order.instance, version=order.version, code=code, message=message)


def _delete_failed(received: Received[DeleteOrdered], stage_name: str, code: str, message: str) -> DeleteFailed:
    del stage_name
    order = received.data
    return DeleteFailed(version=order.version, digest=order.digest, code=code, message=message)


def _age_us(received: Received[Order]) -> int:
    """Return how long ago the order was published: what a failure took, waiting included."""
    return max(0, clock.wall_us() - (received.deadline_us - received.data.ttl_us - GRACE_US))
