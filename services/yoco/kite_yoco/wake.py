"""Wake a standby: resume, load the residents it lacks, prove each, and only then call it ready."""

import asyncio
from collections.abc import Sequence

from kite.clock import mono_us
from kite.errors import KiteError
from kite.orders import stage
from kite.proof import Missing, Proven, outcome, prove_again
from kite_schemas.upcycle import BlendLoaded, EffectPrint, Resident
from kite_schemas.yoco import InstanceReady, WakeOrdered
from kite_yoco import core
from kite_yoco.duty import Duty
from kite_yoco.lifecycle import Event, check
from kite_yoco.start import first_token

PROBES_MAX = 1  # a wake proves with one short probe, which is its first token as well


class EffectLost(KiteError):
    """A resident is loaded and does not do what was recorded of it."""

    code = "effect_missing"

    def __init__(self, version: str, found: Missing) -> None:
        super().__init__(f"{version}: {found.code}: {found.message}", hint="the instance is quarantined: stop it")
        self.version = version
        self.found = found


async def wake(duty: Duty[WakeOrdered]) -> InstanceReady:
    """Make a sleeping instance ready with every resident proven. Raises KiteError."""
    began_us = mono_us()
    instance, order = duty.instance, duty.order
    check(instance.id, instance.state, Event.WAKE)
    stage("resume")
    listed = await resumed(duty, began_us)
    awake_us = mono_us()
    plan = core.plan_wake(order.residents, listed)
    stage("load")
    for resident in plan.load:
        await load(duty, resident)
    stage("token")
    if plan.base:
        await first_token(instance.engine, instance.base)
    token_us = mono_us()
    stage("prove")
    for resident, effect_print in plan.prove:
        token_us = await prove(duty, resident, effect_print)
    instance.move(Event.PROVEN)
    return InstanceReady(
        instance=instance.id,
        node=instance.node,
        path=order.path,
        pid=instance.running.pid,
        endpoint=instance.running.url,
        versions=core.versions(order.residents),
        noise_micronats=order.noise_micronats,
        t_wake_us=awake_us - began_us,
        t_first_token_us=token_us - began_us,
    )


async def resumed(duty: Duty[WakeOrdered], began_us: int) -> Sequence[str]:
    """Resume the engine and return the names it serves.

    The fact, the resume and the list are under way at the same time: none needs another, and each costs milliseconds.
    All three have ended when this returns or raises, so that no fact comes after the outcome.
    """
    instance = duty.instance
    fact = instance.change(Event.WAKE, "ordered", began_us)
    told, done, listed = await asyncio.gather(
        duty.tell(fact), instance.engine.resume(), instance.engine.models(), return_exceptions=True
    )
    for result in (told, done):
        if isinstance(result, BaseException):
            raise result
    if isinstance(listed, BaseException):
        raise listed
    return listed


async def load(duty: Duty[WakeOrdered], resident: Resident) -> None:
    """Load one resident and say so. Raises EngineError."""
    began_us = mono_us()
    await duty.instance.engine.load(resident.version, str(duty.place.adapter_root / resident.path))
    await duty.tell(BlendLoaded(instance=duty.instance.id, version=resident.version, duration_us=mono_us() - began_us))


async def prove(duty: Duty[WakeOrdered], resident: Resident, effect_print: EffectPrint) -> int:
    """Hold one resident against its print and say what came out; return when it had answered (monotonic, in us).

    Raises EffectLost, and the proof's errors.
    """
    instance = duty.instance
    found: Proven | Missing = await prove_again(
        instance.engine,
        instance.base,
        resident.version,
        effect_print,
        duty.place.probes,
        duty.order.noise_micronats,
        duty.place.adapter_root,
        probes_max=PROBES_MAX,
    )
    answered_us = mono_us()
    await duty.tell(outcome(found, instance.id, resident.version))
    if isinstance(found, Missing):
        instance.move(Event.UNPROVEN)
        raise EffectLost(resident.version, found)
    return answered_us
