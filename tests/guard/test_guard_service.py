"""The guard as it runs: a real bus, two engines, orders in and facts out."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from kite import probes
from kite.bus import Bus
from kite.engine import Engine, EngineProcess, free_port
from kite.events import new_id
from kite.testing import bases
from kite.testing.bus import bus as running_bus
from kite.testing.engine import BASE_NAME, START_S, Adapters, tiny_spec
from kite.testing.eventually import eventually
from kite.testing.orders import ASKED, TTL_US, facts, give
from kite_guard.service import serve
from kite_guard.settings import Settings
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, Side

NODE = "n1"
VERSION = "credit@0123456789ab"
SHORT_TTL_US = 2_000_000
DULLER = 0.4
FACT_S = 30.0


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


@pytest.fixture(scope="module")
def dull_server(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[EngineProcess]:
    """A fake whose base is so unsure of its next token that 20 tokens cover too little."""
    from safetensors.torch import load

    out = tmp_path_factory.mktemp("dull") / "base"
    shutil.copytree(tiny_base, out)
    weights = load((out / "model.safetensors").read_bytes())
    weights["model.norm.weight"] *= DULLER
    bases.write_tensors(out / "model.safetensors", weights)
    with fake(out, out.parent / "engine.log") as server:
        yield server


@pytest.fixture(scope="module")
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
async def guard(bus: Bus, tmp_path: Path) -> AsyncGenerator[None]:
    """A guard in this process."""
    task = asyncio.create_task(serve(settings(bus, tmp_path)))
    yield
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


def settings(bus: Bus, tmp_path: Path) -> Settings:
    return Settings(nats_url=bus.url, node=NODE, state_dir=tmp_path, adapter_root=tmp_path)


def comparison(first: str, second: str, model: str, ttl_us: int = TTL_US) -> ComparisonOrdered:
    return ComparisonOrdered(
        node=NODE,
        target="pair/a,b",
        expires_us=ttl_us,
        ttl_us=ttl_us,
        request=new_id(),
        sides=(Side(instance="a", endpoint=first), Side(instance="b", endpoint=second)),
        model=model,
        why=ASKED,
    )


async def outcome(bus: Bus, order: ComparisonOrdered) -> Compared | ComparisonFailed:
    """Give an order and return what came of it."""
    event = await give(bus, "guard", order, "instance/a")
    (said,) = await eventually(lambda: about(bus, event.header.id), FACT_S)
    assert said.order == event.header.id
    assert said.request == order.request
    assert said.done
    return said


async def about(bus: Bus, order: str) -> list[Compared | ComparisonFailed]:
    events = [said.event for said in await facts(bus)]
    assert {event.header.subject for event in events} <= {"instance/a"}
    found = [event.data for event in events if event.header.causationid == order]
    return [data for data in found if isinstance(data, Compared | ComparisonFailed)]


@pytest.mark.usefixtures("guard")
async def test_two_instances_are_compared_on_order(
    bus: Bus, sides: tuple[Engine, Engine], tiny_adapters: Adapters
) -> None:
    first, second = sides
    for engine in sides:
        await engine.load(VERSION, str(tiny_adapters.good))
    alike = await outcome(bus, comparison(first.url, second.url, VERSION))
    assert isinstance(alike, Compared)
    assert (alike.first, alike.second, alike.model) == ("a", "b", VERSION)
    assert (alike.kl_micronats, alike.p99_micronats) == (0, 0)
    assert alike.positions == len(probes.default().prompts)
    assert alike.covered_ppm > 800_000

    await second.unload(VERSION)
    await second.load(VERSION, str(tiny_adapters.matchless))
    apart = await outcome(bus, comparison(first.url, second.url, VERSION))
    assert isinstance(apart, Compared)
    assert apart.p99_micronats >= apart.kl_micronats > 320_000


@pytest.mark.usefixtures("guard")
async def test_what_cannot_be_measured_is_no_agreement(
    bus: Bus, sides: tuple[Engine, Engine], tiny_adapters: Adapters, dull_server: EngineProcess
) -> None:
    first, second = sides
    nobody = f"http://127.0.0.1:{free_port()}"

    async def code(left: str, right: str, model: str, ttl_us: int = TTL_US) -> str:
        found = await outcome(bus, comparison(left, right, model, ttl_us))
        assert isinstance(found, ComparisonFailed)
        return found.code

    assert await code(first.url, nobody, BASE_NAME) == "unreachable"
    assert await code(first.url, second.url, VERSION) == "model_unknown"
    assert await code(dull_server.url, dull_server.url, BASE_NAME) == "too_little_covered"

    await second.load(VERSION, str(tiny_adapters.nan))
    await first.load(VERSION, str(tiny_adapters.good))
    assert await code(first.url, second.url, VERSION) == "not_finite"

    await second.pause()
    assert await code(first.url, second.url, BASE_NAME, SHORT_TTL_US) == "timeout"


async def test_the_process_works_and_ends_when_told(bus: Bus, sides: tuple[Engine, Engine], tmp_path: Path) -> None:
    env = {
        **os.environ,
        "KITE_NATS_URL": bus.url,
        "KITE_NODE": NODE,
        "KITE_STATE_DIR": str(tmp_path),
        "KITE_ADAPTER_ROOT": str(tmp_path),
    }
    with (tmp_path / "guard.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kite_guard", env=env, stderr=log)
    found = await outcome(bus, comparison(sides[0].url, sides[1].url, BASE_NAME))
    assert isinstance(found, Compared)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), FACT_S) == 0
    text = (tmp_path / "guard.log").read_text()
    assert not any(prompt in text for prompt in probes.default().prompts if len(prompt) > 7)
