"""What a yoco makes of the engines that the one before it left: each is taken over, or ended with a reason."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from kite import keeper
from kite.clock import US_PER_S, mono_us
from kite.engine import Engine, EngineError, EngineProcess
from kite.engine.identity import states
from kite.engine.kept import LOST, End, Kept, end_kept
from kite.engine.process import died, tail
from kite_schemas.model import Version
from kite_schemas.yoco import Found, InstanceChanged, SleepMode, State
from kite_yoco import core
from kite_yoco.health import LOOKS, Sight, is_stopped, look
from kite_yoco.instances import DIED, Instance, Instances
from kite_yoco.lifecycle import Event
from kite_yoco.prewarm import waits
from kite_yoco.records import Record, Records

ANSWER_S = 20.0  # for an engine to answer as it should: it did, before its yoco ended
POLL_S = 0.2
CLEAR_S = 2.0  # from SIGTERM to SIGKILL: the node says nothing of itself meanwhile
UNFINISHED = "engine_unfinished"
ABANDONED = "engine_abandoned"

SERVING = frozenset({State.READY, State.DRAINING, State.ASLEEP, State.QUARANTINED})
"""The states in which an engine answers, with nothing half done, or only a drain, which is taken back."""

ADOPTABLE = SERVING | {State.PREWARMED}
"""The states in which an engine can be taken over."""

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_VERSION: TypeAdapter[Version] = TypeAdapter(Version)


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why an engine is not taken over."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Legacy:
    """What became of what the yoco before left: what runs on, and what is told as failed."""

    found: tuple[Found, ...] = ()
    lost: tuple[InstanceChanged, ...] = ()


async def adopt(instances: Instances, records: Records) -> Legacy:
    """Take over every engine that can be, and end the others. Raises StateUnwritable."""
    began_us = mono_us()
    known = [(instances.get(record.instance), record) for record in records.all()]
    for instance, record in known:  # all first: whatever comes now, `Instances.close` knows them
        attach(instance, record, records)
    fates = await asyncio.gather(*(taken(instance, record, records) for instance, record in known))
    for instance, _ in known:
        if instance.process is not None and instance.state in ADOPTABLE:
            instances.watch(instance)
    legacy = Legacy(
        tuple(fate for fate in fates if isinstance(fate, Found)),
        tuple(fate for fate in fates if isinstance(fate, InstanceChanged)),
    )
    log.info(
        "engines_adopted",
        adopted=[found.instance for found in legacy.found],
        lost=[fact.instance for fact in legacy.lost],
        took_us=mono_us() - began_us,
    )
    return legacy


def attach(instance: Instance, record: Record, records: Records) -> None:
    """Put an instance where its record says it was, with its process if that is still the one meant."""
    instance.state, instance.device, instance.mode = record.state, record.device, record.mode
    instance.noise_micronats, instance.record = record.noise_micronats, record
    if record.process is not None and record.process.lives:
        kept = Kept(record.keeping, record.process, records.end_path(record))
        log_file = Path(record.log_file)
        process = EngineProcess(record.spec, record.port, log_file, kept, log_start_bytes=record.log_start_bytes)
        instance.process, instance.client = process, Engine(process.url)


async def taken(instance: Instance, record: Record, records: Records) -> Found | InstanceChanged | None:
    """Take one engine over, or end it and return the fact that says so; None for one that had not begun."""
    began_us = mono_us()
    async with instance.held():
        fate = unfit_at_once(instance, record, records) or await answered(instance)
        if not isinstance(fate, Unfit):
            return found(instance, fate)
        log.warning("engine_not_adopted", instance=instance.id, code=fate.code, reason=fate.message)
        fact = (
            None if record.state is State.ABSENT else instance.change(Event.FAILED, fate.code, began_us, fate.message)
        )
        await cleared(instance, record)
        return fact


def unfit_at_once(instance: Instance, record: Record, records: Records) -> Unfit | None:
    """Say why an engine cannot be taken over without asking it, if so."""
    if record.process is not None and instance.process is None:
        return ended(record, records.end_of(record), records.keep_s)
    if record.state not in ADOPTABLE:
        return Unfit(UNFINISHED, f"yoco ended while the instance was {record.state}; what was half done is undone")
    if not record.keeping.lives:
        return Unfit(f"{DIED}.keeper_lost", "its keeper was ended from outside")
    if record.state in SERVING and not instance.running.listens():
        return Unfit(Sight.HUNG, f"the process {instance.running.pid} does not listen on port {record.port}")
    return None


def ended(record: Record, end: End | None, keep_s: float) -> Unfit:
    """Say how an engine ended while there was no yoco."""
    code = LOST if end is None or end.code is None else end.code
    if end is not None and end.why in (keeper.ABANDONED, keeper.GONE):
        return Unfit(ABANDONED, f"its keeper ended it: no yoco was there for {keep_s:g} s")
    death = died(code, tail(Path(record.log_file), record.log_start_bytes))
    return Unfit(f"{DIED}.{death.reason}", f"while no yoco was there, {death}")


async def answered(instance: Instance) -> Sequence[str] | Unfit:
    """Wait until an engine answers as it should, bring it to what its state says, and return the names it serves."""
    if instance.state is State.PREWARMED:
        return () if await waits(instance) else Unfit(Sight.HUNG, "it does not wait for its weights as it did")
    unfit = await well(instance)
    if unfit is not None:
        return unfit
    try:
        await settle(instance)
        return await instance.engine.models()
    except EngineError as error:
        return Unfit(error.code, str(error))


async def well(instance: Instance) -> Unfit | None:
    """Look at an engine until it does well; return what is wrong with it when it does not."""
    process, stops, until_us = instance.running, 0, mono_us() + int(ANSWER_S * US_PER_S)
    while True:
        stops = stops + 1 if is_stopped((await asyncio.to_thread(states)).get(process.pid, "")) else 0
        if stops >= LOOKS[Sight.STOPPED]:
            return Unfit(Sight.STOPPED, "a process of it was stopped by a signal, and not continued")
        seen, words = await look(instance.engine)
        if seen is Sight.WELL:
            return None
        if process.exit_code is not None:
            death = process.died()
            return Unfit(f"{DIED}.{death.reason}", str(death))
        if mono_us() >= until_us:
            return Unfit(seen, words)
        await asyncio.sleep(POLL_S)


async def settle(instance: Instance) -> None:
    """Let an engine serve, or not, as its state says: yoco ended somewhere between a step and its record.

    A drain that was cut short is taken back. Raises EngineError.
    """
    if instance.state is State.DRAINING:
        instance.state, instance.mode = State.READY, None
        instance.write()
    paused = instance.state is State.ASLEEP and instance.mode is SleepMode.PAUSED
    if not (paused or instance.state is State.READY) or paused == await instance.engine.is_paused():
        return
    await (instance.engine.pause() if paused else instance.engine.resume())


def found(instance: Instance, listed: Sequence[str]) -> Found:
    """Return what is told of an engine that was taken over."""
    names = core.loaded(listed, instance.base)
    return Found(
        instance=instance.id,
        pid=instance.running.pid,
        state=instance.state,
        endpoint=instance.running.url,
        versions=tuple(name for name in names if is_version(name)),
        base=instance.base,
        device=instance.device or None,
        mode=instance.mode,
        noise_micronats=instance.noise_micronats,
    )


def is_version(name: str) -> bool:
    """Say whether a served name is that of a version: what somebody loaded by hand is nobody's to count."""
    try:
        _VERSION.validate_python(name)
    except ValidationError:
        return False
    return True


async def cleared(instance: Instance, record: Record) -> None:
    """End whatever is left of an engine; what the kernel does not end is logged and stays known."""
    if instance.process is not None:
        await instance.end_or_log(CLEAR_S)
        return
    try:
        await end_kept(record.keeping)
    except EngineError as error:
        log.error("engine_left", instance=instance.id, error=str(error), hint=error.hint)
        return
    instance.forget()
