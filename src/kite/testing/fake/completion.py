"""`/v1/completions` of the fake: greedy tokens with log-probabilities, in vLLM's form."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from kite.engine.reading import TOKEN_PREFIX, TOKENS_MAX, TOP_MAX
from kite.testing.fake.model import Refused, Served

if TYPE_CHECKING:
    from torch import Tensor

    from kite.testing.llama import Llama

DEFAULT_TOKENS = 16
OUTPUT_MAX_TOKENS = 512  # a fake recomputes the whole prompt for each token


@dataclass(frozen=True, slots=True)
class Request:
    """One completion request, checked."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    top: int | None
    named: tuple[int, ...]
    by_id: bool


def parse(body: Mapping[str, object], served: Served) -> Request:
    """Check a request's body. Raises Refused with what vLLM answers."""
    model = str(body.get("model", served.name))
    served.model(model)
    top = cast("int | None", body.get("logprobs"))
    named = tuple(cast("Sequence[int]", body.get("logprob_token_ids") or ()))
    check_limits(top, named, served.base.vocab)
    tokens = cast("int", body.get("max_tokens", DEFAULT_TOKENS))
    prompts = tuple(tuple(served.ids(prompt)) for prompt in split(body.get("prompt")))
    return Request(
        model, prompts, min(tokens, OUTPUT_MAX_TOKENS), top, named, bool(body.get("return_tokens_as_token_ids"))
    )


def check_limits(top: int | None, named: Sequence[int], vocab: int) -> None:
    """Raise Refused for more log-probabilities than vLLM gives, or for tokens that the vocabulary lacks."""
    problem = ""
    if named and top is None:
        problem = "when using `logprob_token_ids`, `logprobs` must be set."
    elif len(named) > TOKENS_MAX:
        problem = f"Requested logprob_token_ids of length {len(named)}, which is greater than max allowed: {TOKENS_MAX}"
    elif any(not 0 <= token < vocab for token in named):
        problem = f"logprob_token_ids contain out-of-vocab token ids. Vocabulary size: {vocab}"
    elif not named and top is not None and top > TOP_MAX:
        problem = f"Requested sample logprobs of {top}, which is greater than max allowed: {TOP_MAX}"
    if problem:
        raise Refused(HTTPStatus.BAD_REQUEST, problem)


def split(prompt: object) -> list[str | Sequence[int]]:
    """Return the prompts of a request, which names one or several, as text or as token ids. Raises Refused."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Refused(HTTPStatus.BAD_REQUEST, "The prompt must be text or token ids.")
    items = cast("list[object]", prompt)
    if all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    return cast("list[str | Sequence[int]]", items)


def complete(request: Request, served: Served) -> dict[str, object]:
    """Compute the answer: one choice a prompt."""
    model = served.model(request.model)
    choices = [
        {"index": index, **choice(request, served, model, prompt)} for index, prompt in enumerate(request.prompts)
    ]
    read = sum(map(len, request.prompts))
    written = request.max_tokens * len(choices)
    return {
        "id": "cmpl-fake",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def choice(request: Request, served: Served, model: "Llama", prompt: Sequence[int]) -> dict[str, object]:
    """Generate greedily after one prompt."""
    ids, steps = list(prompt), list[tuple[int, Mapping[int, float]]]()
    for _ in range(request.max_tokens):
        logprobs = model.next_logprobs(ids)
        token = int(logprobs.argmax())
        steps.append((token, listed(logprobs, token, request)))
        ids.append(token)
    shown = None if request.top is None else as_logprobs(steps, served, by_id=request.by_id)
    text = served.tokenizer.decode(ids[len(prompt) :])
    return {"text": text, "logprobs": shown, "finish_reason": "length", "stop_reason": None}


def listed(logprobs: "Tensor", token: int, request: Request) -> dict[int, float]:
    """Return the log-probabilities that the request asks for at one position, the chosen token first."""
    wanted = request.named or [int(index) for index in logprobs.topk(request.top or 0).indices]
    return {index: float(logprobs[index]) for index in (token, *wanted)}


def as_logprobs(steps: Sequence[tuple[int, Mapping[int, float]]], served: Served, *, by_id: bool) -> dict[str, object]:
    """Write log-probabilities in the protocol's form."""

    def word(token: int) -> str:
        return f"{TOKEN_PREFIX}{token}" if by_id else served.tokenizer.decode([token])

    return {
        "text_offset": list(range(len(steps))),
        "tokens": [word(token) for token, _ in steps],
        "token_logprobs": [pairs[token] for token, pairs in steps],
        "top_logprobs": [{word(index): value for index, value in pairs.items()} for _, pairs in steps],
    }
