"""Processes that are killed at a chosen point: what comes after them has to cope.

A point is a label beside something that a process does to the world. Points are set in the process that is to die, by
wrapping the methods in question there; production code knows nothing of them. Processes are forked from a server that
has imported what they need, so that one costs some milliseconds.
"""

import inspect
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeAlias

from kite.bus import Work
from kite.launch import bind_to_parent
from kite.orders import Journal
from kite.testing.eventually import eventually

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

P = ParamSpec("P")
Method: TypeAlias = Callable[..., object]

PRELOAD = (
    *("kite.testing.orders", "kite.testing.crash", "kite.testing.faults.yoco"),
    *("kite_arbitrator.testing.running", "kite_arbitrator.testing.crashing"),
    *("alembic.command", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql"),
)
"""What the server imports once, by name, also what is imported late only: one that is not there is passed over."""

KILLED = -int(signal.SIGKILL)
"""Exit code of a process that was killed."""


class Point(StrEnum):
    """Before and after each step of `kite.orders`."""

    BEFORE_BEGUN = "before_begun"
    AFTER_BEGUN = "after_begun"  # before the effect
    AFTER_EFFECT = "after_effect"  # before done
    AFTER_DONE = "after_done"  # before the outcome is published
    AFTER_PUBLISH = "after_publish"  # before it is noted as sent
    AFTER_SENT = "after_sent"  # before the acknowledgement
    AFTER_ACK = "after_ack"


class Port(NamedTuple):
    """A method, plain or async, and the points that are passed before and after each call of it."""

    owner: type
    name: str
    before: str | None
    after: str | None


ORDERS = (
    Port(Journal, "begin", Point.BEFORE_BEGUN, Point.AFTER_BEGUN),
    Port(Journal, "done", Point.AFTER_EFFECT, Point.AFTER_DONE),
    Port(Journal, "sent", Point.AFTER_PUBLISH, Point.AFTER_SENT),
    Port(Work, "ack", None, Point.AFTER_ACK),
)
"""The points of a worker. Acknowledgements of notices and expiries count as well."""


@dataclass(frozen=True, slots=True)
class Fuse:
    """Kill the process when `point` is passed for the `count`-th time, from 1."""

    point: str
    count: int = 1


def die() -> None:
    """End this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fuse: Fuse, ports: Sequence[Port] = ORDERS, act: Callable[[], None] = die) -> None:
    """Let this process kill itself, or `act`, when the point is passed. `ports` says where points are.

    What `act` leaves alive goes on; the fuse is spent then. Raises ValueError when no port has the point.
    """
    if fuse.point not in {point for port in ports for point in (port.before, port.after)}:
        raise ValueError(f"no port passes {fuse.point}")
    left = fuse.count

    def passed(point: str | None) -> None:
        nonlocal left
        if point == fuse.point:
            left -= 1
            if not left:
                act()

    for port in ports:
        setattr(port.owner, port.name, _wrapped(getattr(port.owner, port.name), port, passed))


def _wrapped(method: Method, port: Port, passed: Callable[[str | None], None]) -> Method:
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def around_async(*args: object, **kwargs: object) -> object:
            passed(port.before)
            result = await method(*args, **kwargs)
            passed(port.after)
            return result

        return around_async

    @wraps(method)
    def around(*args: object, **kwargs: object) -> object:
        passed(port.before)
        result = method(*args, **kwargs)
        passed(port.after)
        return result

    return around


@asynccontextmanager
async def process(
    log: Path, fuse: Fuse | None, target: Callable[P, None], *args: P.args, **kwargs: P.kwargs
) -> AsyncGenerator["BaseProcess"]:
    """Run `target` in a process of its own, armed unless `fuse` is None, and kill it in the end if it still runs.

    `target` is found by name in an importable module, and is armed with ORDERS; one that has other points calls `arm`
    itself. What it prints goes into `log`. It does not outlive this process.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    child = context.Process(target=_run, args=(log, fuse, target, args, kwargs))
    child.start()
    try:
        yield child
    finally:
        child.kill()
        await ended(child)


async def ended(child: "BaseProcess", deadline_s: float = 10.0) -> int:
    """Wait until a process is gone and return its exit code: KILLED, or what it exited with."""
    await eventually(lambda: child.exitcode is not None, deadline_s=deadline_s)
    child.join()
    assert child.exitcode is not None  # noqa: S101 # it was waited for
    return child.exitcode


def _run(
    log: Path, fuse: Fuse | None, target: Callable[..., None], args: Sequence[object], kwargs: dict[str, object]
) -> None:
    bind_to_parent(os.getppid())
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    if fuse is not None:
        arm(fuse)
    target(*args, **kwargs)
