"""The instances of this node: which process each has, which state it is in, and who notices when one dies."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kite.clock import US_PER_S, mono_us
from kite.engine import Engine, EngineDied, EngineError, EngineProcess, EngineUnreachable
from kite.errors import Fault, KiteError
from kite_schemas.yoco import SHUTDOWN, EngineSpec, InstanceChanged, State
from kite_yoco import core
from kite_yoco.lifecycle import Event, step

STOP_GRACE_S = 10.0  # vLLM takes 1-3 s; what is left then is killed
DEATH_S = 1.0  # a connection breaks a moment before the process can be waited for
OUTCOME_S = 0.5  # from the end of a handler until its outcome is on the bus, generously
DIED = "engine_died"
FORMER = ".former.log"

log: structlog.stdlib.BoundLogger = structlog.get_logger()

Report = Callable[[InstanceChanged], Awaitable[None]]
"""Publishes a fact that no order brought about."""


class SpawnFailed(KiteError):
    """The operating system does not start the process, or its log cannot be written."""

    code = "spawn_failed"
    fault = Fault.OPERATOR

    def __init__(self, instance: str, why: str) -> None:
        super().__init__(f"cannot start {instance}: {why}", hint="the state folder must be writable and have room")
        self.instance = instance
        self.why = why


@dataclass(slots=True)
class Instance:
    """One instance. It is `held` while an order about it is carried out."""

    id: str
    node: str
    state: State = State.ABSENT
    noise_micronats: int = 0
    process: EngineProcess | None = None
    client: Engine | None = None
    device: str = ""
    released_us: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        """Wait for the order in hand, and be the one in hand."""
        async with self._lock:
            try:
                yield
            finally:
                self.released_us = mono_us()

    @property
    def running(self) -> EngineProcess:
        """The process. Raises EngineUnreachable without one."""
        if self.process is None:
            raise EngineUnreachable(f"{self.id} has no process")
        return self.process

    @property
    def engine(self) -> Engine:
        """The client of the process, its connections kept open. Raises EngineUnreachable without one."""
        if self.client is None:
            raise EngineUnreachable(f"{self.id} has no process")
        return self.client

    @property
    def lives(self) -> bool:
        """Whether there is a process, with a client, that has not ended."""
        return self.process is not None and self.client is not None and self.process.exit_code is None

    @property
    def base(self) -> str:
        """The served name of the base. Raises EngineUnreachable without a process."""
        return self.running.spec.served_name

    def move(self, event: Event) -> None:
        """Take a step. Raises WrongState, and then nothing has changed."""
        self.state = step(self.id, self.state, event)

    def change(self, event: Event, code: str, began_us: int, message: str = "") -> InstanceChanged:
        """Take a step that began at `began_us` (monotonic) and return the fact that says so. Raises WrongState."""
        before = self.state
        self.move(event)
        return InstanceChanged(
            instance=self.id,
            node=self.node,
            from_state=before,
            to_state=self.state,
            code=code,
            message=core.fitted(message),
            duration_us=mono_us() - began_us,
        )

    async def spawn(self, spec: EngineSpec, log_file: Path, variables: Mapping[str, str]) -> None:
        """Start the process with some variables more than ours; it is not healthy yet. Raises SpawnFailed."""
        try:
            put_aside(log_file)
            self.process = await EngineProcess.start(spec, log=log_file, env={**os.environ, **variables})
        except OSError as error:
            raise SpawnFailed(self.id, error.strerror or str(error)) from error
        self.client = Engine(self.process.url)

    def hush_s(self) -> float:
        """Return how long to be silent: the outcome of an order that has just ended must be out first."""
        return max(0.0, OUTCOME_S - (mono_us() - self.released_us) / US_PER_S)

    async def end(self) -> None:
        """End the process with all its children and forget it. Raises EngineLate when the kernel does not."""
        process, client, self.client = self.process, self.client, None
        if client is not None:
            await client.close()
        if process is not None:
            await process.stop(STOP_GRACE_S)
            self.process = None

    async def end_or_log(self) -> bool:
        """End the process; what the kernel does not end is logged, and the next start of the instance tries again."""
        try:
            await self.end()
        except EngineError as error:
            log.error("engine_left", instance=self.id, error=str(error), hint=error.hint)
            return False
        return True

    async def cause(self, error: EngineError) -> EngineError:
        """Return the death of the process when that is what is behind an error, else the error."""
        if self.process is None or isinstance(error, EngineDied):
            return error
        if isinstance(error, EngineUnreachable):
            with suppress(TimeoutError):
                async with asyncio.timeout(DEATH_S):
                    await self.process.wait()
        return error if self.process.exit_code is None else self.process.died()


def put_aside(log_file: Path) -> None:
    """Give each start a log of its own, so that no death is explained by the one before; one old log is kept."""
    if log_file.exists():
        log_file.replace(log_file.with_suffix(FORMER))


class Instances:
    """All instances by id. Processes are watched from `spawn` to `end`."""

    def __init__(self, node: str, report: Report) -> None:
        self.closing = False
        self._node = node
        self._report = report
        self._known: dict[str, Instance] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._known.values())

    def get(self, name: str) -> Instance:
        """Return the instance; one that was never heard of is absent."""
        return self._known.setdefault(name, Instance(name, self._node))

    def watch(self, instance: Instance) -> None:
        """Report the end of the instance's process when nobody ordered it."""
        task = asyncio.create_task(self._watch(instance, instance.running))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watch(self, instance: Instance, process: EngineProcess) -> None:
        await process.wait()
        async with instance.held():  # an order in hand notices for itself, and says so as its outcome
            if self.closing or instance.process is not process:
                return
            await asyncio.sleep(instance.hush_s())
            died = process.died()
            log.warning("engine_died", instance=instance.id, exit_code=died.exit_code, reason=died.reason)
            fact = instance.change(Event.FAILED, DIED, mono_us(), str(died))
            await self._report(fact)
            await instance.end_or_log()  # what a killed server leaves of its group

    async def close(self) -> list[InstanceChanged]:
        """End every process, all at once, and return the facts that say so; what cannot be ended is logged."""
        self.closing = True
        for task in self._watchers:
            task.cancel()
        facts = await asyncio.gather(*(self._close(instance) for instance in self if instance.process is not None))
        return [fact for fact in facts if fact is not None]

    async def _close(self, instance: Instance) -> InstanceChanged | None:
        began_us = mono_us()
        ended = await instance.end_or_log()
        return instance.change(Event.STOPPED, SHUTDOWN, began_us) if ended else None
