"""Prewarm an instance: a process that has done all that needs no weights, and waits for them.

It runs where nothing serves and behind everything that does. A start of the same engine lets it on; it is nobody's to
ask meanwhile, for it does not listen yet.
"""

from kite.clock import US_PER_S, mono_us
from kite.engine import EngineError
from kite.orders import stage
from kite_schemas.yoco import InstanceChanged, PrewarmOrdered, StartOrdered, State
from kite_yoco.duty import Duty
from kite_yoco.instances import Instance
from kite_yoco.lifecycle import Event, check
from kite_yoco.spawn import clear, spawn

CODE = "held"
REPLACED = (State.STARTING, State.PREWARMED)
"""The states in which what is there is ended first: an attempt that was cut short, or another engine that waits."""


async def prewarm(duty: Duty[PrewarmOrdered]) -> InstanceChanged:
    """Bring the instance to where it waits for its weights; one that waits there is reported as it is.

    Raises WrongState, EngineTooOld, BaseMissing, SpawnFailed or EngineError.
    """
    began_us = mono_us()
    instance, order = duty.instance, duty.order
    if not await is_held(duty):
        if instance.state not in REPLACED:
            check(instance.id, instance.state, Event.PREWARM)
        await clear(duty, began_us)
        await duty.tell(instance.change(Event.PREWARM, "ordered", began_us))
        await spawn(duty, held=True)
        instance.running.restrain(order.cores)
        stage("hold")
        await instance.running.wait_held(order.ttl_us / US_PER_S)
    return instance.change(Event.HELD, CODE, began_us)


async def is_held(duty: Duty[PrewarmOrdered] | Duty[StartOrdered]) -> bool:
    """Say whether the very engine that is ordered waits for its weights, on the device that it is ordered for."""
    instance, order = duty.instance, duty.order
    same = instance.lives and instance.running.spec == order.spec and instance.device == order.device
    return instance.state is State.PREWARMED and same and await waits(instance)


async def waits(instance: Instance) -> bool:
    """Say whether the process of an instance waits for its weights; one that does not answer does nothing."""
    try:
        return await instance.running.is_held()
    except EngineError:
        return False
