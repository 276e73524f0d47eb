"""The composition root of yoco: bus, worker and instances put together, registered, and taken apart again."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import structlog

from kite import __version__, probes
from kite.bus import Bus
from kite.clock import mono_us
from kite.errors import Fault, KiteError
from kite.events import Origin, new_id
from kite.orders import Worker
from kite.watches import Watch, beside, tell
from kite_schemas.arbitration import TransportChanged
from kite_schemas.yoco import ChannelSampled, InstanceChanged, NodeRegistered, SleepMode
from kite_yoco import channel
from kite_yoco.devices import find_devices, memory_bytes
from kite_yoco.duty import Place
from kite_yoco.instances import Instances
from kite_yoco.recovery import to_the_end
from kite_yoco.settings import Settings
from kite_yoco.table import tasks
from kite_yoco.telemetry.listener import Listener
from kite_yoco.telemetry.memory import Memory
from kite_yoco.telemetry.outlet import Outlet
from kite_yoco.telemetry.sampler import Sampler

SERVICE = "yoco"
HANDLERS_S = 2.0  # for orders in hand to let go at the end
FAREWELL_S = 3.0  # for the last facts: the bus may be gone already

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class StateUnwritable(KiteError):
    """The state folder cannot be made or written."""

    code = "state_unwritable"
    fault = Fault.OPERATOR

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"cannot write {folder}: {why}", hint="set KITE_STATE_DIR to a folder of this service's own")
        self.folder = folder
        self.why = why


async def serve(settings: Settings) -> None:
    """Register the node and carry out orders until cancelled; then end every engine. Raises KiteError."""
    prepare(settings.logs)
    origin = Origin(f"kite/{SERVICE}/{settings.node}", f"{SERVICE}@{__version__}")
    with Listener() as listener:
        async with await Bus.connect(settings.nats_url, f"{SERVICE}-{settings.node}", signer=settings.signer()) as bus:
            await serve_on(bus, listener, settings, origin)


async def serve_on(bus: Bus, listener: Listener, settings: Settings, origin: Origin) -> None:
    """Put worker, instances and sampler together, and let them work. Raises KiteError."""
    registered = registration(settings.node)

    async def report(fact: InstanceChanged) -> None:
        await worker.publish(f"instance/{fact.instance}", fact)

    async def say(sampled: ChannelSampled) -> None:
        await worker.publish(f"node/{settings.node}", sampled)

    def sample() -> ChannelSampled:
        states = [instance.state for instance in instances]
        return channel.sampled(settings.node, states, place.starts, memory.worst(mono_us()))

    instances = Instances(settings.node, report)
    memory = Memory(registered.devices, instances)
    outlet = Outlet(bus, settings.node)
    place = Place(instances, settings.logs, settings.adapters, probes.default(), listener.name)
    worker = Worker(
        bus=bus,
        origin=origin,
        service=SERVICE,
        node=settings.node,
        journal=settings.journal,
        handlers=tasks(place),
        notices={TransportChanged: partial(outlet.switch, registered.boot)},
    )
    sampler = Sampler(settings.node, registered.boot, origin, instances=instances, listener=listener, memory=memory)
    watches = {"sampler": partial(sampler.run, outlet), "channel": partial(tell, sample, say)}
    await work(worker, instances, registered, watches)


def prepare(logs: Path) -> None:
    """Make the folders. Raises StateUnwritable."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateUnwritable(logs, error.strerror or str(error)) from error


async def work(worker: Worker, instances: Instances, registered: NodeRegistered, watches: Mapping[str, Watch]) -> None:
    """Run the worker, register the node, watch it then; whatever ends it, and however often it is told to, no engine
    is left.
    """
    running = asyncio.create_task(worker.run())
    try:
        await asyncio.sleep(0)  # the worker opens its journal in its first step: a second yoco ends there, unregistered
        if not running.done():
            await worker.publish(f"node/{registered.node}", registered)
            log.info("node_registered", node=registered.node)
        async with beside(watches):
            await asyncio.wait({running})
        running.result()
    finally:
        await to_the_end(close(worker, running, instances))


def registration(node: str) -> NodeRegistered:
    """Return what this node says of itself: engines die with their yoco, so that a new one has none."""
    return NodeRegistered(
        node=node,
        boot=new_id(),
        devices=find_devices(),
        memory_bytes=memory_bytes(),
        sleep_modes=(SleepMode.PAUSED,),
        instances=(),
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
