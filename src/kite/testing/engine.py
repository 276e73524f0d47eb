"""The contract of an engine, run on the fake and on real vLLM: subclass, and give the fixtures that it names."""
# ruff: noqa: S101 - assert is the point of a contract

import asyncio
import re
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from kite import tracing
from kite.engine import (
    Death,
    Engine,
    EngineDied,
    EngineLate,
    EngineProcess,
    EngineRefused,
    EngineSpec,
    EngineUnreachable,
    Refusal,
    free_port,
)
from kite.engine.process import members
from kite.engine.reading import TOP_MAX
from kite.testing import adapters, zoo
from kite.testing.eventually import eventually
from kite.testing.llama import Llama
from kite.testing.otlp import Receiver
from kite_schemas.yoco import SleepMode

BASE_NAME = "tiny"
GIB = 1024**3
PROMPT = (11, 87, 203, 45)
LONG_TOKENS = 400  # of a completion that is still running when a test looks; over a second on either engine
EXACT_NATS = 1e-3  # float32 on both sides; measured 8e-6
MOVED_NATS = 0.1  # what a good adapter changes at least, somewhere among the first tokens
START_S = 240.0  # vLLM on a busy machine
GONE_S = 30.0

OWNER = """
import asyncio, sys
from pathlib import Path
from kite.engine import EngineProcess, EngineSpec
async def main():
    process = await EngineProcess.start(EngineSpec.model_validate_json(sys.argv[1]), log=Path(sys.argv[2]))
    print(process.pid, flush=True)
    await process.wait_healthy(float(sys.argv[3]))
    print("healthy", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def tiny_spec(kind: Literal["vllm", "fake"], base: Path) -> EngineSpec:
    """Return the configuration that the tests share: float32, so that answers can be compared with torch."""
    return EngineSpec(
        kind=kind,
        base_path=str(base),
        served_name=BASE_NAME,
        dtype="float32",
        max_model_len=512,
        max_loras=8,
        max_lora_rank=16,
        block_size=32,
        kv_cache_bytes=GIB,
        cpus="0",
    )


@dataclass(frozen=True, slots=True)
class Adapters:
    """Folders of adapters for the tiny base."""

    good: Path
    other: Path
    wide: Path
    matchless: Path
    nan: Path
    dora: Path


def make_adapters(folder: Path, base: Path) -> Adapters:
    """Write the adapters that the contract loads."""
    good = adapters.adapter(folder / "good", base, rank=4, seed=1)
    return Adapters(
        good=good,
        other=adapters.adapter(folder / "other", base, rank=8, seed=2),
        wide=adapters.adapter(folder / "wide", base, rank=32, seed=3),
        matchless=zoo.defective(good, folder / "matchless", "wrong_prefix"),
        nan=zoo.defective(good, folder / "nan", "nan"),
        dora=zoo.defective(good, folder / "dora", "dora"),
    )


async def refused(action: Awaitable[object]) -> Refusal:
    """Return the reason for which the engine refuses."""
    with pytest.raises(EngineRefused) as caught:
        await action
    return caught.value.reason


def distance(engine: dict[int, float], model: Llama, prompt: Sequence[int] = PROMPT) -> float:
    """Return the largest difference in nats between an engine's log-probabilities and a model's."""
    expected = model.next_logprobs(prompt)
    return max(abs(value - float(expected[token])) for token, value in engine.items())


async def cached(engine: Engine) -> tuple[int, int]:
    """Return how many prompt tokens the engine has looked up in its prefix cache, and how many it found."""
    page = await engine.metrics()
    found = (
        re.search(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", page, re.MULTILINE) for name in ("queries", "hits")
    )
    queries, hits = (int(float(match[1])) if match else 0 for match in found)
    return queries, hits


class EngineContract:
    """What every running engine does. Subclasses give `server`, a healthy EngineProcess, and `modes`, as it is offered.

    Also needed, from the suite: `collector`, `tiny_base`, `tiny_adapters` (`make_adapters`), `tiny_model` (Llama).
    """

    @pytest_asyncio.fixture
    async def engine(self, server: EngineProcess) -> AsyncGenerator[Engine]:
        async with Engine(server.url) as engine:
            yield engine
            await engine.resume()
            for name in (await engine.models())[1:]:
                await engine.unload(name)

    async def test_serves_its_base(self, engine: Engine) -> None:
        assert await engine.healthy()
        assert await engine.models() == (BASE_NAME,)

    async def test_without_a_gpu_no_allocator_is_known(self, engine: Engine) -> None:
        assert await engine.allocations() is None

    async def test_loads_and_unloads(self, engine: Engine, tiny_adapters: Adapters) -> None:
        await engine.load("credit@1", str(tiny_adapters.good))
        assert await engine.models() == (BASE_NAME, "credit@1")
        await engine.unload("credit@1")
        assert await engine.models() == (BASE_NAME,)
        assert await refused(engine.distributions("credit@1", [PROMPT])) is Refusal.MODEL_UNKNOWN

    async def test_refuses_with_stable_reasons(self, engine: Engine, tiny_adapters: Adapters) -> None:
        await engine.load("credit@1", str(tiny_adapters.good))
        assert await refused(engine.load("credit@1", str(tiny_adapters.other))) is Refusal.ALREADY_LOADED
        assert await refused(engine.load(BASE_NAME, str(tiny_adapters.good))) is Refusal.NAME_IS_BASE
        assert await refused(engine.load("gone@1", str(tiny_adapters.good / "none"))) is Refusal.ADAPTER_MISSING
        assert await refused(engine.load("wide@1", str(tiny_adapters.wide))) is Refusal.RANK_TOO_HIGH
        assert await refused(engine.load("dora@1", str(tiny_adapters.dora))) is Refusal.UNSUPPORTED
        assert await refused(engine.unload("never@1")) is Refusal.MODEL_UNKNOWN
        assert await engine.models() == (BASE_NAME, "credit@1")

    async def test_distribution_is_the_models(self, engine: Engine, tiny_model: Llama) -> None:
        (found,) = await engine.distributions(BASE_NAME, [PROMPT])
        assert len(found.logprobs) == TOP_MAX
        assert 0 < found.mass <= 1
        assert distance(found.logprobs, tiny_model) < EXACT_NATS
        best = max(found.logprobs, key=lambda token: found.logprobs[token])
        assert best == int(tiny_model.next_logprobs(PROMPT).argmax())

    async def test_named_tokens_are_exact(self, engine: Engine, tiny_model: Llama) -> None:
        wanted = [0, 31_999, *range(100, 200)]
        (named,) = await engine.distributions(BASE_NAME, [PROMPT], top=0, tokens=[wanted])
        (both,) = await engine.distributions(BASE_NAME, [PROMPT], tokens=[wanted])
        assert named.logprobs.keys() == set(wanted)
        assert set(wanted) < both.logprobs.keys()
        assert distance(both.logprobs, tiny_model) < EXACT_NATS
        assert all(both.logprobs[token] == value for token, value in named.logprobs.items())

    async def test_reads_repeat_exactly(self, engine: Engine) -> None:
        first = await engine.distributions(BASE_NAME, [PROMPT, "a text", "another"], tokens=[[1], [2], [3]])
        assert await engine.distributions(BASE_NAME, [PROMPT, "a text", "another"], tokens=[[1], [2], [3]]) == first

    async def test_a_repeated_prompt_hits_the_prefix_cache_by_whole_blocks(self, engine: Engine) -> None:
        """The last token is computed in any case, so that its block never hits."""
        await engine.reset_prefix_cache()
        before = await cached(engine)
        for prompt in (range(100, 164), range(100, 164), range(164, 228)):  # 64 tokens: two blocks of 32
            await engine.distributions(BASE_NAME, [tuple(prompt)], tokens=[[1]])
        reads = 2  # of each prompt: the likeliest tokens, and the named ones
        queries, hits = 64 * 3 * reads, 32 * (3 * reads - 2)
        expected = (before[0] + queries, before[1] + hits)

        async def counted() -> bool:
            return await cached(engine) == expected

        await eventually(counted)

    async def test_reads_of_two_kinds_do_not_spoil_each_other(self, engine: Engine) -> None:
        """In one batch vLLM answers all requests in the form of one: the client notices and asks again."""
        reads = [
            engine.distributions(BASE_NAME, [[*PROMPT, number]], tokens=[[7, 8]] if number % 2 else None)
            for number in range(12)
        ]
        answers = await asyncio.gather(*reads)
        assert [len(found.logprobs) >= TOP_MAX for (found,) in answers] == [True] * 12

    async def test_adapter_changes_its_own_answers_only(
        self, engine: Engine, tiny_adapters: Adapters, tiny_model: Llama
    ) -> None:
        (before,) = await engine.distributions(BASE_NAME, [PROMPT])
        for name, path in (("credit@1", tiny_adapters.good), ("mood@1", tiny_adapters.other)):
            await engine.load(name, str(path))
            (found,) = await engine.distributions(name, [PROMPT])
            assert distance(found.logprobs, tiny_model.merged([(path, 1.0)])) < EXACT_NATS
            assert distance(found.logprobs, tiny_model) > MOVED_NATS
        assert await engine.distributions(BASE_NAME, [PROMPT]) == [before]

    async def test_accepts_an_adapter_that_matches_nothing(self, engine: Engine, tiny_adapters: Adapters) -> None:
        """The fault that effect proofs exist for: 200 OK, and the base is served under the adapter's name."""
        await engine.load("matchless@1", str(tiny_adapters.matchless))
        assert await engine.distributions("matchless@1", [PROMPT]) == await engine.distributions(BASE_NAME, [PROMPT])

    async def test_nan_is_an_error(self, engine: Engine, tiny_adapters: Adapters) -> None:
        """The prompt is shorter than a KV block: a longer one leaves NaN in blocks, and short prompts of the base get
        NaN from them, after a cache reset too, until something overwrites them (vLLM 0.32 on CPU)."""
        before = await engine.distributions(BASE_NAME, [PROMPT])
        await engine.load("nan@1", str(tiny_adapters.nan))
        assert await refused(engine.distributions("nan@1", [PROMPT])) is Refusal.NOT_FINITE
        await engine.unload("nan@1")
        await engine.reset_prefix_cache()
        assert await engine.distributions(BASE_NAME, [PROMPT]) == before

    async def test_paused_engine_holds_requests_and_takes_adapters(
        self, engine: Engine, tiny_adapters: Adapters
    ) -> None:
        assert not await engine.is_paused()
        await engine.pause()
        assert await engine.is_paused()
        assert await engine.healthy()
        held = asyncio.create_task(engine.distributions(BASE_NAME, [PROMPT]))
        with pytest.raises(EngineLate):
            await engine.distributions(BASE_NAME, [PROMPT], timeout_s=0.5)
        await engine.load("credit@1", str(tiny_adapters.good))
        assert not held.done()
        await engine.resume()
        assert len(await held) == 1
        assert not await engine.is_paused()
        assert len(await engine.distributions("credit@1", [PROMPT])) == 1

    async def test_sleeps_and_wakes_in_every_mode_that_is_offered(
        self, engine: Engine, tiny_adapters: Adapters, modes: Sequence[SleepMode]
    ) -> None:
        """Only the deepest sleep loses the adapters, and then it lists none: what is loaded anew is as before."""
        assert SleepMode.PAUSED in modes
        before = await engine.distributions(BASE_NAME, [PROMPT])
        for mode in modes:
            name = f"credit@{mode}"
            await engine.load(name, str(tiny_adapters.good))
            told = await engine.distributions(name, [PROMPT])
            await engine.sleep(mode)
            assert await engine.is_paused()
            assert await engine.healthy()
            held = asyncio.create_task(engine.distributions(BASE_NAME, [PROMPT]))
            await engine.wake(mode)
            assert await held == before, mode
            assert not await engine.is_paused()
            assert (name in await engine.models()) is (mode is not SleepMode.L2)
            if mode is SleepMode.L2:
                await engine.load(name, str(tiny_adapters.good))
            assert await engine.distributions(name, [PROMPT]) == told, mode
            await engine.unload(name)

    async def test_pause_lets_running_requests_finish(self, engine: Engine) -> None:
        long = asyncio.create_task(engine.complete(BASE_NAME, PROMPT, LONG_TOKENS, 60))
        assert (await eventually(lambda: seen_running(engine))) == 1
        await engine.pause()
        assert await long == LONG_TOKENS
        activity = await engine.activity()
        assert (activity.running, activity.waiting) == (0, 0)

    async def test_joins_the_callers_trace(self, engine: Engine, collector: Receiver) -> None:
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        with tracing.span("test", parent=f"00-{trace_id}-{span_id}-01"):
            await engine.distributions(BASE_NAME, [PROMPT])
        (span,) = await eventually(lambda: [s for s in collector.trace(trace_id) if s.name == "llm_request"])
        assert span.parent_id == span_id
        assert span.service == "vllm"

    async def test_nothing_there_is_unreachable(self) -> None:
        async with Engine(f"http://127.0.0.1:{free_port()}") as nobody:
            assert not await nobody.healthy()
            with pytest.raises(EngineUnreachable):
                await nobody.models()


async def seen_running(engine: Engine) -> int:
    """Return how many requests run."""
    return (await engine.activity()).running


class ProcessContract:
    """How every server process begins and ends. Subclasses give `spec`."""

    async def test_says_why_it_died_at_start(self, spec: EngineSpec, tmp_path: Path) -> None:
        broken = spec.model_copy(update={"base_path": str(tmp_path / "no-such-base")})
        process = await EngineProcess.start(broken, log=tmp_path / "engine.log")
        with pytest.raises(EngineDied) as caught:
            await process.wait_healthy(START_S)
        assert caught.value.reason is Death.BASE_UNREADABLE
        assert caught.value.exit_code == 1
        assert "no-such-base" in caught.value.sentence
        assert members(process.pid) == []

    async def test_a_stranger_on_the_port_is_not_taken_for_it(
        self, spec: EngineSpec, tmp_path: Path, collector: Receiver
    ) -> None:
        port = int(collector.endpoint.rpartition(":")[2])
        process = await EngineProcess.start(spec, log=tmp_path / "engine.log", port=port)
        with pytest.raises(EngineDied) as caught:
            await process.wait_healthy(START_S)
        assert caught.value.reason is Death.PORT_TAKEN

    async def test_can_be_stopped_while_it_starts(self, spec: EngineSpec, tmp_path: Path) -> None:
        seen: list[float] = []
        process = await EngineProcess.start(spec, log=tmp_path / "engine.log")
        with pytest.raises(EngineLate):
            await process.wait_healthy(0.3, lambda elapsed_s, _: seen.append(elapsed_s))
        assert seen == sorted(seen)
        assert seen
        await process.stop()
        assert members(process.pid) == []

    async def test_dies_with_its_parent(self, spec: EngineSpec, tmp_path: Path) -> None:
        owner = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            OWNER,
            spec.model_dump_json(),
            str(tmp_path / "engine.log"),
            str(START_S),
            stdout=asyncio.subprocess.PIPE,
        )
        assert owner.stdout is not None
        group = int(await owner.stdout.readline())
        assert (await asyncio.wait_for(owner.stdout.readline(), START_S)).strip() == b"healthy"
        assert members(group)
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
        await eventually(lambda: not members(group), GONE_S)
