"""After a step that failed: bring the instance to a state that can be told."""

import asyncio
from collections.abc import Coroutine

from kite.engine import EngineError
from kite_schemas.yoco import SleepMode, State
from kite_yoco import core
from kite_yoco.instances import Instance
from kite_yoco.lifecycle import Event

RECOVER_S = 5.0  # to pause or resume once more; the order is late already


async def to_the_end(doing: Coroutine[None, None, None]) -> None:
    """Await something bounded that must not be cut short; a cancellation is raised once it has ended."""
    task = asyncio.create_task(doing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def recover(instance: Instance) -> None:
    """Leave no half-done step: a wake is undone, a pause is undone, a start is ended. What cannot be is failed."""
    if instance.state in (State.ABSENT, State.FAILED):
        await instance.end_or_log()
    elif core.is_lost(instance.state, lives=instance.lives):
        await give_up(instance)
    else:
        try:
            async with asyncio.timeout(RECOVER_S):
                await undo(instance)
        except (EngineError, TimeoutError):
            await give_up(instance)


async def undo(instance: Instance) -> None:
    """Undo what a wake or a pause may have done. Raises EngineError."""
    mode = instance.mode or SleepMode.PAUSED
    if instance.state is State.WAKING:
        await instance.engine.sleep(mode)
        instance.move(Event.RETURNED)
    elif instance.state is State.DRAINING:
        await instance.engine.wake(mode)


async def give_up(instance: Instance) -> None:
    """Call the instance failed, and end what is left of its process."""
    instance.move(Event.FAILED)
    await instance.end_or_log()
