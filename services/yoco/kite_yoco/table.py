"""Which order is carried out by what, and how each failure is told."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kite.engine import EngineError
from kite.errors import KiteError
from kite.orders import Emit, Received, Task, Tasks
from kite_schemas.why import Outcome
from kite_schemas.yoco import (
    DrainOrdered,
    InstanceOrder,
    OrderFailed,
    OrderRefused,
    PrewarmOrdered,
    SleepOrdered,
    StartOrdered,
    StopOrdered,
    WakeOrdered,
)
from kite_yoco import core
from kite_yoco.duty import Duty, Place
from kite_yoco.instances import Instance
from kite_yoco.lifecycle import WrongState
from kite_yoco.prewarm import prewarm
from kite_yoco.recovery import recover, to_the_end
from kite_yoco.rest import ModeUnsupported, drain, sleep, stop
from kite_yoco.spawn import EngineTooOld
from kite_yoco.start import start
from kite_yoco.wake import wake

OrderT = TypeVar("OrderT", bound=InstanceOrder)


def tasks(place: Place) -> Tasks:
    """Return the table of a yoco."""
    return {
        StartOrdered: task(place, counted(start)),
        PrewarmOrdered: task(place, prewarm),
        DrainOrdered: task(place, drain),
        SleepOrdered: task(place, sleep),
        WakeOrdered: task(place, counted(wake)),
        StopOrdered: task(place, stop),
    }


def task(place: Place, body: Callable[[Duty[OrderT]], Awaitable[Outcome]]) -> Task[OrderT]:
    """Return how one type of order is carried out: its instance held meanwhile, and recovered when it fails."""

    async def handler(received: Received[OrderT], emit: Emit) -> Outcome:
        instance = place.instances.get(received.data.instance)
        async with instance.held(), place.instances.alone_on(claimed(received.data, instance)):
            return await carried(place, instance, body(Duty(received.data, instance, place, emit)))

    def failed(received: Received[OrderT], stage: str, code: str, message: str) -> OrderFailed:
        instance = place.instances.get(received.data.instance)
        return OrderFailed(
            instance=instance.id, state=instance.state, stage=stage, code=code, message=core.fitted(message)
        )

    return Task(handler, failed)


def claimed(order: InstanceOrder, instance: Instance) -> str:
    """Return the device that nothing else may start or wake on until the order has ended, what failed included."""
    match order:
        case StartOrdered():
            return order.device
        case WakeOrdered():
            return instance.device
        case _:
            return ""


def counted(body: Callable[[Duty[OrderT]], Awaitable[Outcome]]) -> Callable[[Duty[OrderT]], Awaitable[Outcome]]:
    """Return the same start or wake, with a record of how it went; one that cannot begin did not go."""

    async def counting(duty: Duty[OrderT]) -> Outcome:
        try:
            outcome = await body(duty)
        except WrongState:
            raise
        except (KiteError, asyncio.CancelledError):
            duty.place.starts.append(False)
            raise
        duty.place.starts.append(True)
        return outcome

    return counting


async def carried(place: Place, instance: Instance, doing: Awaitable[Outcome]) -> Outcome:
    """Await the outcome; whatever ends it early, the instance is in a state that can be told. Raises KiteError."""
    try:
        return await explained(instance, doing)
    except (WrongState, ModeUnsupported, EngineTooOld) as error:
        return OrderRefused(instance=instance.id, code=error.code, message=core.fitted(str(error)))
    except (KiteError, asyncio.CancelledError):  # cancelled: late, given up, or the end of yoco, which ends all itself
        if not place.instances.closing:
            await to_the_end(recover(instance))
        raise


async def explained(instance: Instance, doing: Awaitable[Outcome]) -> Outcome:
    """Await the outcome; when the engine's death is behind an error, raise that. Raises KiteError."""
    try:
        return await doing
    except EngineError as error:
        cause = await instance.cause(error)
        if cause is error:
            raise
        raise cause from error
