"""Drain, sleep, stop: an instance that has to do less."""

import asyncio

from kite.clock import mono_us
from kite.orders import stage
from kite_schemas.yoco import DrainOrdered, InstanceChanged, SleepOrdered, StopOrdered
from kite_yoco import core
from kite_yoco.duty import Duty
from kite_yoco.lifecycle import Event, check

DRAIN_POLL_S = 0.05


async def drain(duty: Duty[DrainOrdered]) -> InstanceChanged:
    """Wait until no request runs or waits. The arbitrator routes none to an instance that is draining."""
    began_us = mono_us()
    instance = duty.instance
    await duty.tell(instance.change(Event.DRAIN, "ordered", began_us))
    stage("drain")
    while not core.is_idle(await instance.engine.activity()):  # noqa: ASYNC110 # another process: it sets no event of ours
        await asyncio.sleep(DRAIN_POLL_S)
    return instance.change(Event.DRAINED, "drained", began_us)


async def sleep(duty: Duty[SleepOrdered]) -> InstanceChanged:
    """Pause a drained instance: requests that still come wait inside the engine until it wakes."""
    began_us = mono_us()
    instance = duty.instance
    check(instance.id, instance.state, Event.PAUSED)
    stage("pause")
    await instance.engine.pause()
    return instance.change(Event.PAUSED, "paused", began_us)


async def stop(duty: Duty[StopOrdered]) -> InstanceChanged:
    """End the process, whatever it does."""
    began_us = mono_us()
    instance = duty.instance
    stage("stop")
    await instance.end()
    return instance.change(Event.STOPPED, "ordered", began_us)
