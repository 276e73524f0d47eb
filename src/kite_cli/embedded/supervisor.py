"""Keeping the processes of an embedded fleet alive: started in order, started again, stopped in order."""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kite.bus import EmbeddedServer
from kite.clock import US_PER_S, mono_us
from kite.engine.process import emptied, ended_within, members, signal_group
from kite.errors import Fault, KiteError
from kite.launch import command

RESTART_S = 1.0
RESTARTS_MAX = 5
RESTART_WINDOW_S = 60.0
STOP_S = 15.0
KILL_S = 5.0
TAIL_BYTES = 16 * 1024
_SAID = re.compile(r'\berror=(?:"((?:[^"\\]|\\.)*)"|(\S+))')

Notice = Callable[[str], None]
"""Is told what the supervisor does by itself."""


class ServiceFailed(KiteError):
    """A service of the fleet ended and is not started again."""

    code = "service_failed"
    fault = Fault.OPERATOR

    def __init__(self, name: str, what: str, log: Path) -> None:
        said = last_error(log)
        super().__init__(f"{name} {what}" + (f": {said}" if said else ""), hint=f"its log is {log}")
        self.name = name
        self.log = log


def last_error(log: Path) -> str:
    """Return what a service's log says went wrong last: the error of its last line that has one, or the last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    for line in reversed(lines):
        if found := _SAID.search(line):
            return (found[1] or found[2]).replace('\\"', '"')
    return lines[-1].strip() if lines else ""


class Child(Protocol):
    """A process that the supervisor keeps: `start` again after it ended."""

    @property
    def name(self) -> str:
        """What the fleet calls it."""
        ...

    @property
    def log(self) -> Path:
        """Where its output goes."""
        ...

    @property
    def pid(self) -> int:
        """Its process id; that of the last one when it has ended."""
        ...

    async def start(self) -> None:
        """Start it."""
        ...

    async def wait(self) -> int:
        """Wait until it ends and return its exit status, negative for a signal."""
        ...

    async def stop(self) -> None:
        """End it and whatever it left in its process group."""
        ...


@dataclass
class Program:
    """A Python module of ours as a process in a group of its own; it inherits `keep`, and dies with this process."""

    name: str
    module: str
    env: Mapping[str, str]
    log: Path
    keep: Sequence[int] = ()
    stop_s: float = STOP_S
    pid: int = 0
    _process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    async def start(self) -> None:
        """Start the module; its output goes to the end of the log. Must be called in the main thread."""
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command([sys.executable, "-m", self.module]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self.env),
                pass_fds=tuple(self.keep),
                start_new_session=True,  # Ctrl-C is for `kite up`, which stops its services in order
            )
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit status, None while it runs or before it was started."""
        return self._process.returncode if self._process is not None else None

    async def wait(self) -> int:
        """See `Child`."""
        assert self._process is not None  # noqa: S101 # `start` comes first
        return await self._process.wait()

    async def stop(self) -> None:
        """See `Child`: SIGTERM to the process, and SIGKILL to its group after `stop_s`."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        await ended_within(process, self.stop_s)
        if members(self.pid):
            signal_group(self.pid, signal.SIGKILL)
            await emptied(self.pid, KILL_S)
        await process.wait()


class Server:
    """The embedded bus; started again, it takes the ports that others know. `url`, `port` and `monitor_url` are empty
    before its first start, and say where it will be again while it is down.
    """

    name = "nats"

    def __init__(self, directory: Path, port: int | None) -> None:
        self._directory = directory
        self._server = EmbeddedServer(directory, port=port)
        self.log = directory / "nats.log"
        self.pid = 0
        self.port = 0
        self.url = ""
        self.monitor_url = ""

    async def start(self) -> None:
        """See `Child`. Raises the errors of `EmbeddedServer.start`."""
        if self.pid:
            last = self._server
            self._server = EmbeddedServer(self._directory, port=last.port, monitor_port=last.monitor_port)
        await self._server.start()
        self.pid, self.port = self._server.pid, self._server.port
        self.url, self.monitor_url = self._server.url, self._server.monitor_url

    async def wait(self) -> int:
        """See `Child`."""
        return await self._server.wait()

    async def stop(self) -> None:
        """See `Child`."""
        await self._server.stop()


class Supervisor:
    """Starts children, starts them again when they end, and stops them all in the order it is given."""

    def __init__(self, on_start: Callable[[str], None], on_failure: Callable[[BaseException], None]) -> None:
        """`on_start` is told the name after every start, `on_failure` the reason when a child cannot be kept."""
        self.notice: Notice = lambda text: None  # noqa: ARG005 # until somebody listens
        self._on_start = on_start
        self._on_failure = on_failure
        self._children: dict[str, Child] = {}
        self._keepers: set[asyncio.Task[None]] = set()

    async def start(self, child: Child) -> None:
        """Start a child; it is not started again before `keep`."""
        self._children[child.name] = child
        await child.start()
        self._on_start(child.name)

    def keep(self, child: Child) -> None:
        """From now on start the child again when it ends."""
        keeper = asyncio.create_task(self._keep(child))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._kept)

    def pids(self) -> dict[str, int]:
        """Return the process id of every child by its name."""
        return {name: child.pid for name, child in self._children.items()}

    def kill(self, name: str, number: signal.Signals) -> None:
        """Signal one child."""
        os.kill(self._children[name].pid, number)

    async def stop(self, order: Sequence[str]) -> None:
        """Stop the children named, one after the other; those that were never started are passed over."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for name in order:
            if name in self._children:
                await self._children[name].stop()

    async def _keep(self, child: Child) -> None:
        ends_us: deque[int] = deque()
        while True:
            status = await child.wait()
            now_us = mono_us()
            ends_us.append(now_us)
            while now_us - ends_us[0] > RESTART_WINDOW_S * US_PER_S:
                ends_us.popleft()
            if len(ends_us) > RESTARTS_MAX:
                raise ServiceFailed(child.name, f"ended {len(ends_us)} times within a minute", child.log)
            self.notice(f"{child.name} ended with status {status} and is started again")
            await asyncio.sleep(RESTART_S)
            await child.start()
            self._on_start(child.name)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        self._keepers.discard(keeper)
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None:
            self._on_failure(error)
