"""Start an engine: spawn it, or let on one that waits, until it answers; warm up, measure noise, prove residents."""

from kite.clock import US_PER_S, mono_us
from kite.orders import stage
from kite.proof import noise
from kite_schemas.yoco import InstanceReady, Path, StartOrdered
from kite_yoco import core
from kite_yoco.core import Opening
from kite_yoco.duty import Duty
from kite_yoco.instances import Instance
from kite_yoco.lifecycle import Event, WrongState
from kite_yoco.prewarm import is_held
from kite_yoco.residents import first_token, hold
from kite_yoco.spawn import clear, spawn


async def start(duty: Duty[StartOrdered]) -> InstanceReady:
    """Make the instance ready from nothing; one that is ready already is reported as it is. Raises KiteError."""
    began_us = mono_us()
    instance = duty.instance
    opening = core.OPENINGS[instance.state]
    if opening is Opening.REFUSE:
        raise WrongState(instance.id, instance.state, Event.START)
    if opening is Opening.REPORT and await instance.engine.healthy():
        return await found(duty, began_us)
    if opening is Opening.LET_ON and await is_held(duty):
        await duty.tell(instance.change(Event.START, "let_on", began_us))
        stage("let_on")
        await instance.running.let_on()
    else:
        await clear(duty, began_us)
        await duty.tell(instance.change(Event.START, "ordered", began_us))
        await spawn(duty)
    return await settled(duty, began_us)


async def found(duty: Duty[StartOrdered], began_us: int) -> InstanceReady:
    """Return the report of an instance that runs already, once it holds what it should. Raises KiteError."""
    instance, residents = duty.instance, duty.order.residents or ()
    listed = await instance.engine.models()
    listed_us = token_us = mono_us()
    if residents:
        token_us = await hold(duty, residents, listed, instance.noise_micronats)
    held = core.merged(core.loaded(listed, instance.base), core.versions(residents))
    return ready(instance, held, listed_us - began_us, token_us - began_us)


async def settled(duty: Duty[StartOrdered], began_us: int) -> InstanceReady:
    """Bring a process that has been started to its first token, and that of every resident. Raises KiteError."""
    instance, order = duty.instance, duty.order
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


def ready(instance: Instance, versions: tuple[str, ...], wake_us: int, token_us: int) -> InstanceReady:
    """Return the report of a cold start."""
    return InstanceReady(
        instance=instance.id,
        node=instance.node,
        path=Path.COLD,
        pid=instance.running.pid,
        endpoint=instance.running.url,
        versions=versions,
        noise_micronats=instance.noise_micronats,
        t_wake_us=wake_us,
        t_first_token_us=token_us,
    )
