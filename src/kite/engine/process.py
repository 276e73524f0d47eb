"""One server process: started in its own group, watched, and ended with all its children."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeAlias

import psutil

from kite import launch, tracing
from kite.clock import US_PER_S, mono_us
from kite.engine.client import Engine
from kite.engine.command import HOST, command, environment
from kite.engine.errors import Death, EngineDied, EngineLate, death
from kite.engine.gate import gate_name, let_on, waits
from kite.engine.identity import Identity
from kite.engine.kept import LOST, Child, Handle, Keeping
from kite.engine.manners import NICENESS, allowed, cores, held_niceness, place
from kite.engine.oom import kills
from kite.keeper import KEEP_S
from kite_schemas.yoco import EngineSpec

POLL_S = 0.1  # between two looks at a starting server
STOP_S = 20.0  # default grace of `stop`: vLLM takes 1-3 s
KILL_S = 10.0  # after SIGKILL, for the kernel to take memory back
TAIL_BYTES = 64 * 1024  # of the log, for the reason of an end
KILLED = "the kernel ended a process of this memory group"

Progress: TypeAlias = Callable[[float, str], None]
"""Called while a server starts, with the seconds since the wait began and the last line of its log."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How a server outlives us: whose lock its keeper looks at, where it writes how the server ended (absolute paths),
    and how long it waits for somebody who holds the lock.
    """

    lock: Path
    end: Path
    keep_s: float = KEEP_S


Note: TypeAlias = Callable[[Identity, int, int], None]
"""Is given the keeper, the port and the length of the log before a server is started under a keeper: what it writes
down is what a later process finds the server by.
"""


class EngineProcess:
    """One server process (and its children). `stop` must be awaited, else it dies with its parent, or its keeper."""

    def __init__(self, spec: EngineSpec, port: int, log: Path, handle: Handle, *, log_start_bytes: int = 0) -> None:
        self.spec = spec
        self.port = port
        self.log = log
        self.handle = handle
        self._log_start_bytes = log_start_bytes  # what an earlier process wrote says nothing about this one
        self.url = f"http://{HOST}:{port}"
        self._kills = kills()

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        *,
        log: Path,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        keep: tuple[Keep, Note] | None = None,
        held: bool = False,
    ) -> "EngineProcess":
        """Start a server for `spec` and return at once; its output goes to the end of `log`.

        `port` None takes a free one. `env` is what it inherits (default: this process's environment); a collector
        named there (OTEL_EXPORTER_OTLP_ENDPOINT) gets its spans, joined to the current trace. With `keep` it outlives
        this process; without, it dies with it, and must be started in a thread that lives as long. One that is `held`
        waits before it reads its weights, until `let_on`. Raises OSError.
        """
        chosen = free_port() if port is None else port
        inherited = os.environ if env is None else env
        argv, overlay = command(
            spec,
            chosen,
            otlp_endpoint=inherited.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
            traceparent=tracing.traceparent() or "",
            gate=gate_name(chosen) if held else "",
        )
        whole = environment(inherited, overlay)
        with log.open("ab") as out:
            written = out.tell()
            handle = await (bound(argv, whole, out) if keep is None else kept(argv, whole, out, chosen, keep))
        return cls(spec, chosen, log, handle, log_start_bytes=written)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self.handle.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal, None while it runs."""
        return self.handle.exit_code

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit code."""
        return await self.handle.wait()

    async def wait_healthy(self, deadline_s: float, on_progress: Progress | None = None) -> None:
        """Wait until the server answers. Raises EngineDied as soon as it ended, EngineLate after `deadline_s`."""
        async with Engine(self.url) as engine:

            async def serves() -> bool:
                return await engine.healthy() and self.listens()

            await self._wait(serves, deadline_s, on_progress)

    async def wait_held(self, deadline_s: float) -> None:
        """Wait until the server waits for its weights. Raises EngineDied as soon as it ended, EngineLate."""
        await self._wait(self.is_held, deadline_s)

    async def is_held(self) -> bool:
        """Say whether the server waits for its weights. Raises EngineLate when it does not answer."""
        waiting = await waits(gate_name(self.port))
        return waiting is not None and group_of(waiting) == self.pid

    async def _is_deaf(self) -> bool:
        try:
            return await self.is_held()
        except EngineLate:  # at its gate, and stopped
            return True

    def restrain(self, where: str) -> None:
        """Keep a server that is only getting ready to some cores (empty: any), behind those that serve.

        Raises EngineUnplaced.
        """
        place(members(self.pid), cores(where), held_niceness())

    async def let_on(self) -> None:
        """Let a held server read its weights, with the cores and the niceness of one that serves.

        On a CPU the process that computes gets the cores of its spec, as vLLM binds it when nobody holds it. Raises
        EngineUnreachable when it does not wait, EngineLate, and EngineUnplaced.
        """
        place(members(self.pid), allowed(), NICENESS)
        await let_on(gate_name(self.port), self._bind)

    def _bind(self, computing: int) -> None:
        if self.spec.cpus:
            place([computing], cores(self.spec.cpus), NICENESS)

    async def _wait(
        self, done: Callable[[], Awaitable[bool]], deadline_s: float, on_progress: Progress | None = None
    ) -> None:
        began_us = mono_us()
        while not await done():
            elapsed_s = (mono_us() - began_us) / US_PER_S
            if self.exit_code is not None:
                raise self.died()
            if elapsed_s >= deadline_s:
                raise EngineLate("the start of the server", deadline_s)
            if on_progress is not None:
                on_progress(elapsed_s, last_line(self.tail()))
            await ended_within(self.handle, POLL_S)

    async def stop(self, grace_s: float = STOP_S) -> int:
        """End the server and every process of its group: SIGTERM, `grace_s`, SIGKILL, KILL_S. Return its exit code.

        One that waits for its weights has nothing to finish, and hears no SIGTERM: it gets no grace. Raises EngineLate
        when the kernel does not end a process even so.
        """
        grace_s = 0.0 if await self._is_deaf() else grace_s
        signal_group(self.pid, signal.SIGTERM)
        signal_group(self.pid, signal.SIGCONT)  # one that was stopped hears nothing else
        if not await emptied(self.pid, grace_s):
            signal_group(self.pid, signal.SIGKILL)
            if not await emptied(self.pid, KILL_S):
                raise EngineLate("SIGKILL", KILL_S)
        code = await self.wait()
        await self.handle.left()
        return code

    def listens(self) -> bool:
        """Say whether it is this process that listens on the port, and not a stranger."""
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(held.status == psutil.CONN_LISTEN and held.laddr.port == self.port for held in sockets)

    def tail(self) -> str:
        """Return the end of what this process wrote, at most TAIL_BYTES."""
        return tail(self.log, self._log_start_bytes)

    def died(self) -> EngineDied:
        """Return the error that says why it ended, read from the end of its log."""
        code = self.exit_code or 0
        return died(code, self.tail(), killed=self._kills is not None and (kills() or 0) > self._kills)

    def mark(self) -> None:
        """It lives: who was killed for memory so far was somebody else."""
        self._kills = kills()


def died(exit_code: int, tail: str, *, killed: bool = False) -> EngineDied:
    """Return the error that says why a server ended; `killed`: the kernel has taken somebody's memory meanwhile."""
    reason, sentence = death(exit_code, tail)
    if killed and exit_code and reason in (Death.SIGNALLED, Death.OTHER):
        return EngineDied(exit_code, Death.OUT_OF_MEMORY, sentence or KILLED, tail)
    if exit_code == LOST and reason is Death.OTHER:
        return EngineDied(exit_code, Death.KEEPER_LOST, sentence, tail)
    return EngineDied(exit_code, reason, sentence, tail)


async def bound(argv: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> Handle:
    """Start a program that dies with this process. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        *launch.command(argv, nice=NICENESS),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=env,
        start_new_session=True,
    )
    return Child(process)


async def kept(
    argv: Sequence[str], env: Mapping[str, str], out: IO[bytes], port: int, how: tuple[Keep, Note]
) -> Handle:
    """Start a program under a keeper, which is written down before the program begins. Raises OSError."""
    written = out.tell()
    keep, note = how
    keeping = await Keeping.start(
        argv, lock=keep.lock, end=keep.end, keep_s=keep.keep_s, nice=NICENESS, env=env, out=out
    )
    try:
        note(keeping.who, port, written)
        return await keeping.go()
    except BaseException:
        await keeping.drop()
        raise


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def tail(log: Path, start_bytes: int) -> str:
    """Return the end of what a process wrote since its log was so long, at most TAIL_BYTES; empty without a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(start_bytes, log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


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


def group_of(process: int) -> int | None:
    """Return the group of a process, None when it has ended."""
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal every process of a group; an empty group is fine."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


class Waited(Protocol):
    """What ends sooner or later."""

    async def wait(self) -> int:
        """Wait until it has ended and return its exit code."""
        ...


async def ended_within(process: Waited, limit_s: float) -> bool:
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
