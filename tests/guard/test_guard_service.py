"""The guard as it runs: a real bus, two engines, orders in and facts out."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kite import probes, proof
from kite.bus import Bus
from kite.engine import Engine, EngineProcess, free_port
from kite.events import new_id
from kite.testing import bases
from kite.testing.engine import BASE_NAME, Adapters
from kite.testing.eventually import eventually
from kite.testing.orders import ASKED, TTL_US, facts, give
from kite_guard.service import serve
from kite_guard.settings import Settings
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, Side

Running = Callable[[Path, Path], AbstractContextManager[EngineProcess]]
NODE = "n1"
VERSION = "credit@0123456789ab"
SHORT_TTL_US = 2_000_000
DULLER = 0.4
FACT_S = 30.0


@pytest.fixture(scope="module")
def dull_server(
    tiny_base: Path, running: Running, tmp_path_factory: pytest.TempPathFactory
) -> Generator[EngineProcess]:
    """A fake whose base is so unsure of its next token that 20 tokens cover too little."""
    from safetensors.torch import load

    out = tmp_path_factory.mktemp("dull") / "base"
    shutil.copytree(tiny_base, out)
    weights = load((out / "model.safetensors").read_bytes())
    weights["model.norm.weight"] *= DULLER
    bases.write_tensors(out / "model.safetensors", weights)
    with running(out, out.parent / "engine.log") as server:
        yield server


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


def comparison(
    first: str, second: str, model: str, ttl_us: int = TTL_US, *, probes: str | None = None
) -> ComparisonOrdered:
    return ComparisonOrdered(
        node=NODE,
        target="pair/a,b",
        expires_us=ttl_us,
        ttl_us=ttl_us,
        request=new_id(),
        sides=(Side(instance="a", endpoint=first), Side(instance="b", endpoint=second)),
        model=model,
        probes=probes,
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


@pytest.mark.usefixtures("guard")
async def test_an_instance_that_goes_while_it_is_read_is_no_agreement(
    bus: Bus, sides: tuple[Engine, Engine], going: EngineProcess
) -> None:
    telling = asyncio.create_task(outcome(bus, comparison(sides[0].url, going.url, BASE_NAME)))
    await eventually(lambda: asked(going), FACT_S)
    await going.stop(0)
    found = await telling
    assert isinstance(found, ComparisonFailed)
    assert found.code == "unreachable"


def asked(server: EngineProcess) -> bool:
    """Say whether this process is connected to a server."""
    port = int(server.url.rpartition(":")[2])
    return any(one.raddr and one.raddr.port == port for one in psutil.Process().net_connections("tcp4"))


@pytest.mark.usefixtures("guard")
async def test_the_probes_that_an_order_names_are_asked_and_no_others(
    bus: Bus, sides: tuple[Engine, Engine], tmp_path: Path
) -> None:
    own = probes.read("\n".join(probes.default().prompts[4:]).encode(), "set.txt")
    absent = await outcome(bus, comparison(sides[0].url, sides[1].url, BASE_NAME, probes=own.digest))
    assert isinstance(absent, ComparisonFailed)
    assert absent.code == "probes_missing"

    file = tmp_path / proof.keep_probes(tmp_path, own)
    found = await outcome(bus, comparison(sides[0].url, sides[1].url, BASE_NAME, probes=own.digest))
    assert isinstance(found, Compared)
    assert (found.positions, found.probes) == (13, own.digest)

    file.unlink()
    file.write_bytes(probes.content(probes.default().prompts))
    altered = await outcome(bus, comparison(sides[0].url, sides[1].url, BASE_NAME, probes=own.digest))
    assert isinstance(altered, ComparisonFailed)
    assert altered.code == "probes_altered"


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
