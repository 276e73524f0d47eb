"""How a command runs what is asynchronous, and how it ends: quiet logs, a trace of its own, one outcome shown."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar

from kite_cli.exits import Exit
from kite_cli.output import Record, quiet, say_json

Result = TypeVar("Result")


class Ended(Protocol):
    """How a request ended."""

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        ...


Outcome = TypeVar("Outcome", bound=Ended)


def run(main: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine to its end, tracing on; Ctrl-C cancels it and raises KeyboardInterrupt."""
    from kite import tracing

    quiet()
    tracing.start("kite")
    try:
        return asyncio.run(main)
    finally:
        tracing.stop()


def finish(
    outcome: Outcome, record: Callable[[Outcome], Record], show: Callable[[Outcome], None], *, as_json: bool
) -> int:
    """Print how a request ended, as a record or for people, and return the exit code."""
    if as_json:
        say_json(record(outcome))
    else:
        show(outcome)
    return Exit.OK if outcome.ok else Exit.FAILED
