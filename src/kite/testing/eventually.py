"""Wait for something to become true, without sleeping for a guessed time."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from kite.clock import US_PER_S, mono_us

Seen = TypeVar("Seen")

POLL_S = 0.02
DEADLINE_S = 10.0


async def eventually(predicate: Callable[[], Seen | Awaitable[Seen]], deadline_s: float = DEADLINE_S) -> Seen:
    """Poll `predicate` (plain or async) until it is truthy and return its value.

    Raises AssertionError with the value it saw last once `deadline_s` has passed. The predicate is asked at least
    once, and an exception of its own passes through.
    """
    until_us = mono_us() + int(deadline_s * US_PER_S)
    while True:
        answer = predicate()
        seen = await cast("Awaitable[Seen]", answer) if inspect.isawaitable(answer) else cast("Seen", answer)
        if seen:
            return seen
        if mono_us() >= until_us:
            msg = f"not so within {deadline_s} s; last seen: {seen!r}"
            raise AssertionError(msg)
        await asyncio.sleep(POLL_S)
