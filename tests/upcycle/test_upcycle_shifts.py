"""Shifts on a fake engine process: measured one at a time, and never in the way of an order."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest
import pytest_asyncio

from kite.engine import Engine, EngineProcess
from kite.testing.engine import Adapters
from kite.testing.eventually import eventually
from kite_upcycle.engines import Engines
from kite_upcycle.shifts import KEPT_MAX, Move, Shifts, VersionGone, measure

OLD, NEW, SAME = "risk@aaaaaaaaaaaa", "risk@bbbbbbbbbbbb", "risk@cccccccccccc"
PROMPTS = ("a probe", "and another one")
SOON_S = 30.0


@pytest_asyncio.fixture
async def engine(fake_server: EngineProcess, tiny_adapters: Adapters) -> AsyncGenerator[Engine]:
    """An engine with three versions, of which the first and the last are equal."""
    async with Engine(fake_server.url) as engine:
        for name, path in ((OLD, tiny_adapters.good), (NEW, tiny_adapters.other), (SAME, tiny_adapters.good)):
            await engine.load(name, str(path))
        yield engine
        await engine.resume()
        for name in (await engine.models())[1:]:
            await engine.unload(name)


class Bench:
    """Shifts at work, and the engines that they share with orders."""

    def __init__(self, engines: Engines, *, limit_s: float = SOON_S) -> None:
        self.engines = engines
        self.shifts = Shifts(engines, PROMPTS, wait_s=0, limit_s=limit_s)
        self.task = asyncio.create_task(self.shifts.run())

    async def known(self, *versions: str) -> list[int]:
        """Wait for the shifts of exactly these versions and return them."""
        await eventually(lambda: [shift.version for shift in self.shifts.known] == list(versions), SOON_S)
        return [shift.kl_micronats for shift in self.shifts.known]

    async def end(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@pytest_asyncio.fixture
async def bench() -> AsyncGenerator[Bench]:
    async with Engines() as engines:
        bench = Bench(engines)
        yield bench
        await bench.end()


async def test_a_shift_is_the_divergence_of_a_version_from_the_one_before(engine: Engine) -> None:
    moved = await measure(engine, Move(engine.url, OLD, NEW), PROMPTS)
    assert (moved.version, moved.former) == (NEW, OLD)
    assert moved.kl_micronats > 1_000
    assert (await measure(engine, Move(engine.url, OLD, SAME), PROMPTS)).kl_micronats == 0


async def test_the_last_three_are_known_and_each_is_measured_once(
    bench: Bench, engine: Engine, tiny_adapters: Adapters
) -> None:
    for version in (NEW, SAME, NEW):
        bench.shifts.ask(Move(engine.url, OLD, version))
    first, second = await bench.known(NEW, SAME)
    assert first > 0 == second
    await engine.load("risk@dddddddddddd", str(tiny_adapters.other))
    bench.shifts.ask(Move(engine.url, NEW, OLD))
    bench.shifts.ask(Move(engine.url, OLD, "risk@dddddddddddd"))
    await bench.known(SAME, OLD, "risk@dddddddddddd")
    assert len(bench.shifts.known) == KEPT_MAX


async def test_without_one_of_the_versions_there_is_no_shift(bench: Bench, engine: Engine) -> None:
    with pytest.raises(VersionGone, match="risk@000000000000"):
        await measure(engine, Move(engine.url, "risk@000000000000", NEW), PROMPTS)
    bench.shifts.ask(Move(engine.url, "risk@000000000000", NEW))
    bench.shifts.ask(Move("http://127.0.0.1:9", OLD, "risk@111111111111"))  # nobody listens there
    bench.shifts.ask(Move(engine.url, OLD, SAME))
    await bench.known(SAME)


async def test_a_shift_that_takes_too_long_is_given_up(engine: Engine) -> None:
    async with Engines() as engines:
        bench = Bench(engines, limit_s=0.2)
        await engine.pause()  # it holds the reads
        bench.shifts.ask(Move(engine.url, OLD, NEW))
        await eventually(lambda: engines.busy(engine.url))
        await eventually(lambda: not engines.busy(engine.url))
        await engine.resume()
        assert bench.shifts.known == ()
        await bench.end()


async def test_a_shift_makes_way_for_an_order_on_its_engine(bench: Bench, engine: Engine) -> None:
    await engine.pause()
    bench.shifts.ask(Move(engine.url, OLD, NEW))
    await eventually(lambda: bench.engines.busy(engine.url))
    bench.shifts.make_way("http://127.0.0.1:9")  # another engine's
    async with bench.engines.lend(engine.url) as lent:
        bench.shifts.make_way(engine.url)
        bench.shifts.make_way(engine.url)
        await engine.resume()
        bench.shifts.ask(Move(engine.url, OLD, SAME))
        assert len(await lent.models()) == 4
        assert bench.shifts.known == ()  # the first was given up, the second waits for this order
    assert await bench.known(SAME) == [0]


async def test_shifts_end_in_the_middle_of_one(bench: Bench, engine: Engine) -> None:
    await engine.pause()
    bench.shifts.ask(Move(engine.url, OLD, NEW))
    await eventually(lambda: bench.engines.busy(engine.url))
    await bench.end()
    assert not bench.engines.busy(engine.url)
    assert bench.shifts.known == ()
