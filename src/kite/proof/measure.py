"""Reading engines: top tokens first, then exactly the union of both sides' tokens on both sides.

Lists of the 20 most likely tokens alone are of no use: where an adapter has an effect, two of them share as little as
2.5 % of the mass (measured on vLLM 0.32).
"""

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import permutations
from typing import Protocol, TypeAlias, TypeVar

from kite.engine import Distribution
from kite.proof.divergence import Comparison, kl_nats, micronats, summary
from kite.proof.micrologs import read, written
from kite_schemas.guard import TOP_TOKENS, Logprobs

READS = 3  # of the base, to see how far it is from itself

Pair: TypeAlias = tuple[Distribution, Distribution]
"""Both sides at one position, with the same tokens."""

Tokens: TypeAlias = Sequence[Sequence[int]]
"""Token ids, per prompt."""

Result = TypeVar("Result")


class Reader(Protocol):
    """What proofs need of an engine; `kite.engine.Engine` is one."""

    async def models(self) -> tuple[str, ...]:
        """Return the served names."""
        ...

    async def distributions(
        self, model: str, prompts: Sequence[str], *, top: int, tokens: Tokens | None = None
    ) -> list[Distribution]:
        """Return the next token's distribution after each prompt: the `top` likeliest tokens, and `tokens`."""
        ...


async def read_pair(
    engine_a: Reader, model_a: str, engine_b: Reader, model_b: str, prompts: Sequence[str]
) -> Comparison:
    """Measure KL(model_a ‖ model_b), one position a prompt. Raises the engine's errors."""
    return summary(await read_both(engine_a, model_a, engine_b, model_b, prompts))


async def read_both(
    engine_a: Reader, model_a: str, engine_b: Reader, model_b: str, prompts: Sequence[str]
) -> list[Pair]:
    """Read both sides at one position a prompt. Raises the engine's errors.

    Two engines are read at the same time, one engine in turns: what shares a batch shows in the last digits.
    """
    tops = await _both(
        engine_a is not engine_b,
        engine_a.distributions(model_a, prompts, top=TOP_TOKENS),
        engine_b.distributions(model_b, prompts, top=TOP_TOKENS),
    )
    tokens = [sorted(a.logprobs.keys() | b.logprobs.keys()) for a, b in zip(*tops, strict=True)]
    exact = await _both(
        engine_a is not engine_b,
        read_exact(engine_a, model_a, prompts, tokens),
        read_exact(engine_b, model_b, prompts, tokens),
    )
    return list(zip(*exact, strict=True))


async def read_exact(engine: Reader, model: str, prompts: Sequence[str], tokens: Tokens) -> list[Distribution]:
    """Read the exact log-probabilities of given tokens, per prompt."""
    return await engine.distributions(model, prompts, top=0, tokens=tokens)


async def read_side(engine: Reader, model: str, prompts: Sequence[str], asked: Tokens | None = None) -> list[Logprobs]:
    """Measure one side alone: its likeliest tokens or, with the `asked` ones of the other side, the union exactly."""
    tops = await engine.distributions(model, prompts, top=TOP_TOKENS)
    if asked is None:
        return [written(top) for top in tops]
    tokens = [sorted({*top.logprobs, *others}) for top, others in zip(tops, asked, strict=True)]
    return [written(exact) for exact in await read_exact(engine, model, prompts, tokens)]


async def read_against(engine: Reader, model: str, prompts: Sequence[str], measured: Sequence[Logprobs]) -> Comparison:
    """Measure KL(model ‖ measured) over exactly the tokens of a side that was measured elsewhere.

    Both sides go through the same integers, so that equal engines are at a distance of exactly 0.
    """
    own = await read_exact(engine, model, prompts, [side.tokens for side in measured])
    return summary([(read(written(mine)), read(theirs)) for mine, theirs in zip(own, measured, strict=True)])


async def noise(engine: Reader, base: str, prompts: Sequence[str]) -> int:
    """Return the largest KL, in micronats, between any two of three reads of the base at any position."""
    first = await engine.distributions(base, prompts, top=TOP_TOKENS)
    tokens = [sorted(found.logprobs) for found in first]
    reads = [first, *[await read_exact(engine, base, prompts, tokens) for _ in range(READS - 1)]]
    return max(
        micronats(kl_nats(mine, theirs))
        for one, other in permutations(reads, 2)
        for mine, theirs in zip(one, other, strict=True)
    )


async def _both(
    at_once: bool, first: Coroutine[None, None, Result], second: Coroutine[None, None, Result]
) -> tuple[Result, Result]:
    """Await both; the first error ends the other one and is raised as it is."""
    if not at_once:
        try:
            return await first, await second
        finally:
            second.close()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = group.create_task(first), group.create_task(second)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return tasks[0].result(), tasks[1].result()
