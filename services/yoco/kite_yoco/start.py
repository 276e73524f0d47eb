"""Start an engine process: spawn, wait until it answers, warm up, measure its base's noise, prove its residents."""

from pathlib import Path

from kite.clock import US_PER_S, mono_us
from kite.errors import Fault, KiteError
from kite.orders import stage
from kite.proof import noise
from kite.telemetry import variables
from kite_schemas.yoco import EngineSpec, InstanceReady, StartOrdered, State
from kite_schemas.yoco import Path as ReadyPath
from kite_yoco import core
from kite_yoco.core import Opening
from kite_yoco.duty import Duty
from kite_yoco.instances import Instance
from kite_yoco.lifecycle import Event, WrongState
from kite_yoco.residents import first_token, hold

STARTABLE = (State.ABSENT, State.FAILED)


class BaseMissing(KiteError):
    """The folder of the base is not there."""

    code = "base_missing"
    fault = Fault.OPERATOR


async def start(duty: Duty[StartOrdered]) -> InstanceReady:
    """Make the instance ready from nothing; one that is ready already is reported as it is. Raises KiteError."""
    began_us = mono_us()
    instance = duty.instance
    opening = core.OPENINGS[instance.state]
    if opening is Opening.REFUSE:
        raise WrongState(instance.id, instance.state, Event.START)
    if opening is Opening.REPORT and await instance.engine.healthy():
        return await found(duty, began_us)
    await clear(duty, began_us)
    await duty.tell(instance.change(Event.START, "ordered", began_us))
    return await spawned(duty, began_us)


async def found(duty: Duty[StartOrdered], began_us: int) -> InstanceReady:
    """Return the report of an instance that runs already, once it holds what it should. Raises KiteError."""
    instance, residents = duty.instance, duty.order.residents or ()
    listed = await instance.engine.models()
    listed_us = token_us = mono_us()
    if residents:
        token_us = await hold(duty, residents, listed, instance.noise_micronats)
    held = core.merged(core.loaded(listed, instance.base), core.versions(residents))
    return ready(instance, held, listed_us - began_us, token_us - began_us)


async def clear(duty: Duty[StartOrdered], began_us: int) -> None:
    """End what an earlier start left, and say so when it was thought to live."""
    instance = duty.instance
    if instance.state not in STARTABLE:
        await duty.tell(instance.change(Event.FAILED, "replaced", began_us, "started anew: it does not answer"))
    await instance.end()


async def spawned(duty: Duty[StartOrdered], began_us: int) -> InstanceReady:
    """Start the process and bring it to its first token, and that of every resident."""
    instance, order = duty.instance, duty.order
    stage("spawn")
    check_base(order.spec)
    instance.device = order.device
    telling = variables(duty.place.telemetry, instance.id)
    await instance.spawn(order.spec, duty.log_file, {**core.pinned(order.device), **telling})
    duty.place.instances.watch(instance)
    stage("health")
    await instance.running.wait_healthy(order.ttl_us / US_PER_S)
    healthy_us = mono_us()
    await duty.tell(instance.change(Event.ANSWERED, "healthy", began_us))
    stage("warm")
    await first_token(instance.engine, instance.base)
    token_us = mono_us()
    stage("noise")
    instance.noise_micronats = await noise(instance.engine, instance.base, duty.place.probes.prompts)
    residents = order.residents or ()
    if residents:
        token_us = await hold(duty, residents, (), instance.noise_micronats)
    instance.move(Event.WARMED)
    return ready(instance, core.versions(residents), healthy_us - began_us, token_us - began_us)


def check_base(spec: EngineSpec) -> None:
    """Raise BaseMissing unless the base is a folder: an engine takes half a minute to say it, and says it worse."""
    if not Path(spec.base_path).is_dir():
        raise BaseMissing(
            f"no base in {spec.base_path}",
            hint="the path of the pool must be that of a folder on this node",
        )


def ready(instance: Instance, versions: tuple[str, ...], wake_us: int, token_us: int) -> InstanceReady:
    """Return the report of a cold start."""
    return InstanceReady(
        instance=instance.id,
        node=instance.node,
        path=ReadyPath.COLD,
        pid=instance.running.pid,
        endpoint=instance.running.url,
        versions=versions,
        noise_micronats=instance.noise_micronats,
        t_wake_us=wake_us,
        t_first_token_us=token_us,
    )
