"""One server process that we own: started in its own group, watched, and ended with all its children."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import psutil

from kite import launch, tracing
from kite.clock import US_PER_S, mono_us
from kite.engine.client import Engine
from kite.engine.command import HOST, command, environment
from kite.engine.errors import EngineDied, EngineLate, death
from kite_schemas.yoco import EngineSpec

NICENESS = 10  # control must not starve beside inference
POLL_S = 0.1  # between two looks at a starting server
STOP_S = 20.0  # default grace of `stop`: vLLM takes 1-3 s
KILL_S = 10.0  # after SIGKILL, for the kernel to take memory back
TAIL_BYTES = 64 * 1024  # of the log, for the reason of an end

Progress: TypeAlias = Callable[[float, str], None]
"""Called while a server starts, with the seconds since the wait began and the last line of its log."""


class EngineProcess:
    """One server process (and its children). Made by `start`; `stop` must be awaited, else it dies with its parent."""

    def __init__(
        self, spec: EngineSpec, port: int, log: Path, process: asyncio.subprocess.Process, *, log_start_bytes: int = 0
    ) -> None:
        self.spec = spec
        self.port = port
        self.log = log
        self._log_start_bytes = log_start_bytes  # what an earlier process wrote says nothing about this one
        self.url = f"http://{HOST}:{port}"
        self._process = process

    @classmethod
    async def start(
        cls, spec: EngineSpec, *, log: Path, port: int | None = None, env: Mapping[str, str] | None = None
    ) -> "EngineProcess":
        """Start a server for `spec` and return at once; its output goes to the end of `log`.

        `port` None takes a free one. `env` is what it inherits (default: this process's environment); a collector
        named there (OTEL_EXPORTER_OTLP_ENDPOINT) gets its spans, joined to the current trace. Must run in a thread
        that lives as long as this process, since the server dies with it.
        """
        chosen = free_port() if port is None else port
        inherited = os.environ if env is None else env
        argv, overlay = command(
            spec,
            chosen,
            otlp_endpoint=inherited.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
            traceparent=tracing.traceparent() or "",
        )
        with log.open("ab") as out:
            written = out.tell()
            process = await asyncio.create_subprocess_exec(
                *launch.command(argv, nice=NICENESS),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment(inherited, overlay),
                start_new_session=True,
            )
        return cls(spec, chosen, log, process, log_start_bytes=written)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal, None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit code."""
        return await self._process.wait()

    async def wait_healthy(self, deadline_s: float, on_progress: Progress | None = None) -> None:
        """Wait until the server answers. Raises EngineDied as soon as it ended, EngineLate after `deadline_s`."""
        began_us = mono_us()
        async with Engine(self.url) as engine:
            while not (await engine.healthy() and self.listens()):
                elapsed_s = (mono_us() - began_us) / US_PER_S
                if self.exit_code is not None:
                    raise self.died()
                if elapsed_s >= deadline_s:
                    raise EngineLate("the start of the server", deadline_s)
                if on_progress is not None:
                    on_progress(elapsed_s, last_line(self.tail()))
                await ended_within(self._process, POLL_S)

    async def stop(self, grace_s: float = STOP_S) -> int:
        """End the server and every process of its group: SIGTERM, `grace_s`, SIGKILL, KILL_S. Return its exit code.

        Raises EngineLate when the kernel does not end a process even so.
        """
        signal_group(self.pid, signal.SIGTERM)
        if not await emptied(self.pid, grace_s):
            signal_group(self.pid, signal.SIGKILL)
            if not await emptied(self.pid, KILL_S):
                raise EngineLate("SIGKILL", KILL_S)
        return await self.wait()

    def listens(self) -> bool:
        """Say whether it is this process that listens on the port, and not a stranger."""
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(held.status == psutil.CONN_LISTEN and held.laddr.port == self.port for held in sockets)

    def tail(self) -> str:
        """Return the end of what this process wrote, at most TAIL_BYTES."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start_bytes, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def died(self) -> EngineDied:
        """Return the error that says why it ended, read from the end of its log."""
        text = self.tail()
        code = self.exit_code or 0
        reason, sentence = death(code, text)
        return EngineDied(code, reason, sentence, text)


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def members(group: int) -> list[int]:
    """Return the processes of a group that have not ended (a zombie has)."""
    found: list[int] = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal every process of a group; an empty group is fine."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


async def ended_within(process: asyncio.subprocess.Process, limit_s: float) -> bool:
    """Wait for the end of a process, at most `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


async def emptied(group: int, limit_s: float) -> bool:
    """Wait until no process of a group runs, at most `limit_s`."""
    until_us = mono_us() + int(limit_s * US_PER_S)
    while members(group):
        if mono_us() >= until_us:
            return False
        await asyncio.sleep(POLL_S)
    return True
