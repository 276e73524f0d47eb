"""Wake a standby: resume, load the residents it lacks, prove each, and only then call it ready."""

import asyncio
from collections.abc import Sequence

import structlog

from kite.clock import mono_us
from kite.orders import stage
from kite_schemas.yoco import InstanceReady, SleepMode, State, WakeOrdered
from kite_yoco import core
from kite_yoco.duty import Duty
from kite_yoco.lifecycle import Event, check
from kite_yoco.residents import hold

log: structlog.stdlib.BoundLogger = structlog.get_logger()


async def wake(duty: Duty[WakeOrdered]) -> InstanceReady:
    """Make a sleeping instance ready with every resident proven; one that is ready stays so. Raises KiteError."""
    began_us = mono_us()
    instance, order = duty.instance, duty.order
    ready_before = instance.state is State.READY
    if not ready_before:
        check(instance.id, instance.state, Event.WAKE)
    busy_us = instance.engine.busy_us
    stage("resume")
    listed = await (instance.engine.models() if ready_before else resumed(duty, began_us))
    awake_us = mono_us()
    token_us = await hold(duty, order.residents, listed, order.noise_micronats)
    if not ready_before:
        instance.move(Event.PROVEN)
    engine_us = instance.engine.busy_us - busy_us
    log.info("woken", instance=instance.id, t_first_token_us=token_us - began_us, engine_us=engine_us)
    return InstanceReady(
        instance=instance.id,
        node=instance.node,
        path=order.path,
        pid=instance.running.pid,
        endpoint=instance.running.url,
        versions=core.versions(order.residents),
        noise_micronats=order.noise_micronats,
        t_wake_us=awake_us - began_us,
        t_first_token_us=token_us - began_us,
    )


async def resumed(duty: Duty[WakeOrdered], began_us: int) -> Sequence[str]:
    """Wake the engine and return the names it serves.

    The fact, the wake and the list are under way at the same time: none needs another, and each costs milliseconds.
    All three have ended when this returns or raises, so that no fact comes after the outcome.

    Only the deepest sleep loses adapters: what is listed is asked again after it.
    """
    instance, mode = duty.instance, duty.instance.mode or SleepMode.PAUSED
    fact = instance.change(Event.WAKE, "ordered", began_us)
    told, done, listed = await asyncio.gather(
        duty.tell(fact), instance.engine.wake(mode), instance.engine.models(), return_exceptions=True
    )
    for result in (told, done):
        if isinstance(result, BaseException):
            raise result
    if isinstance(listed, BaseException):
        raise listed
    return await instance.engine.models() if mode is SleepMode.L2 else listed
