"""The rules of proofs at their borders, on an engine that is a table."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kite.engine import Distribution, EngineLate, EngineRefused, Refusal
from kite.probes import Probes
from kite.proof import Missing, Print, Proven, noise, outcome, prove_again, prove_first, read_both, record
from kite.proof.prints import position
from kite.proof.prove import choose
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.proof import Missing as Code

BASE, VERSION = "tiny", "credit@0123456789ab"
PROBES = Probes("0" * 64, ("Hi", "Ho", "something longer", "the longest of all of them"))
LONG = PROBES.long


@dataclass
class Table:
    """Answers with the probability of token 1, by model and prompt; `drift` is added from read to read."""

    answers: Mapping[str, Sequence[float]]
    drift: Mapping[str, float] = field(default_factory=dict[str, float])
    fail: Exception | None = None
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    async def models(self) -> tuple[str, ...]:
        return tuple(self.answers)

    async def distributions(
        self, model: str, prompts: Sequence[str], *, top: int, tokens: Sequence[Sequence[int]] | None = None
    ) -> list[Distribution]:
        if self.fail is not None and model != BASE:
            raise self.fail
        self.asked.append((model, len(prompts)))
        shift = self.drift.get(model, 0.0) * sum(1 for asked, _ in self.asked if asked == model)
        assert (top == 0) == (tokens is not None)
        return [self.at(model, prompt, shift) for prompt in prompts]

    def at(self, model: str, prompt: str, shift: float) -> Distribution:
        p = self.answers[model][PROBES.prompts.index(prompt)] + shift
        return Distribution({1: math.log(p), 2: math.log(0.9 - p)})


def table(blend: float, base: float = 0.4) -> Table:
    return Table({BASE: [base] * 4, VERSION: [blend] * 4})


def kl(p: float, q: float) -> int:
    return round(1e6 * (p * math.log(p / q) + (0.9 - p) * math.log((0.9 - p) / (0.9 - q))))


async def first(engine: Table, root: Path, noise_micronats: int = 0) -> Proven | Missing:
    return await prove_first(engine, BASE, VERSION, PROBES, noise_micronats, root)


async def again(engine: Table, proven: Proven, root: Path, noise_micronats: int = 0) -> Proven | Missing:
    return await prove_again(engine, BASE, VERSION, proven.effect_print, PROBES, noise_micronats, root)


def code(result: Proven | Missing) -> Code | None:
    return result.code if isinstance(result, Missing) else None


async def test_a_new_version_is_a_hundred_micronats_from_the_base_or_ten_times_the_noise(tmp_path: Path) -> None:
    assert kl(0.4, 0.4071) > 100 > kl(0.4, 0.4065)
    assert code(await first(table(0.4065), tmp_path)) is Code.LIKE_BASE
    found = await first(table(0.4071), tmp_path)
    assert isinstance(found, Proven)
    assert found.base_micronats == found.effect_print.distance_micronats == kl(0.4, 0.4071)
    assert (found.base_min_micronats, found.print_micronats) == (100, None)
    assert code(await first(table(0.4071), tmp_path, noise_micronats=20)) is Code.LIKE_BASE


async def test_a_later_load_is_near_its_print_and_half_the_distance_away(tmp_path: Path) -> None:
    found = await first(table(0.5), tmp_path)
    assert isinstance(found, Proven)

    same = await again(table(0.5), found, tmp_path)
    assert isinstance(same, Proven)
    assert same.base_micronats == pytest.approx(found.base_micronats, abs=1)
    assert same.base_min_micronats == pytest.approx(found.base_micronats / 2, abs=1)
    assert (same.print_micronats, same.print_max_micronats) == (0, 1000)

    assert kl(0.5, 0.525) > 1000 > kl(0.5, 0.515)
    assert code(await again(table(0.515), found, tmp_path)) is None
    assert code(await again(table(0.525), found, tmp_path)) is Code.UNLIKE_PRINT
    assert code(await again(table(0.525), found, tmp_path, noise_micronats=1000)) is None
    assert code(await again(table(0.4), found, tmp_path)) is Code.LIKE_BASE
    assert code(await again(table(0.2), found, tmp_path)) is Code.UNLIKE_PRINT


async def test_an_effect_as_weak_as_the_tolerance_still_has_to_be_there(tmp_path: Path) -> None:
    """Near the print it is in any case: what it must not be is the base."""
    found = await first(table(0.41), tmp_path)
    assert isinstance(found, Proven)
    assert found.base_micronats < 1000
    lost = await again(table(0.4), found, tmp_path)
    assert isinstance(lost, Missing)
    assert lost.code is Code.LIKE_BASE
    assert lost.print_micronats is not None
    assert lost.print_micronats < 1000


async def test_a_long_probe_that_answers_otherwise_the_second_time_shows_a_stale_cache(tmp_path: Path) -> None:
    engine = replace(table(0.5), drift={VERSION: 0.03})
    found = await first(engine, tmp_path)
    assert isinstance(found, Missing)
    assert found.code is Code.UNLIKE_PRINT
    assert "stale prefix cache" in found.message
    assert engine.asked[-1] == (VERSION, 1)


async def test_a_version_that_is_not_listed_is_not_asked(tmp_path: Path) -> None:
    engine = Table({BASE: [0.4] * 4})
    assert code(await first(engine, tmp_path)) is Code.NOT_LISTED
    assert engine.asked == []


async def test_only_numbers_that_are_not_finite_are_a_verdict(tmp_path: Path) -> None:
    refused = EngineRefused("one token", Refusal.NOT_FINITE, "nan" * 1000, 500)
    found = await first(replace(table(0.5), fail=refused), tmp_path)
    assert code(found) is Code.NOT_FINITE
    assert isinstance(outcome(found, "a", VERSION), EffectMissing)
    busy = EngineRefused("one token", Refusal.BUSY, "", 429)
    with pytest.raises(EngineRefused):
        await first(replace(table(0.5), fail=busy), tmp_path)
    with pytest.raises(EngineLate):
        await first(replace(table(0.5), fail=EngineLate("one token", 1)), tmp_path)


def print_of(distances: Sequence[float]) -> Print:
    """Make a print whose positions are so far from the base, by the probability that moved."""
    base = Distribution({1: math.log(0.4), 2: math.log(0.5)})
    moved = [Distribution({1: math.log(0.4 + d), 2: math.log(0.5 - d)}) for d in distances]
    return Print(
        base=BASE,
        version=VERSION,
        probes=PROBES.digest,
        positions=tuple(position(base, blend) for blend in moved),
        distance_micronats=1,
    )


@pytest.mark.parametrize(
    ("distances", "probes_max", "chosen"),
    [
        ((0.1, 0.2, 0.3, 0.4), None, (0, 1, 2, 3)),
        ((0.1, 0.2, 0.3, 0.4), 1, (1,)),
        ((0.2, 0.1, 0.3, 0.4), 1, (0,)),
        ((0.1, 0.1, 0.3, 0.4), 1, (0,)),
        ((0.1, 0.2, 0.3, 0.4), 9, (0, 1)),
        ((0.0, 0.0, 0.3, 0.4), 1, (0, 1, 2, 3)),
        ((0.1, 0.2, 0.3, 0.4), 0, (0, 1, 2, 3)),
    ],
)
def test_a_wake_takes_the_short_probe_that_tells_most(
    distances: Sequence[float], probes_max: int | None, chosen: tuple[int, ...]
) -> None:
    assert choose(print_of(distances), PROBES, probes_max, 100) == chosen


async def test_a_wake_asks_once(tmp_path: Path) -> None:
    reference = record(tmp_path, print_of((0.1, 0.2, 0.3, 0.4)))
    engine = Table({BASE: [0.4] * 4, VERSION: [0.5, 0.6, 0.7, 0.8]})
    found = await prove_again(engine, BASE, VERSION, reference, PROBES, 0, tmp_path, probes_max=1)
    assert isinstance(found, Proven)
    assert engine.asked == [(VERSION, 1)]
    fact = outcome(found, "a", VERSION)
    assert isinstance(fact, EffectProven)
    assert fact.base_micronats == kl(0.4, 0.6)


async def test_noise_is_the_largest_divergence_of_three_reads_of_the_base() -> None:
    assert await noise(table(0.5), BASE, PROBES.prompts) == 0
    engine = replace(table(0.5), drift={BASE: 0.01})
    assert await noise(engine, BASE, PROBES.prompts) == max(kl(0.41, 0.43), kl(0.43, 0.41))
    assert len(engine.asked) == 3


async def test_the_first_error_of_two_engines_ends_both_reads() -> None:
    engine, broken = table(0.5), replace(table(0.5), fail=EngineLate("one token", 1))
    before = asyncio.all_tasks()
    for sides in ((engine, broken), (broken, engine)):
        with pytest.raises(EngineLate):
            await read_both(sides[0], VERSION, sides[1], VERSION, PROBES.prompts)
    assert asyncio.all_tasks() == before
