"""Several models of one engine on the same prompts: each is read twice, however many pairs are compared afterwards.

First the likeliest tokens of every model, then exactly the tokens that any of them held likely. A pair is compared over
the likeliest tokens of its own two sides, as `read_pair` does: what else was in the run does not change a figure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kite.engine import Distribution
from kite.engine.reading import TOKENS_MAX
from kite.proof.divergence import Comparison, summary
from kite.proof.measure import Reader, Tokens
from kite_schemas.guard import TOP_TOKENS
from kite_schemas.model import PPM

PROMPTS_PER_CALL = 8  # an engine's limit of time is for a whole call; 669 ms a prompt were measured at rank 64 on CPU

Told = Callable[[str, int], None]
"""Called while models are read: with the model, and how many more prompts were read."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One model after each prompt: its likeliest tokens, and the exact distribution over those of the whole run."""

    tops: tuple[frozenset[int], ...]
    exact: tuple[Distribution, ...]


def untold(model: str, prompts: int) -> None:
    """Tell nobody."""


async def read_several(
    engine: Reader, models: Sequence[str], prompts: Sequence[str], told: Told = untold
) -> dict[str, Answers]:
    """Read every model after every prompt. Raises the engine's errors; `told` hears of every prompt twice."""
    tops = {model: await _in_turns(engine, model, prompts, None, told) for model in models}
    wanted = [sorted({token for read in tops.values() for token in read[n].logprobs}) for n in range(len(prompts))]
    exact = {model: await _in_turns(engine, model, prompts, wanted, told) for model in models}
    return {
        model: Answers(tuple(frozenset(read.logprobs) for read in tops[model]), tuple(exact[model])) for model in models
    }


def apart(first: Answers, second: Answers) -> Comparison:
    """Return KL(first ‖ second): mean, 99th percentile and covered mass over the prompts."""
    tokens = [mine | theirs for mine, theirs in zip(first.tops, second.tops, strict=True)]
    sides = ([_only(read, kept) for read, kept in zip(side.exact, tokens, strict=True)] for side in (first, second))
    return summary(list(zip(*sides, strict=True)))


def agreement_ppm(first: Answers, second: Answers) -> int:
    """Return the share of prompts after which both hold the same token likeliest, rounded down."""
    alike = [likeliest(mine) == likeliest(theirs) for mine, theirs in zip(first.exact, second.exact, strict=True)]
    return sum(alike) * PPM // len(alike)


async def count_right(
    engine: Reader, model: str, prompts: Sequence[str], answers: Sequence[int], told: Told = untold
) -> int:
    """Return after how many prompts the likeliest token of the whole vocabulary is the answer, a token id each."""
    found = await _in_turns(engine, model, prompts, None, told, top=1)
    return sum(likeliest(read) == answer for read, answer in zip(found, answers, strict=True))


def likeliest(found: Distribution) -> int:
    """Return the token with the highest log-probability, of equal ones the lowest id."""
    return min(found.logprobs, key=lambda token: (-found.logprobs[token], token))


def _only(found: Distribution, tokens: frozenset[int]) -> Distribution:
    return Distribution({token: found.logprobs[token] for token in sorted(tokens)})


async def _in_turns(
    engine: Reader, model: str, prompts: Sequence[str], wanted: Tokens | None, told: Told, *, top: int = TOP_TOKENS
) -> list[Distribution]:
    """Read the likeliest tokens, or exactly those that are wanted, a few prompts at a time."""
    found: list[Distribution] = []
    for start in range(0, len(prompts), PROMPTS_PER_CALL):
        some = prompts[start : start + PROMPTS_PER_CALL]
        if wanted is None:
            found += await engine.distributions(model, some, top=top)
        else:
            found += await _exactly(engine, model, some, wanted[start : start + PROMPTS_PER_CALL])
        told(model, len(some))
    return found


async def _exactly(engine: Reader, model: str, prompts: Sequence[str], wanted: Tokens) -> list[Distribution]:
    """Read given tokens, in as many calls as the engine's limit on named tokens asks for."""
    merged: list[Mapping[int, float]] = [{} for _ in prompts]
    for start in range(0, max(map(len, wanted)), TOKENS_MAX):
        part = [tokens[start : start + TOKENS_MAX] for tokens in wanted]
        read = await engine.distributions(model, prompts, top=0, tokens=part)
        merged = [{**before, **now.logprobs} for before, now in zip(merged, read, strict=True)]
    return [Distribution(dict(found)) for found in merged]
