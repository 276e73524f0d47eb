"""Two instances of the tiny base for all tests of the guard, and a bus of its own for each test."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kite import probes
from kite.bus import Bus
from kite.engine import Engine, EngineProcess
from kite.testing.bus import bus as running_bus
from kite.testing.engine import START_S, tiny_spec
from kite.testing.llama import Llama

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[Llama], "list[Tensor]"]
Running = Callable[[Path, Path], AbstractContextManager[EngineProcess]]


@contextmanager
def fake(base: Path, log: Path) -> Generator[EngineProcess]:
    """Run a fake with an event loop of its own, so that it outlives the tests' loops."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        process = runner.run(EngineProcess.start(tiny_spec("fake", base), log=log))
        try:
            runner.run(process.wait_healthy(START_S))
            yield process
        finally:
            runner.run(process.stop())


@pytest.fixture(scope="session")
def running() -> Running:
    """Run a fake: `with running(base, log) as process:`."""
    return fake


@pytest.fixture(scope="session")
def engines(
    tiny_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[EngineProcess, EngineProcess]]:
    """Two instances of the tiny base."""
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        first, second = (stack.enter_context(fake(tiny_base, logs / f"{name}.log")) for name in "ab")
        yield first, second


@pytest_asyncio.fixture
async def sides(engines: tuple[EngineProcess, EngineProcess]) -> AsyncGenerator[tuple[Engine, Engine]]:
    """Clients of both instances, which are empty again afterwards."""
    async with Engine(engines[0].url) as first, Engine(engines[1].url) as second:
        yield first, second
        for engine in (first, second):
            await engine.resume()
            for name in (await engine.models())[1:]:
                await engine.unload(name)


@pytest_asyncio.fixture
async def bus(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with running_bus(tmp_path) as client:
        yield client


@pytest_asyncio.fixture
async def going(tiny_base: Path, tmp_path: Path) -> AsyncGenerator[EngineProcess]:
    """A third instance, paused: it holds what it is asked, and a test may end it meanwhile."""
    process = await EngineProcess.start(tiny_spec("fake", tiny_base), log=tmp_path / "going.log")
    try:
        await process.wait_healthy(START_S)
        async with Engine(process.url) as engine:
            await engine.pause()
        yield process
    finally:
        await process.stop()


@pytest.fixture(scope="session")
def read(tiny_base: Path) -> Read:
    """Return what a model in torch gives after each shipped probe: log-probabilities [vocab], float64."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_base / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in probes.default().prompts]
    return lambda model: [model.forward(ids, last_only=True)[-1].double().log_softmax(-1) for ids in prompts]
