"""The composition root of yoco: bus, worker and instances put together, registered, and taken apart again."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import structlog

from kite import __version__, probes
from kite.bus import Bus
from kite.clock import mono_us
from kite.errors import KiteError
from kite.events import Origin, new_id
from kite.metrics import served
from kite.orders import Begin, Worker
from kite.watches import Watch, beside, tell
from kite_schemas.arbitration import TransportChanged
from kite_schemas.yoco import ChannelSampled, InstanceChanged, NodeRegistered
from kite_yoco import channel
from kite_yoco.adoption import adopt
from kite_yoco.devices import find_devices, memory_bytes
from kite_yoco.duty import Place
from kite_yoco.health import Bounds
from kite_yoco.health import Watch as HealthWatch
from kite_yoco.instances import Instances
from kite_yoco.metrics import Meter
from kite_yoco.offers import find_offers, offered
from kite_yoco.records import Records, StateUnwritable, holding
from kite_yoco.recovery import to_the_end
from kite_yoco.settings import Settings
from kite_yoco.table import tasks
from kite_yoco.telemetry.listener import Listener, channel_name
from kite_yoco.telemetry.memory import Memory
from kite_yoco.telemetry.outlet import Outlet
from kite_yoco.telemetry.sampler import Sampler

SERVICE = "yoco"
HANDLERS_S = 2.0  # for orders in hand to let go at the end
LEFT_HINT = "their keepers hold them for the next yoco, and end them when none comes"
FAREWELL_S = 3.0  # for the last facts: the bus may be gone already

log: structlog.stdlib.BoundLogger = structlog.get_logger()


async def serve(settings: Settings) -> None:
    """Register the node and carry out orders until cancelled; then end every engine. Raises KiteError.

    An error ends no engine: each is kept for the yoco that is started next.
    """
    records = Records(settings.state_dir, settings.keep_s)
    prepare(settings.logs, records)
    origin = Origin(f"kite/{SERVICE}/{settings.node}", f"{SERVICE}@{__version__}")
    with holding(settings.state_dir), Listener(channel_name(settings.state_dir)) as listener:
        async with await settings.connect(SERVICE) as bus:
            await serve_on(bus, listener, settings, origin, records)


async def serve_on(bus: Bus, listener: Listener, settings: Settings, origin: Origin, records: Records) -> None:
    """Put worker, instances and sampler together, and let them work. Raises KiteError."""
    registered = registration(settings.node)

    async def report(fact: InstanceChanged) -> None:
        await worker.publish(f"instance/{fact.instance}", fact)

    async def say(sampled: ChannelSampled) -> None:
        await worker.publish(f"node/{settings.node}", sampled)

    def sample() -> ChannelSampled:
        states = [instance.state for instance in instances]
        return channel.sampled(settings.node, states, place.starts, memory.worst(mono_us()))

    meter = Meter()
    instances = Instances(settings.node, report, records)
    memory = Memory(registered.devices, instances)
    outlet = Outlet(bus, settings.node)
    place = Place(instances, settings.logs, settings.adapters, probes.default(), listener.name, registered.engines)
    worker = Worker(
        bus=bus,
        origin=origin,
        service=SERVICE,
        node=settings.node,
        journal=settings.journal,
        handlers=meter.measured(tasks(place)),
        notices={TransportChanged: partial(outlet.switch, registered.boot)},
    )
    meter.watch(worker)
    sampler = Sampler(settings.node, registered.boot, origin, instances=instances, listener=listener, memory=memory)
    health = health_of(instances, settings)
    watches = {"sampler": partial(sampler.run, outlet), "channel": partial(tell, sample, say), "health": health.run}

    async def begin() -> None:
        legacy = await adopt(instances, records)
        for fact in legacy.lost:
            await report(fact)
        await worker.publish(f"node/{settings.node}", registered.model_copy(update={"instances": legacy.found}))
        log.info("node_registered", node=settings.node, boot=registered.boot)

    with served(meter.registry, settings):
        await work(worker, instances, begin, watches)


def health_of(instances: Instances, settings: Settings) -> HealthWatch:
    """Return what watches the engines."""
    return HealthWatch(instances, Bounds(settings.hung_s))


def prepare(logs: Path, records: Records) -> None:
    """Make the folders. Raises StateUnwritable."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        records.prepare()
    except OSError as error:
        raise StateUnwritable(logs, error.strerror or str(error)) from error


async def work(worker: Worker, instances: Instances, begin: Begin, watches: Mapping[str, Watch]) -> None:
    """Adopt, register, work, and watch the node meanwhile. Told to end, and however often, no engine is left.

    A second yoco ends before it adopts: the journal is opened first. The node is registered before an order that the
    last yoco had begun is taken up again, since a registration is the truth that later facts change.
    """
    begun = asyncio.Event()

    async def beginning() -> None:
        await begin()
        begun.set()

    running = asyncio.create_task(worker.run(beginning))
    waiting = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        async with beside(watches):
            await asyncio.wait({running})
        running.result()
    except asyncio.CancelledError:
        await to_the_end(close(worker, running, instances))
        raise
    except BaseException:
        instances.leave()
        log.warning("engines_left", instances=[one.id for one in instances if one.lives], hint=LEFT_HINT)
        raise
    finally:
        waiting.cancel()


def registration(node: str) -> NodeRegistered:
    """Return what this node says of itself, but for the engines that it took over."""
    devices = find_devices()
    engines = find_offers(devices)
    return NodeRegistered(
        node=node,
        boot=new_id(),
        devices=devices,
        memory_bytes=memory_bytes(),
        sleep_modes=offered(engines),
        instances=(),
        engines=engines,
    )


async def close(worker: Worker, running: "asyncio.Task[None]", instances: Instances) -> None:
    """Take no more orders, end all engines at once, and say that they are gone."""
    instances.closing = True
    running.cancel()
    await asyncio.wait({running}, timeout=HANDLERS_S)
    gone = await instances.close()
    log.info("engines_ended", instances=[fact.instance for fact in gone])
    try:
        async with asyncio.timeout(FAREWELL_S):
            await asyncio.gather(*(worker.publish(f"instance/{fact.instance}", fact) for fact in gone))
    except (KiteError, TimeoutError) as error:
        log.warning("farewell_unsaid", instances=[fact.instance for fact in gone], reason=str(error))
