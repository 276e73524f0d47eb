"""The reference: base, members and their blend computed with torch, read the way an engine is read."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kite.engine import Distribution
from kite.testing.llama import Adapters, Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Reference:
    """Answers for several models of one base, float32 on one CPU; a `kite.proof.Reader`."""

    def __init__(self, models: Mapping[str, Llama], tokenizer: "Tokenizer") -> None:
        self._models = models
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, base: Path, models: Mapping[str, Adapters]) -> "Reference":
        """Load a base and put each model's adapters, with their weights, on top of it. Raises as `Llama.load`.

        Sets torch to one thread: beside busy engines two were 20 to 40 times slower on two cores (measured).
        """
        import torch
        from tokenizers import Tokenizer

        torch.set_num_threads(1)
        plain = Llama.load(base)
        merged = {name: plain.merged(adapters) if adapters else plain for name, adapters in models.items()}
        return cls(merged, Tokenizer.from_file(str(base / "tokenizer.json")))

    async def models(self) -> tuple[str, ...]:
        """Return the names of the models."""
        return tuple(self._models)

    async def distributions(
        self, model: str, prompts: Sequence[str], *, top: int, tokens: Sequence[Sequence[int]] | None = None
    ) -> list[Distribution]:
        """Return the next token's distribution after each prompt: the `top` likeliest tokens, and `tokens`."""
        wanted = tokens or [()] * len(prompts)
        # Seconds on a busy machine: in the event loop, an engine meanwhile closes the connections that are to be used.
        return await asyncio.to_thread(self._read_all, model, prompts, top, wanted)

    def _read_all(
        self, model: str, prompts: Sequence[str], top: int, wanted: Sequence[Sequence[int]]
    ) -> list[Distribution]:
        return [self._read(model, prompt, top, ids) for prompt, ids in zip(prompts, wanted, strict=True)]

    def _read(self, model: str, prompt: str, top: int, ids: Sequence[int]) -> Distribution:
        logprobs = self._models[model].next_logprobs(self._tokenizer.encode(prompt).ids)
        best = [int(token) for token in logprobs.topk(top).indices]
        return Distribution({token: float(logprobs[token]) for token in sorted({*best, *ids})})
