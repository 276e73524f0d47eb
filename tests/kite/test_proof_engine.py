"""Proofs on engines that really run: the fake, and vLLM on CPU."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from kite import probes
from kite.engine import Engine, EngineProcess
from kite.proof import Missing, PrintMismatch, Proven, noise, prove_again, prove_first, read_pair, recall
from kite.testing.engine import BASE_NAME, START_S, Adapters, tiny_spec
from kite_schemas.proof import Missing as Code

VERSION = "credit@0123456789ab"
PROBES = probes.default()
NOISE_MICRONATS = 20  # float32 on a tiny base that nobody else asks; measured 0
CLEAR_MICRONATS = 100_000  # an adapter whose effect nobody would overlook


class ProofContract:
    """What proofs find out about any engine. Subclasses give `server`, a healthy EngineProcess."""

    @pytest_asyncio.fixture
    async def engine(self, server: EngineProcess) -> AsyncGenerator[Engine]:
        async with Engine(server.url) as engine:
            yield engine
            for name in (await engine.models())[1:]:
                await engine.unload(name)
            await engine.reset_prefix_cache()

    async def first(self, engine: Engine, root: Path) -> Proven | Missing:
        return await prove_first(engine, BASE_NAME, VERSION, PROBES, 0, root)

    async def again(
        self, engine: Engine, root: Path, proven: Proven, probes_max: int | None = None
    ) -> Proven | Missing:
        return await prove_again(
            engine, BASE_NAME, VERSION, proven.effect_print, PROBES, 0, root, probes_max=probes_max
        )

    async def proven(self, engine: Engine, adapter: Path, root: Path) -> Proven:
        await engine.load(VERSION, str(adapter))
        found = await self.first(engine, root)
        assert isinstance(found, Proven)
        return found

    async def replace(self, engine: Engine, adapter: Path) -> None:
        await engine.unload(VERSION)
        await engine.load(VERSION, str(adapter))

    async def test_the_base_is_like_itself(self, engine: Engine) -> None:
        assert await noise(engine, BASE_NAME, PROBES.prompts) <= NOISE_MICRONATS

    async def test_an_effect_is_proven_recorded_and_proven_again(
        self, engine: Engine, tiny_adapters: Adapters, tmp_path: Path
    ) -> None:
        found = await self.proven(engine, tiny_adapters.good, tmp_path)
        assert found.base_micronats > CLEAR_MICRONATS
        assert found.base_min_micronats == 100
        assert (found.print_micronats, found.print_max_micronats) == (None, None)

        recorded = recall(tmp_path, found.effect_print)
        assert (recorded.base, recorded.version, recorded.probes) == (BASE_NAME, VERSION, PROBES.digest)
        assert len(recorded.positions) == len(PROBES.prompts)
        assert recorded.distance_micronats == found.base_micronats

        for probes_max in (None, 1):
            later = await self.again(engine, tmp_path, found, probes_max)
            assert isinstance(later, Proven)
            assert later.print_micronats is not None
            assert later.print_micronats <= NOISE_MICRONATS
            assert later.base_micronats > later.base_min_micronats > CLEAR_MICRONATS
            assert later.effect_print == found.effect_print

    async def test_an_adapter_that_matches_no_module_is_like_the_base(
        self, engine: Engine, tiny_adapters: Adapters, tmp_path: Path
    ) -> None:
        await engine.load(VERSION, str(tiny_adapters.matchless))
        found = await self.first(engine, tmp_path)
        assert isinstance(found, Missing)
        assert found.code is Code.LIKE_BASE
        assert found.base_micronats is not None
        assert found.base_micronats <= NOISE_MICRONATS
        assert not (tmp_path / "store").exists()

    @pytest.mark.parametrize("probes_max", [None, 1])
    async def test_an_adapter_that_was_lost_or_replaced_is_noticed(
        self, engine: Engine, tiny_adapters: Adapters, tmp_path: Path, probes_max: int | None
    ) -> None:
        found = await self.proven(engine, tiny_adapters.good, tmp_path)

        await self.replace(engine, tiny_adapters.other)
        other = await self.again(engine, tmp_path, found, probes_max)
        assert isinstance(other, Missing)
        assert other.code is Code.UNLIKE_PRINT
        assert other.print_micronats is not None
        assert other.print_micronats > CLEAR_MICRONATS

        await self.replace(engine, tiny_adapters.matchless)
        lost = await self.again(engine, tmp_path, found, probes_max)
        assert isinstance(lost, Missing)
        assert lost.code is Code.LIKE_BASE

        await engine.unload(VERSION)
        gone = await self.again(engine, tmp_path, found, probes_max)
        assert isinstance(gone, Missing)
        assert gone.code is Code.NOT_LISTED

    async def test_numbers_that_are_not_finite_are_no_effect(
        self, engine: Engine, tiny_adapters: Adapters, tmp_path: Path
    ) -> None:
        await engine.load(VERSION, str(tiny_adapters.nan))
        found = await self.first(engine, tmp_path)
        assert isinstance(found, Missing)
        assert found.code is Code.NOT_FINITE

    async def test_nothing_is_held_against_a_print_of_something_else(
        self, engine: Engine, tiny_adapters: Adapters, tmp_path: Path
    ) -> None:
        found = await self.proven(engine, tiny_adapters.good, tmp_path)
        with pytest.raises(PrintMismatch, match="version"):
            await prove_again(engine, BASE_NAME, "other@0123456789ab", found.effect_print, PROBES, 0, tmp_path)


@pytest.fixture(scope="module")
def twin(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[EngineProcess]:
    """A second fake with the same base."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        log = tmp_path_factory.mktemp("twin") / "engine.log"
        process = runner.run(EngineProcess.start(tiny_spec("fake", tiny_base), log=log))
        try:
            runner.run(process.wait_healthy(START_S))
            yield process
        finally:
            runner.run(process.stop())


class TestFake(ProofContract):
    """The fake."""

    @pytest.fixture
    def server(self, fake_server: EngineProcess) -> EngineProcess:
        return fake_server

    async def test_two_engines_with_the_same_adapter_answer_alike(
        self, engine: Engine, twin: EngineProcess, tiny_adapters: Adapters
    ) -> None:
        async with Engine(twin.url) as other:
            for side in (engine, other):
                await side.load(VERSION, str(tiny_adapters.good))
            alike = await read_pair(engine, VERSION, other, VERSION, PROBES.prompts)
            assert (alike.kl_micronats, alike.p99_micronats, alike.positions) == (0, 0, len(PROBES.prompts))
            apart = await read_pair(engine, BASE_NAME, other, VERSION, PROBES.prompts)
            assert apart.p99_micronats >= apart.kl_micronats > CLEAR_MICRONATS

    async def test_a_print_holds_on_another_engine(
        self, engine: Engine, twin: EngineProcess, tiny_adapters: Adapters, tmp_path: Path
    ) -> None:
        found = await self.proven(engine, tiny_adapters.other, tmp_path)
        async with Engine(twin.url) as other:
            name = "copy@0123456789ab"
            await other.load(name, str(tiny_adapters.other))
            with pytest.raises(PrintMismatch):
                await prove_again(other, BASE_NAME, name, found.effect_print, PROBES, 0, tmp_path)
            if VERSION in await other.models():
                await other.unload(VERSION)
            await other.load(VERSION, str(tiny_adapters.other))
            assert isinstance(await self.again(other, tmp_path, found), Proven)


@pytest.mark.vllm
class TestVllm(ProofContract):
    """Real vLLM."""

    @pytest.fixture
    def server(self, vllm_server: EngineProcess) -> EngineProcess:
        return vllm_server
