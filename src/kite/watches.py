"""What only looks on beside a worker's orders: it may fail, and the orders go on."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

Told = TypeVar("Told")
Watch = Callable[[], Coroutine[None, None, None]]

REPORT_S = 1.0
"""A report is told no more often."""

HINT = "orders go on; what it tells stays as it is until the service restarts"

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@asynccontextmanager
async def beside(watches: Mapping[str, Watch]) -> AsyncGenerator[None]:
    """Run watches by name while the block lasts; the log says of one that fails that it did."""
    running = [asyncio.create_task(watch(), name=name) for name, watch in watches.items()]
    for task in running:
        task.add_done_callback(_lament)
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def tell(
    sample: Callable[[], Told], say: Callable[[Told], Awaitable[None]], *, every_s: float = REPORT_S
) -> None:
    """Say what is sampled at first and each time it has changed, for ever. `every_s` is the constant but in tests."""
    said: Told | None = None
    while True:
        now = sample()
        if now != said:
            await say(now)
            said = now
        await asyncio.sleep(every_s)


def _lament(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("watch_failed", watch=task.get_name(), exc_info=error, hint=HINT)
