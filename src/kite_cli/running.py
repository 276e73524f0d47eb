"""How a command runs what is asynchronous: quiet logs, a trace of its own, and an orderly end."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from kite_cli.output import quiet

Result = TypeVar("Result")


def run(main: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine to its end, tracing on; Ctrl-C cancels it and raises KeyboardInterrupt."""
    from kite import tracing

    quiet()
    tracing.start("kite")
    try:
        return asyncio.run(main)
    finally:
        tracing.stop()
