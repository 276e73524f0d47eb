"""How a service lives: logging and tracing first, one main coroutine, an orderly end on SIGTERM or SIGINT."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar, cast

import structlog

from kite import tracing
from kite.errors import KiteError
from kite.settings import ServiceSettings, SettingsInvalid, told

EXIT_OK = 0
EXIT_FAILED = 1

AnySettings = TypeVar("AnySettings", bound=ServiceSettings)

log = structlog.get_logger()


def start(name: str, kind: type[AnySettings], serve: Callable[[AnySettings], Coroutine[None, None, None]]) -> int:
    """Run a service by the settings of the environment until it ends or is told to; return its exit code."""
    try:
        settings = told(kind)
    except SettingsInvalid as error:
        _log_to_stderr("info")
        _report(name, error)
        return EXIT_FAILED
    return run(name, settings.log_level, serve(settings))


def run(name: str, log_level: str, main: Coroutine[None, None, None]) -> int:
    """Run a service until it ends or is told to end; return its exit code. The end of `main` is a cancellation."""
    _log_to_stderr(log_level)
    tracing.start(name)
    try:
        asyncio.run(_until_told(main))
    except Exception as error:  # noqa: BLE001 # the outermost loop: whatever it was, it is logged, and the code tells
        _report(name, error)
        return EXIT_FAILED
    finally:
        tracing.stop()
    return EXIT_OK


def _report(name: str, error: BaseException) -> None:
    """Log an error of ours in one line, anything else with its trace; the first of a group stands for it."""
    group = cast("BaseExceptionGroup[Exception]", error) if isinstance(error, BaseExceptionGroup) else None
    if group is not None:
        _report(name, group.exceptions[0])
    elif isinstance(error, KiteError):
        log.error("service_failed", service=name, code=error.code, error=str(error), hint=error.hint)
    else:
        log.error("service_crashed", service=name, exc_info=error)


async def _until_told(main: Coroutine[None, None, None]) -> None:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        log.info("service_stopped")


def _log_to_stderr(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(sort_keys=False, bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
