"""A process under its keeper: what one yoco started, and the next one may find."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from pydantic import ValidationError

from kite import keeper
from kite.clock import US_PER_S, mono_us
from kite.engine.errors import EngineLate
from kite.engine.identity import Identity, boot, identity, sessions
from kite_schemas.model import Count, Model, Text

SAY_S = 30.0  # for a keeper to come up and to start its program: 40 ms on an idle machine
END_S = 2.0  # from the end of a process until its keeper has written how it ended
LEAVE_S = 5.0  # for a keeper whose group is empty
LOST = keeper.EXIT_ORPHAN
"""Exit code of a process whose keeper was ended before it: the kernel ended it then, and nobody took its status."""
POLL_S = 0.02


class Handle(Protocol):
    """One process, ours or kept."""

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        ...

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal, None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended and return its exit code."""
        ...

    async def left(self) -> None:
        """Wait until whoever kept it has ended as well."""
        ...


class End(Model):
    """How a kept process ended, as its keeper wrote it; `code` None: its keeper could not end it."""

    pid: Count
    code: int | None
    why: Text


class Child:
    """A process of ours that dies with us."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """See `Handle`."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """See `Handle`."""
        return self._process.returncode

    async def wait(self) -> int:
        """See `Handle`."""
        return await self._process.wait()

    async def left(self) -> None:
        """See `Handle`: nobody keeps it."""


class Kept:
    """A process with a keeper, both named so that they cannot be mistaken; made in a running event loop.

    The kernel tells of its end, whoever started it; its keeper wrote down how it ended. It may have ended already.
    """

    def __init__(self, keeping: Identity, process: Identity, end: Path) -> None:
        self.keeping = keeping
        self.process = process
        self._end = end
        self._code: int | None = None
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._learning: asyncio.Task[None] | None = None
        self._descriptor = opened(process)
        if self._descriptor is None:
            self._learning = self._loop.create_task(self._learn())
        else:
            self._loop.add_reader(self._descriptor, self._ended, self._descriptor)

    @property
    def pid(self) -> int:
        """See `Handle`."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """See `Handle`: LOST when nobody knows."""
        return self._code

    async def wait(self) -> int:
        """See `Handle`."""
        await self._over.wait()
        return LOST if self._code is None else self._code

    async def left(self) -> None:
        """See `Handle`. A keeper that was stopped has nobody left to keep. Raises EngineLate."""
        try:
            await gone(self.keeping, LEAVE_S)
        except EngineLate:
            os.kill(self.keeping.pid, signal.SIGKILL)
            await gone(self.keeping, LEAVE_S)

    def _ended(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self._learning = self._loop.create_task(self._learn())

    async def _learn(self) -> None:
        until_us = mono_us() + int(END_S * US_PER_S)
        while self.keeping.lives and mono_us() < until_us and read_end(self._end, self.pid) is None:  # noqa: ASYNC110 # another process: it sets no event of ours
            await asyncio.sleep(POLL_S)
        end = read_end(self._end, self.pid)
        self._code = LOST if end is None or end.code is None else end.code
        self._over.set()


class Keeping:
    """A keeper that waits to be told to start its program: whoever started it writes down first that it is there."""

    def __init__(self, process: asyncio.subprocess.Process, who: Identity, end: Path) -> None:
        self.who = who
        self._process = process
        self._end = end

    @classmethod
    async def start(
        cls,
        program: Sequence[str],
        *,
        lock: Path,
        end: Path,
        keep_s: float,
        nice: int,
        env: Mapping[str, str],
        out: IO[bytes],
    ) -> "Keeping":
        """Start a keeper for a program whose output goes to `out`; both paths are absolute. Raises OSError."""
        argv = keeper.command(program, lock=str(lock), end=str(end), keep_s=keep_s, nice=nice)
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=out,
            env=env,
            start_new_session=True,
        )
        who = identity(process.pid)
        if who is None:
            raise OSError(f"the keeper ended with {await process.wait()}")
        return cls(process, who, end)

    async def go(self) -> Kept:
        """Have the program started. Raises OSError when the keeper, or the program, ends at once or is late."""
        said, heard = self._process.stdin, self._process.stdout
        if said is None or heard is None:
            raise OSError("a keeper has pipes")
        try:
            async with asyncio.timeout(SAY_S):
                said.write(b"g")
                await said.drain()
                said.close()
                pid = int(await heard.readline() or b"0")
        except TimeoutError:
            raise OSError(f"the keeper said nothing within {SAY_S:g} s") from None
        if not pid:
            raise OSError("the keeper ended at once")
        return Kept(self.who, identity(pid) or Identity(pid=pid, started=0, boot=self.who.boot), self._end)

    async def drop(self) -> None:
        """Have the keeper end, with whatever it has started, and wait for that. Raises EngineLate."""
        await end_kept(self.who)


def opened(process: Identity) -> int | None:
    """Return a descriptor of this very process, None when it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if process.lives:  # asked after it was opened: a descriptor never comes to mean another process
        return descriptor
    os.close(descriptor)
    return None


def read_end(path: Path, pid: int | None) -> End | None:
    """Return how a process ended, None while nobody has said. `pid` None: whichever process it was."""
    try:
        end = End.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return end if pid is None or end.pid == pid else None


async def gone(process: Identity, limit_s: float) -> None:
    """Wait until a process has ended. Raises EngineLate."""
    until_us = mono_us() + int(limit_s * US_PER_S)
    while process.lives:
        if mono_us() >= until_us:
            raise EngineLate(f"the end of process {process.pid}", limit_s)
        await asyncio.sleep(POLL_S)


async def end_kept(keeping: Identity) -> None:
    """Have a keeper end whatever it keeps, wait for that, and end what one that was killed left. Raises EngineLate."""
    if keeping.lives:
        with suppress(ProcessLookupError):
            os.kill(keeping.pid, signal.SIGTERM)
        await gone(keeping, keeper.GRACE_S + keeper.KILL_S + LEAVE_S)
    for one in session(keeping):
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
        await gone(one, keeper.KILL_S)


def session(keeping: Identity) -> list[Identity]:
    """Return what lives in the session of a keeper. Its id is given to nobody else before the session is empty."""
    if keeping.boot != boot():
        return []
    return [one for pid in sessions().get(keeping.pid, ()) if (one := identity(pid)) is not None]
