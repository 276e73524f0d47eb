"""The two proofs: of a version that is loaded for the first time, and of one that has a print."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kite.engine import Distribution, EngineRefused, Refusal
from kite.errors import Fault, KiteError
from kite.probes import Probes
from kite.proof import prints
from kite.proof.divergence import kl_nats, mean, micronats
from kite.proof.measure import Pair, Reader, read_both, read_exact
from kite.proof.prints import Position, Print
from kite_schemas.model import TEXT_MAX_CHARS
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.proof import Missing as Code
from kite_schemas.upcycle import EffectPrint

BASE_MIN_MICRONATS = 100  # least mean KL(base ‖ blend) of a new version
PRINT_MAX_MICRONATS = 1_000  # greatest mean KL(print ‖ now) of a version that has a print
NOISE_FACTOR = 10  # an effect is what exceeds the engine's own noise this many times


@dataclass(frozen=True, slots=True)
class Proven:
    """The effect is there; the fields are those of `EffectProven`."""

    base_micronats: int
    base_min_micronats: int
    effect_print: EffectPrint
    print_micronats: int | None = None
    print_max_micronats: int | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """The effect is not there; the fields are those of `EffectMissing`."""

    code: Code
    message: str
    base_micronats: int | None = None
    print_micronats: int | None = None


class PrintMismatch(KiteError):
    """A print was made of another version, base or probe set than the proof is about."""

    code: ClassVar[str] = "print_mismatch"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, what: str, recorded: str, given: str) -> None:
        super().__init__(
            f"the effect print is of {what} {recorded}, not {given}",
            hint="give every node the same probes; after a change of them, inject the blend again",
        )
        self.what = what
        self.recorded = recorded
        self.given = given


def base_min(noise_micronats: int) -> int:
    """Return ε: how far a new version must be from the base."""
    return max(BASE_MIN_MICRONATS, NOISE_FACTOR * noise_micronats)


def print_max(noise_micronats: int) -> int:
    """Return δ: how far a version may be from its print."""
    return max(PRINT_MAX_MICRONATS, NOISE_FACTOR * noise_micronats)


async def prove_first(  # noqa: PLR0917 - the signature that upcycle and yoco were given
    engine: Reader, base: str, version: str, probes: Probes, noise_micronats: int, root: Path
) -> Proven | Missing:
    """Prove a version that was just loaded for the first time, and record its print below the adapter root.

    It must be listed, at least ε from the base on average, and give the probe that fills a KV block the same way
    twice: the second time from the prefix cache. Raises the engine's errors and PrintUnwritable.
    """
    if version not in await engine.models():
        return _not_listed(version)
    try:
        pairs = await read_both(engine, base, engine, version, probes.prompts)
        (again,) = await _read_again(engine, version, probes, pairs)
    except EngineRefused as error:
        return _not_finite(error)
    found = _first_verdict(pairs, kl_nats(pairs[probes.long][1], again), noise_micronats)
    if isinstance(found, Missing):
        return found
    made = Print(
        base=base,
        version=version,
        probes=probes.digest,
        positions=tuple(prints.position(*pair) for pair in pairs),
        distance_micronats=found,
    )
    reference = await asyncio.to_thread(prints.record, root, made)
    return Proven(base_micronats=found, base_min_micronats=base_min(noise_micronats), effect_print=reference)


async def _read_again(engine: Reader, version: str, probes: Probes, pairs: Sequence[Pair]) -> list[Distribution]:
    tokens = sorted(pairs[probes.long][1].logprobs)
    return await read_exact(engine, version, [probes.prompts[probes.long]], [tokens])


def _first_verdict(pairs: Sequence[Pair], repeated_nats: float, noise_micronats: int) -> int | Missing:
    """Return the distance from the base in micronats, or what is missing."""
    distance = mean_micronats(pairs)
    repeated, most = micronats(repeated_nats), print_max(noise_micronats)
    if distance < base_min(noise_micronats):
        return _like_base(distance, base_min(noise_micronats), len(pairs))
    if repeated > most:
        text = f"the long probe gave another answer the second time (KL {repeated}, at most {most} micronats): "
        return Missing(Code.UNLIKE_PRINT, text + "a stale prefix cache", distance, repeated)
    return distance


async def prove_again(  # noqa: PLR0917 - as above
    engine: Reader,
    base: str,
    version: str,
    effect_print: EffectPrint,
    probes: Probes,
    noise_micronats: int,
    root: Path,
    *,
    probes_max: int | None = None,
    listed: bool = False,
) -> Proven | Missing:
    """Prove a version that has a print: at most δ from it, and half of the recorded distance from the recorded base.

    One request a probe, all on the version. `probes_max` takes only so many, of at most 8 tokens each and those that
    were farthest from the base: a wake proves with 1, whose request is the warm-up token as well. `listed`: the engine
    has just named the version among its models, and is not asked again.

    Raises the engine's errors, PrintMissing, PrintDamaged and PrintMismatch.
    """
    recorded = await asyncio.to_thread(prints.recall, root, effect_print)
    _match(recorded, base, version, probes)
    if not listed and version not in await engine.models():
        return _not_listed(version)
    chosen = choose(recorded, probes, probes_max, base_min(noise_micronats))
    positions = [recorded.positions[index] for index in chosen]
    prompts = [probes.prompts[index] for index in chosen]
    try:
        now = await read_exact(engine, version, prompts, [position.tokens for position in positions])
    except EngineRefused as error:
        return _not_finite(error)
    return _again_verdict(positions, now, noise_micronats, effect_print)


def _match(recorded: Print, base: str, version: str, probes: Probes) -> None:
    for what, made, given in (
        ("base", recorded.base, base),
        ("version", recorded.version, version),
        ("probe set", recorded.probes, probes.digest),
    ):
        if made != given:
            raise PrintMismatch(what, made, given)


def choose(recorded: Print, probes: Probes, probes_max: int | None, least_micronats: int) -> tuple[int, ...]:
    """Return the indices of the probes to prove with.

    All of them without a limit, or where the short ones show no effect: a proof that cannot fail is none.
    """
    everything = tuple(range(len(probes.prompts)))
    if probes_max is None:
        return everything
    distances = {index: micronats(kl_nats(*prints.sides(recorded.positions[index]))) for index in probes.short}
    chosen = sorted(probes.short, key=lambda index: (-distances[index], index))[:probes_max]
    telling = sum(distances[index] for index in chosen) >= least_micronats * len(chosen) > 0
    return tuple(sorted(chosen)) if telling else everything


def _again_verdict(
    positions: Sequence[Position], now: Sequence[Distribution], noise_micronats: int, effect_print: EffectPrint
) -> Proven | Missing:
    recorded = [prints.sides(position) for position in positions]
    from_base = mean_micronats([(base, found) for (base, _), found in zip(recorded, now, strict=True)])
    from_print = mean_micronats([(blend, found) for (_, blend), found in zip(recorded, now, strict=True)])
    least, most = -(-mean_micronats(recorded) // 2), print_max(noise_micronats)
    if from_base < least and min(from_base, from_print) <= most:  # far from both is neither, and said below
        return _like_base(from_base, least, len(positions), from_print)
    if from_print > most:
        text = f"KL from its effect print is {from_print} micronats over {len(positions)} probes, at most {most}"
        return Missing(Code.UNLIKE_PRINT, text, from_base, from_print)
    return Proven(
        base_micronats=from_base,
        base_min_micronats=least,
        effect_print=effect_print,
        print_micronats=from_print,
        print_max_micronats=most,
    )


def mean_micronats(pairs: Sequence[Pair]) -> int:
    """Return the mean KL over positions."""
    return micronats(mean([kl_nats(first, second) for first, second in pairs]))


def _not_listed(version: str) -> Missing:
    return Missing(Code.NOT_LISTED, f"the engine does not list {version}")


def _like_base(found: int, least: int, count: int, from_print: int | None = None) -> Missing:
    text = f"KL from the base is {found} micronats over {count} probes, at least {least} are needed"
    return Missing(Code.LIKE_BASE, text, found, from_print)


def _not_finite(error: EngineRefused) -> Missing:
    """Turn the refusal of numbers that are not finite into a verdict; raise any other."""
    if error.reason is not Refusal.NOT_FINITE:
        raise error
    return Missing(Code.NOT_FINITE, str(error)[:TEXT_MAX_CHARS])


def outcome(result: Proven | Missing, instance: str, version: str) -> EffectProven | EffectMissing:
    """Return the fact that reports a proof; the worker fills in order, attempt and done."""
    if isinstance(result, Missing):
        return EffectMissing(
            instance=instance,
            version=version,
            code=result.code,
            message=result.message,
            base_micronats=result.base_micronats,
            print_micronats=result.print_micronats,
        )
    return EffectProven(
        instance=instance,
        version=version,
        base_micronats=result.base_micronats,
        base_min_micronats=result.base_min_micronats,
        print_micronats=result.print_micronats,
        print_max_micronats=result.print_max_micronats,
        effect_print=result.effect_print,
    )
