"""The HTTP client of one running server, the same for vLLM and the fake."""

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self, TypeAlias

import httpx

from kite import tracing
from kite.clock import mono_us
from kite.engine.errors import EngineAnswer, EngineError, EngineLate, EngineRefused, EngineUnreachable, refusal
from kite.engine.facts import Facts, read_base, with_config, with_labels
from kite.engine.reading import (
    TOKENS_MAX,
    TOP_MAX,
    Activity,
    Allocation,
    Distribution,
    added,
    complete,
    named,
    read_activity,
    read_allocations,
    read_distribution,
    read_flag,
    read_folders,
    read_names,
    read_slots,
    read_use,
    read_written,
    words,
)
from kite.telemetry.extension import ADAPTERS, ALLOCATOR, DROP
from kite_schemas.yoco import SleepMode

CONNECT_S = 2.0  # loopback: it answers at once or is not there
HEALTH_S = 2.0
CONTROL_S = 10.0  # names, metrics, resume, cache reset
FACTS_S = 60.0  # the first time vLLM looks at its whole environment, with compilers and packages
LOAD_S = 60.0  # measured 6-50 ms; a large adapter from a cold disk takes seconds
PAUSE_S = 60.0  # waits for the running requests
SLEEP_S = 60.0  # 10.6 s were measured to fall asleep with 8 B and LoRA; the same to read the weights again
READ_S = 60.0  # one call of `distributions`, all its prompts
LEVELS = {SleepMode.L1: "1", SleepMode.L2: "2"}
RELOAD = "reload_weights"  # of vLLM's worker
KEEPALIVE_S = 2.0  # below the server's 5 s, so that no request meets a connection that is being closed
READ_TRIES = 8  # of one distribution whose answer was spoilt by another client's request in the same batch

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Loaded(NamedTuple):
    """What an engine tells of a load: its own number of the adapter (its slot), and all slots that it holds then.

    Each is None when it does not tell.
    """

    slot: int | None
    held: frozenset[int] | None


class Engine:
    """One running server at `url` (`http://127.0.0.1:PORT`).

    Every method raises EngineUnreachable, EngineLate, EngineRefused or EngineAnswer. The caller's trace context
    travels with each request, so that the engine's own span joins it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.busy_us = 0  # monotonic time in which at least one request was under way
        self._calls = 0
        self._called_us = 0
        self._loading = asyncio.Lock()  # two at once could not be told apart by what the engine holds
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(CONTROL_S, connect=CONNECT_S),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            trust_env=False,  # a proxy of the environment is not for loopback
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def healthy(self) -> bool:
        """Say whether the server answers and its engine lives. A paused engine is healthy. Never raises EngineError."""
        try:
            await self._call("GET", "/health", "health", HEALTH_S)
        except EngineError:
            return False
        return True

    async def models(self) -> tuple[str, ...]:
        """Return the served names, the base first."""
        return read_names(as_json(await self._call("GET", "/v1/models", "the list of models", CONTROL_S)))

    async def adapters(self) -> Mapping[str, str]:
        """Return the folder of each loaded adapter, as the engine was told it, by served name."""
        return read_folders(as_json(await self._call("GET", "/v1/models", "the list of adapters", CONTROL_S)))

    async def facts(self) -> Facts:
        """Return how the server is set up, as far as it tells: outside of vLLM's development mode only in part."""
        facts = read_base(as_json(await self._call("GET", "/v1/models", "the list of models", CONTROL_S)))
        query = {"config_format": "json"}
        try:
            answer = await self._call("GET", "/server_info", "its configuration", FACTS_S, query=query)
        except EngineRefused:
            return with_labels(facts, await self.metrics())
        return with_config(facts, as_json(answer))

    async def allocations(self) -> tuple[Allocation, ...] | None:
        """Return what torch's allocator holds for each worker, None on CPU: it answers between two steps."""
        return read_allocations(await self._rpc(ALLOCATOR, "its allocators"))

    async def load(self, name: str, path: str) -> Loaded:
        """Load the adapter in folder `path` (as the engine sees it) under a new `name`; a name is never loaded anew.

        200 OK is no proof of an effect: an adapter whose keys match no module is accepted and the base is served.
        """
        body = {"lora_name": name, "lora_path": path}
        async with self._loading:
            before = await self.held()
            await self._call("POST", "/v1/load_lora_adapter", f"to load {name}", LOAD_S, body=body)
            held = await self.held()
        return Loaded(added(before, held), held)

    async def held(self) -> frozenset[int] | None:
        """Return the slots of the adapters that the engine holds, unloaded ones too; None when it does not tell."""
        try:
            return read_slots(await self._rpc(ADAPTERS, "its adapters"))
        except EngineRefused:  # started without our extension, or outside of vLLM's development mode
            return None

    async def drop(self, slot: int) -> frozenset[int]:
        """Let go of an adapter whose name is unloaded and that no request uses; return the slots that are left."""
        return read_slots(await self._rpc(DROP, f"to drop slot {slot}", slot))

    async def in_use(self, name: str) -> bool:
        """Say whether a request for this adapter runs or waits. What a pause holds is not counted."""
        return read_use(await self.metrics(), name)

    async def unload(self, name: str) -> None:
        """Take the name away; requests under way finish. The engine keeps the tensors until it evicts or drops them."""
        await self._call("POST", "/v1/unload_lora_adapter", f"to unload {name}", CONTROL_S, body={"lora_name": name})

    async def pause(self) -> None:
        """Let the running requests finish and hold new ones. The prefix cache is cleared."""
        await self._call("POST", "/pause", "to pause", PAUSE_S, query={"mode": "wait"})

    async def resume(self) -> None:
        """Serve again, the held requests first."""
        await self._call("POST", "/resume", "to resume", CONTROL_S)

    async def sleep(self, mode: SleepMode) -> None:
        """Let the running requests finish, hold new ones, and give back what the mode says.

        On a CPU vLLM takes every level and gives back nothing: what it can do is known before (the node's offer).
        """
        if mode in LEVELS:
            query = {"level": LEVELS[mode], "mode": "wait"}
            await self._call("POST", "/sleep", "to sleep", SLEEP_S, query=query)
            return
        await self.pause()
        if mode is SleepMode.KV:
            await self._call("POST", "/release_kv_cache_memory", "to release its KV cache", SLEEP_S)

    async def wake(self, mode: SleepMode) -> None:
        """Take back what a sleep in this mode gave, and serve again, the held requests first.

        The second level has lost the weights and every adapter: the weights are read again before a request is served,
        and the adapters' names are taken away, so that each is loaded anew and none is served by what is left of it.
        """
        if mode is SleepMode.PAUSED:
            await self.resume()
            return
        if mode is SleepMode.L2:
            await self._call("POST", "/wake_up", "to take memory for its weights", SLEEP_S, query={"tags": "weights"})
            await self._rpc(RELOAD, "to read its weights again", limit_s=SLEEP_S)
            await self._forget()
        await self._call("POST", "/wake_up", "to wake", SLEEP_S)

    async def _forget(self) -> None:
        """Unload every adapter, and drop what is left of it."""
        for name in (await self.models())[1:]:
            await self.unload(name)
        for slot in await self.held() or ():
            await self.drop(slot)

    async def is_paused(self) -> bool:
        """Say whether new requests are held."""
        return read_flag(as_json(await self._call("GET", "/is_paused", "whether it is paused", CONTROL_S)), "is_paused")

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises EngineRefused (busy) while a request holds blocks."""
        answer = await self._call("POST", "/reset_prefix_cache", "to reset the prefix cache", CONTROL_S)
        if not read_flag(as_json(answer), "success"):
            raise EngineRefused("to reset the prefix cache", refusal(429, ""), "", answer.status_code)

    async def activity(self) -> Activity:
        """Return how many requests run and wait. vLLM counts no request that it holds while paused."""
        return read_activity(await self.metrics())

    async def metrics(self) -> str:
        """Return the page of metrics, in Prometheus' text form; vLLM takes 8 ms to write it."""
        return (await self._call("GET", "/metrics", "metrics", CONTROL_S)).text

    async def complete(self, model: str, prompt: Prompt, tokens: int, timeout_s: float = READ_S) -> int:
        """Have so many tokens written after a prompt, greedily and past an end of text; return how many were."""
        body = {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await self._call("POST", "/v1/completions", f"{tokens} tokens of {model}", timeout_s, body=body)
        return read_written(as_json(answer))

    async def distributions(
        self,
        model: str,
        prompts: Sequence[Prompt],
        *,
        top: int = TOP_MAX,
        tokens: Sequence[Sequence[int]] | None = None,
        timeout_s: float = READ_S,
    ) -> list[Distribution]:
        """Read the distribution of the next token after each prompt, greedily, one request after the other.

        Returns, in the order of `prompts`, the `top` most likely tokens (0 to 20; 0 reads none) and, when `tokens` is
        given, exactly the ids in `tokens[i]` as well (at most 128 a prompt). One at a time, because an engine's
        answers depend in the last digits on what else is in the batch. The time limit is for the whole call.
        """
        wanted = check_wanted(prompts, top, tokens)
        try:
            async with asyncio.timeout(timeout_s):
                return [
                    await self._distribution(model, prompt, top, ids, timeout_s)
                    for prompt, ids in zip(prompts, wanted, strict=True)
                ]
        except TimeoutError as error:
            raise EngineLate(f"{len(prompts)} distributions of {model}", timeout_s) from error

    async def _rpc(self, method: str, what: str, *arguments: object, limit_s: float = CONTROL_S) -> object:
        """Call a method of our extension in the engine's worker; it answers between two steps."""
        body = {"method": method, "args": list(arguments)}
        return as_json(await self._call("POST", "/collective_rpc", what, limit_s, body=body))

    async def _distribution(
        self, model: str, prompt: Prompt, top: int, ids: Sequence[int], timeout_s: float
    ) -> Distribution:
        best = await self._top(model, prompt, top, timeout_s) if top else {}
        exact = await self._named(model, prompt, ids, timeout_s) if ids else {}
        return Distribution(dict(sorted({**best, **exact}.items())))

    async def _top(self, model: str, prompt: Prompt, top: int, timeout_s: float) -> dict[int, float]:
        async for pairs in self._tries(model, prompt, {"logprobs": top}, timeout_s):
            if complete(pairs, top):
                return pairs
        raise EngineAnswer(f"{READ_TRIES} answers of {model} in a row held fewer than {top} tokens")

    async def _named(self, model: str, prompt: Prompt, ids: Sequence[int], timeout_s: float) -> dict[int, float]:
        unique = sorted(set(ids))
        options = {"logprobs": len(unique), "logprob_token_ids": unique}
        async for pairs in self._tries(model, prompt, options, timeout_s):
            if (exact := named(pairs, unique)) is not None:
                return exact
        raise EngineAnswer(f"{READ_TRIES} answers of {model} in a row lacked a token that was asked for")

    async def _tries(
        self, model: str, prompt: Prompt, options: Mapping[str, object], timeout_s: float
    ) -> AsyncIterator[dict[int, float]]:
        body = {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
            **options,
        }
        for _ in range(READ_TRIES):
            answer = await self._call("POST", "/v1/completions", f"one token of {model}", timeout_s, body=body)
            yield read_distribution(as_json(answer))

    async def _call(
        self,
        method: str,
        path: str,
        what: str,
        limit_s: float,
        *,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        with self._under_way(), transport_errors(self.url, what, limit_s):
            answer = await self._http.request(
                method,
                path,
                json=body,
                params=query,
                headers=tracing.headers(),
                timeout=httpx.Timeout(limit_s, connect=min(CONNECT_S, limit_s)),
            )
        if not answer.is_success:
            text = words(answer.text)
            raise EngineRefused(what, refusal(answer.status_code, text), text, answer.status_code)
        return answer

    @contextmanager
    def _under_way(self) -> Generator[None]:
        """Count the time of a request; what runs side by side counts once."""
        if not self._calls:
            self._called_us = mono_us()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self.busy_us += mono_us() - self._called_us


@contextmanager
def transport_errors(url: str, what: str, limit_s: float) -> Generator[None]:
    """Turn the client library's errors into ours."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise EngineUnreachable(f"no engine answers at {url}", hint="see whether the instance runs") from error
    except httpx.TimeoutException as error:
        raise EngineLate(what, limit_s) from error
    except httpx.TransportError as error:
        said = str(error) or type(error).__name__
        raise EngineUnreachable(
            f"no answer to {what} from {url}: {said}", hint="see whether the instance runs"
        ) from error


def as_json(answer: httpx.Response) -> object:
    """Return the decoded body. Raises EngineAnswer."""
    try:
        return answer.json()
    except ValueError as error:
        raise EngineAnswer(f"the answer of {answer.request.url.path} is no JSON") from error


def check_wanted(
    prompts: Sequence[Prompt], top: int, tokens: Sequence[Sequence[int]] | None
) -> Sequence[Sequence[int]]:
    """Return the ids wanted for each prompt. Raises ValueError for what no engine would answer."""
    wanted = tokens if tokens is not None else [()] * len(prompts)
    if len(wanted) != len(prompts):
        msg = f"{len(prompts)} prompts, but token ids for {len(wanted)}"
        raise ValueError(msg)
    if not 0 <= top <= TOP_MAX or any(len(set(ids)) > TOKENS_MAX for ids in wanted):
        msg = f"at most {TOP_MAX} top tokens and {TOKENS_MAX} named ones a prompt"
        raise ValueError(msg)
    return wanted
