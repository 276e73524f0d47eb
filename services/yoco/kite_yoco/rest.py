"""Drain, sleep, stop: an instance that has to do less."""

import asyncio
from collections.abc import Sequence

from kite.clock import mono_us
from kite.errors import Fault, KiteError
from kite.orders import stage
from kite_schemas.yoco import (
    DrainOrdered,
    EngineOffer,
    InstanceChanged,
    SleepMode,
    SleepOrdered,
    State,
    StopOrdered,
)
from kite_yoco import core
from kite_yoco.duty import Duty
from kite_yoco.lifecycle import Event, check

DRAIN_POLL_S = 0.05


class ModeUnsupported(KiteError):
    """The engine (`kind`) cannot sleep in `mode` here, and `reason` is why."""

    code = "mode_unsupported"
    fault = Fault.OPERATOR

    def __init__(self, kind: str, mode: SleepMode, reason: str) -> None:
        super().__init__(f"{kind} cannot sleep in mode {mode}: {reason}", hint="see `kite yoco pool`: what is offered")
        self.kind = kind
        self.mode = mode
        self.reason = reason


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
    """Put a drained instance to sleep: requests that still come wait inside the engine until it wakes.

    One that is asleep already is reported as it is. Raises WrongState, ModeUnsupported or EngineError.
    """
    began_us = mono_us()
    instance, mode = duty.instance, duty.order.mode
    check(instance.id, instance.state, Event.PAUSED)
    if instance.state is not State.ASLEEP:
        check_mode(duty.place.engines, instance.running.spec.kind, mode)
        stage("pause")
        instance.mode = mode  # before the engine knows: what fails halfway is undone by it
        await instance.engine.sleep(mode)
    return instance.change(Event.PAUSED, instance.mode or mode, began_us)


def check_mode(engines: Sequence[EngineOffer], kind: str, mode: SleepMode) -> None:
    """Raise ModeUnsupported when a kind of engine is known not to have a mode here.

    The engine itself does not say so: on a CPU vLLM takes every level, and gives back nothing.
    """
    for offer in engines:
        if offer.kind == kind and mode not in offer.modes:
            reason = next((lack.reason for lack in offer.lacks if lack.mode is mode), "it is not offered")
            raise ModeUnsupported(kind, mode, reason)


async def stop(duty: Duty[StopOrdered]) -> InstanceChanged:
    """End the process, whatever it does."""
    began_us = mono_us()
    instance = duty.instance
    stage("stop")
    await instance.end()
    return instance.change(Event.STOPPED, "ordered", began_us)
