"""Residents: load what an engine lacks, prove each, and say so: only then is its instance ready."""

from collections.abc import Sequence

from kite.clock import mono_us
from kite.engine import Engine
from kite.errors import KiteError
from kite.orders import stage
from kite.proof import Missing, Proven, outcome, prove_again
from kite_schemas.upcycle import BlendLoaded, EffectPrint, Resident
from kite_schemas.yoco import InstanceOrder
from kite_yoco import core
from kite_yoco.duty import Duty
from kite_yoco.lifecycle import Event

PROBES_MAX = 1  # it is proven with one short probe, which is its first token as well


class EffectLost(KiteError):
    """A resident is loaded and does not do what was recorded of it."""

    code = "effect_missing"

    def __init__(self, version: str, found: Missing) -> None:
        super().__init__(f"{version}: {found.code}: {found.message}", hint="the instance is quarantined: stop it")
        self.version = version
        self.found = found


async def first_token(engine: Engine, base: str) -> None:
    """Let the base give one token. Raises EngineError."""
    await engine.distributions(base, [core.FIRST_TOKEN_PROMPT], top=1)


async def hold(
    duty: Duty[InstanceOrder], residents: Sequence[Resident], listed: Sequence[str], noise_micronats: int
) -> int:
    """Load the residents that an engine does not list, and prove each; return when the last token was out.

    The return value is monotonic, in us. Raises EffectLost, EngineError, and the proof's errors.
    """
    plan = core.plan_wake(residents, listed)
    stage("load")
    for resident in plan.load:
        await load(duty, resident)
    stage("token")
    if plan.base:
        await first_token(duty.instance.engine, duty.instance.base)
    token_us = mono_us()
    stage("prove")
    for resident, effect_print in plan.prove:
        listed_before = resident not in plan.load
        token_us = await prove(duty, resident, effect_print, noise_micronats, listed=listed_before)
    return token_us


async def load(duty: Duty[InstanceOrder], resident: Resident) -> None:
    """Load one resident and say so. Raises EngineError."""
    began_us = mono_us()
    loaded = await duty.instance.engine.load(resident.version, str(duty.place.adapter_root / resident.path))
    took_us = mono_us() - began_us
    told = BlendLoaded(instance=duty.instance.id, version=resident.version, duration_us=took_us, slot=loaded.slot)
    await duty.tell(told)


async def prove(
    duty: Duty[InstanceOrder], resident: Resident, effect_print: EffectPrint, noise_micronats: int, *, listed: bool
) -> int:
    """Hold one resident against its print and say what came out; return when it had answered (monotonic, in us).

    What the engine listed before (`listed`) is not asked for again: a request costs milliseconds. Raises EffectLost,
    and the proof's errors.
    """
    instance = duty.instance
    found: Proven | Missing = await prove_again(
        instance.engine,
        instance.base,
        resident.version,
        effect_print,
        duty.place.probes,
        noise_micronats,
        duty.place.adapter_root,
        probes_max=PROBES_MAX,
        listed=listed,
    )
    answered_us = mono_us()
    await duty.tell(outcome(found, instance.id, resident.version))
    if isinstance(found, Missing):
        instance.move(Event.UNPROVEN)
        raise EffectLost(resident.version, found)
    return answered_us
