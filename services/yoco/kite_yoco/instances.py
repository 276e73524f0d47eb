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
from kite.engine.identity import Identity
from kite.engine.kept import Kept
from kite.errors import Fault, KiteError
from kite_schemas.yoco import SHUTDOWN, EngineSpec, InstanceChanged, SleepMode, State
from kite_yoco import core
from kite_yoco.lifecycle import Event, step
from kite_yoco.records import Record, Records

STOP_GRACE_S = 10.0  # vLLM takes 1-3 s; what is left then is killed
DEATH_S = 1.0  # a connection breaks a moment before the process can be waited for
OUTCOME_S = 0.5  # from the end of a handler until its outcome is on the bus, generously
DIED = "engine_died"
FORMER = ".former.log"
IDLE = (State.READY, State.DRAINING, State.ASLEEP)
"""The states in which a process answers and, unless an order holds it, nothing else looks at it."""
ENDED = (State.ABSENT, State.FAILED)
SLEEPING = (State.DRAINING, State.ASLEEP, State.WAKING)
"""The states in which an instance sleeps somehow, or is about to."""

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


class DeviceHeld(KiteError):
    """What ran on the device before cannot be ended, so that nothing else is started there."""

    code = "device_held"
    fault = Fault.OPERATOR
    retryable = True

    def __init__(self, device: str, other: str, pid: int) -> None:
        super().__init__(
            f"{device} is held by what is left of {other} (process {pid})",
            hint="the kernel does not end it: see what it waits for (state D is a driver or a disk)",
        )
        self.device = device
        self.other = other
        self.pid = pid


@dataclass(slots=True)
class Instance:
    """One instance. It is `held` while an order about it is carried out. `mode` is how it sleeps, if it does."""

    id: str
    node: str
    state: State = State.ABSENT
    noise_micronats: int = 0
    process: EngineProcess | None = None
    client: Engine | None = None
    device: str = ""
    mode: SleepMode | None = None
    records: Records | None = None
    record: Record | None = None
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
    def busy(self) -> bool:
        """Whether an order about it is carried out, or its end is."""
        return self._lock.locked()

    @property
    def lives(self) -> bool:
        """Whether there is a process, with a client, that has not ended."""
        return self.process is not None and self.client is not None and self.process.exit_code is None

    @property
    def base(self) -> str:
        """The served name of the base. Raises EngineUnreachable without a process."""
        return self.running.spec.served_name

    def move(self, event: Event) -> None:
        """Take a step, and write it down. Raises WrongState, and then nothing has changed."""
        self.state = step(self.id, self.state, event)
        if self.state not in SLEEPING:
            self.mode = None
        elif self.state is State.ASLEEP and self.mode is None:
            self.mode = SleepMode.PAUSED  # what every engine can
        self.write()

    def write(self) -> None:
        """Write down how the instance is, if it has a process; what cannot be written is said in the log."""
        if self.records is None or self.record is None:
            return
        now = {"state": self.state, "device": self.device, "mode": self.mode, "noise_micronats": self.noise_micronats}
        self.record = self.record.model_copy(update=now)
        try:
            self.records.save(self.record)
        except OSError as error:
            log.error("record_unwritten", instance=self.id, reason=str(error), hint="a killed yoco finds it as it was")

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

    async def spawn(
        self, spec: EngineSpec, log_file: Path, variables: Mapping[str, str], *, held: bool = False
    ) -> None:
        """Start the process with some variables more than ours; it is not healthy yet. Raises SpawnFailed."""
        try:
            put_aside(log_file)
            self.process = await self._started(spec, log_file, {**os.environ, **variables}, held=held)
        except OSError as error:
            raise SpawnFailed(self.id, error.strerror or str(error)) from error
        self.client = Engine(self.process.url)

    async def _started(self, spec: EngineSpec, log_file: Path, env: Mapping[str, str], *, held: bool) -> EngineProcess:
        """Start the process, with a keeper and a record of both where there are records. Raises OSError."""
        records = self.records
        if records is None:
            return await EngineProcess.start(spec, log=log_file, env=env, held=held)

        def note(keeping: Identity, port: int, log_start_bytes: int) -> None:
            self.record = Record(
                instance=self.id,
                state=self.state,
                spec=spec,
                port=port,
                device=self.device,
                mode=None,
                noise_micronats=0,
                log_file=str(log_file),
                log_start_bytes=log_start_bytes,
                keeping=keeping,
                process=None,
            )
            records.save(self.record, durable=True)

        keep = records.keep(self.id), note
        process = await EngineProcess.start(spec, log=log_file, env=env, keep=keep, held=held)
        if self.record is not None and isinstance(process.handle, Kept):
            self.record = self.record.model_copy(update={"process": process.handle.process})
            records.save(self.record)
        return process

    def hush_s(self) -> float:
        """Return how long to be silent: the outcome of an order that has just ended must be out first."""
        return max(0.0, OUTCOME_S - (mono_us() - self.released_us) / US_PER_S)

    async def end(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the process with all its children and forget it. Raises EngineLate when the kernel does not."""
        process, client, self.client = self.process, self.client, None
        if client is not None:
            await client.close()
        if process is not None:
            await process.stop(grace_s)
        if self.process is process:
            self.process = None
            self.forget()

    def forget(self) -> None:
        """Remove what was written down; what cannot be removed is found to have ended by the next yoco."""
        self.record = None
        if self.records is not None:
            with suppress(OSError):
                self.records.forget(self.id)

    async def end_or_log(self, grace_s: float = STOP_GRACE_S) -> bool:
        """End the process; what the kernel does not end is logged, and the next start of the instance tries again."""
        try:
            await self.end(grace_s)
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
    """All instances by id. Processes are watched from `spawn` to `end`; without `records` they end with this one."""

    def __init__(self, node: str, report: Report, records: Records | None = None) -> None:
        self.closing = False
        self.records = records
        self._node = node
        self._report = report
        self._known: dict[str, Instance] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._devices: dict[str, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._known.values())

    def get(self, name: str) -> Instance:
        """Return the instance; one that was never heard of is absent."""
        return self._known.setdefault(name, Instance(name, self._node, records=self.records))

    @asynccontextmanager
    async def alone_on(self, device: str) -> AsyncGenerator[None]:
        """Wait until nothing else starts or wakes on a device, and be what does; empty: no device.

        Two at once mis-size each other's KV cache. Raises DeviceHeld when what failed there cannot be ended.
        """
        if not device:
            yield
            return
        async with self._devices.setdefault(device, asyncio.Lock()):
            await self._clear(device)
            yield

    async def _clear(self, device: str) -> None:
        """End what is left on a device of instances that are no more. Raises DeviceHeld."""
        for other in [one for one in self if one.device == device and one.state in ENDED]:
            process = other.process
            if process is not None and not await other.end_or_log():
                raise DeviceHeld(device, other.id, process.pid)

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
            fact = instance.change(Event.FAILED, f"{DIED}.{died.reason}", mono_us(), str(died))
            await self._report(fact)
            await instance.end_or_log()  # what a killed server leaves of its group

    async def fail(self, instance: Instance, process: EngineProcess, code: str, message: str) -> None:
        """Report an instance whose process lives and does not serve, and end that for good, unless all has changed."""
        began_us = mono_us()
        async with instance.held():
            if self.closing or instance.process is not process or instance.state not in IDLE:
                return
            await asyncio.sleep(instance.hush_s())
            log.warning(code, instance=instance.id, pid=process.pid, reason=message)
            await self._report(instance.change(Event.FAILED, code, began_us, message))
            await instance.end_or_log(grace_s=0.0)

    def leave(self) -> None:
        """Look after nothing any more: the processes live on under their keepers."""
        self.closing = True
        for task in self._watchers:
            task.cancel()

    async def close(self) -> list[InstanceChanged]:
        """End every process, all at once, and return the facts that say so; what cannot be ended is logged."""
        self.leave()
        facts = await asyncio.gather(*(self._close(instance) for instance in self if instance.process is not None))
        return [fact for fact in facts if fact is not None]

    async def _close(self, instance: Instance) -> InstanceChanged | None:
        began_us = mono_us()
        ended = await instance.end_or_log()
        return instance.change(Event.STOPPED, SHUTDOWN, began_us) if ended else None
