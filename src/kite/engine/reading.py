"""What an engine's answers mean: distributions of a next token, and how busy it is. Pure functions."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kite.engine.errors import EngineAnswer
from kite.telemetry.extension import INACTIVE, RESERVED

TOKEN_PREFIX = "token_id:"  # noqa: S105 - the protocol's word for a token of the vocabulary
FLOOR_NATS = -9_999.0  # the protocol's stand-in for minus infinity (JSON has none)
TOP_MAX = 20  # default of --max-logprobs
TOKENS_MAX = 128  # most ids that one read may ask for (vLLM's MAX_LOGPROB_TOKEN_IDS)
WORDS_MAX = 2_000  # characters of an error text that are kept
USE = "vllm:lora_requests_info"
SUM_SLACK = 1e-3  # float32 (and bfloat16 logits) may push a sum of probabilities past 1 by this much

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Allocation:
    """What torch's allocator holds for one worker: all it has reserved, and what of it is split off and lies idle."""

    reserved_bytes: int
    inactive_bytes: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """A part of the next-token distribution after one prompt: token id → natural logarithm of its probability.

    The tokens listed are exact; what they leave of 1 belongs to all others together.
    """

    logprobs: dict[int, float]

    @property
    def mass(self) -> float:
        """Return the probability that the listed tokens cover, 0 to 1."""
        return min(1.0, math.fsum(math.exp(value) for value in self.logprobs.values()))


@dataclass(frozen=True, slots=True)
class Activity:
    """Requests in an engine: `running` hold a slot, `waiting` are queued."""

    running: int
    waiting: int


def read_distribution(answer: object) -> dict[int, float]:
    """Return token id → log-probability from the answer to a one-token completion. Raises EngineAnswer."""
    try:
        body = cast("Json", answer)
        choice = cast("Sequence[Json]", body["choices"])[0]
        found = cast(
            "Mapping[str, object]", cast("Sequence[object]", cast("Json", choice["logprobs"])["top_logprobs"])[0]
        )
        pairs = {token_id(token): nats(value) for token, value in found.items()}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineAnswer("the answer to a one-token completion carries no log-probabilities") from error
    return checked(pairs)


def token_id(token: str) -> int:
    """Read `token_id:17` as 17. Raises EngineAnswer for anything else (decoded text is ambiguous)."""
    number = token.removeprefix(TOKEN_PREFIX)
    if number == token or not number.isdecimal():
        raise EngineAnswer(f"a log-probability is keyed by {token!r}, not by a token id")
    return int(number)


def nats(value: object) -> float:
    """Return a finite log-probability. Raises EngineAnswer."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise EngineAnswer(f"a log-probability is {value!r}: not a finite number")
    return float(value)


def checked(pairs: Mapping[int, float]) -> dict[int, float]:
    """Return the pairs by ascending token id. Raises EngineAnswer when they cannot be one distribution."""
    total = math.fsum(math.exp(min(value, 1.0)) for value in pairs.values())
    if not pairs or total > 1 + SUM_SLACK:
        raise EngineAnswer(f"{len(pairs)} log-probabilities add up to {total:.6f}: not a distribution")
    return dict(sorted(pairs.items()))


def complete(pairs: Mapping[int, float], top: int) -> bool:
    """Say whether a read of the `top` most likely tokens holds that many real ones.

    vLLM 0.32 answers a top read with padding when a request for named tokens was in the same batch (its sampler takes
    one of the two forms for the whole batch).
    """
    return sum(value > FLOOR_NATS for value in pairs.values()) >= top


def named(pairs: Mapping[int, float], ids: Sequence[int]) -> dict[int, float] | None:
    """Return the pairs of exactly `ids`, or None when one is missing or padding (see `complete`)."""
    found = {token: pairs.get(token, FLOOR_NATS) for token in ids}
    return None if any(value <= FLOOR_NATS for value in found.values()) else found


def read_flag(answer: object, name: str) -> bool:
    """Return a boolean field of an answer. Raises EngineAnswer."""
    value = cast("Json", answer).get(name) if isinstance(answer, dict) else None
    if not isinstance(value, bool):
        raise EngineAnswer(f"the answer has no field {name} that is true or false")
    return value


def words(body: str) -> str:
    """Return what the body of an error says: `error.message`, `error`, `detail`, or the text itself."""
    try:
        answer = cast("object", json.loads(body))
    except ValueError:
        return body.strip()[:WORDS_MAX]
    if not isinstance(answer, dict):
        return body.strip()[:WORDS_MAX]
    said = cast("Json", answer).get("error", cast("Json", answer).get("detail", ""))
    if isinstance(said, dict):
        said = cast("Json", said).get("message", "")
    return str(said).strip()[:WORDS_MAX]


def read_names(answer: object) -> tuple[str, ...]:
    """Return the served names in the engine's order, the base first. Raises EngineAnswer."""
    try:
        cards = cast("Sequence[Json]", cast("Json", answer)["data"])
        return tuple(str(card["id"]) for card in cards)
    except (KeyError, TypeError) as error:
        raise EngineAnswer("the list of models has another form") from error


def read_allocations(answer: object) -> tuple[Allocation, ...] | None:
    """Return the allocation of each worker, None when one has no GPU. Raises EngineAnswer.

    >>> read_allocations({"results": [{"reserved_bytes": 8, "inactive_split_bytes": 2}]})
    (Allocation(reserved_bytes=8, inactive_bytes=2),)
    """
    try:
        workers = cast("Sequence[Mapping[str, int] | None]", cast("Json", answer)["results"])
        if not workers or None in workers:
            return None
        return tuple(Allocation(int(told[RESERVED]), int(told[INACTIVE])) for told in workers if told is not None)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswer("the allocators have another form") from error


def read_slots(answer: object) -> frozenset[int]:
    """Return the slots that every worker holds: they hold the same. Raises EngineAnswer.

    >>> sorted(read_slots({"results": [[1, 3]]}))
    [1, 3]
    """
    try:
        workers = cast("Sequence[Sequence[int]]", cast("Json", answer)["results"])
        return frozenset(int(slot) for slot in workers[0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineAnswer("the list of adapters that are held has another form") from error


def added(before: frozenset[int] | None, after: frozenset[int] | None) -> int | None:
    """Return the one slot that was taken between two looks, None when that cannot be told.

    >>> added(frozenset({1, 2}), frozenset({2, 5}))
    5
    """
    new = after - before if before is not None and after is not None else frozenset[int]()
    return next(iter(new)) if len(new) == 1 else None


def read_use(page: str, name: str) -> bool:
    """Say whether a metrics page tells of a request for the adapter.

    Each combination of adapters is a series of its own and stays for ever; its value is when it was true last. An
    engine without requests may not have said so yet.
    """
    activity = read_activity(page)
    found = re.findall(rf"^{USE}\{{(.*)\}} ([0-9.eE+-]+)$", page, re.MULTILINE)
    if not found or activity == Activity(0, 0):
        return False
    labels = max(found, key=lambda series: float(series[1]))[0]
    users = re.findall(r'(?:running|waiting)_lora_adapters="([^"]*)"', labels)
    return any(name in listed.split(",") for listed in users)


def read_written(answer: object) -> int:
    """Return how many tokens a completion has. Raises EngineAnswer."""
    try:
        return int(cast("Mapping[str, int]", cast("Json", answer)["usage"])["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswer("a completion does not say how many tokens it has") from error


def read_folders(answer: object) -> dict[str, str]:
    """Return the folders of the adapters by name, from a list of models: the base is the first. Raises EngineAnswer.

    >>> read_folders({"data": [{"id": "tiny"}, {"id": "risk", "root": "/adapters/risk"}]})
    {'risk': '/adapters/risk'}
    """
    try:
        _, *adapters = cast("Sequence[Json]", cast("Json", answer)["data"])
        return {str(card["id"]): str(card["root"]) for card in adapters}
    except (KeyError, TypeError, ValueError) as error:
        raise EngineAnswer("the list of models has another form") from error


def read_gauge(page: str, name: str) -> int:
    """Return the sum of a gauge over its label sets in a page of Prometheus text. Raises EngineAnswer if absent."""
    lines = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? ([0-9.eE+-]+)$", page, re.MULTILINE)
    if not lines:
        raise EngineAnswer(f"the metrics page has no {name}")
    return int(math.fsum(map(float, lines)))


def read_activity(page: str) -> Activity:
    """Read the two request gauges of a metrics page."""
    return Activity(
        running=read_gauge(page, "vllm:num_requests_running"),
        waiting=read_gauge(page, "vllm:num_requests_waiting"),
    )
