"""When an engine that lives is given up: pure verdicts, and looks at a fake that misbehaves."""

from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from kite.engine import Engine, EngineProcess
from kite.testing.engine import tiny_spec
from kite_yoco.health import HUNG_S, LOOKS, Bounds, Pulse, Sight, failed, felt, is_stopped, look

S = 1_000_000


def feel(*seen: Sight, every_us: int = 5 * S) -> tuple[Pulse, int]:
    """Return the pulse after so many looks, and the time of the last."""
    pulse, now_us = Pulse(), 0
    for one in seen:
        now_us += every_us
        pulse = felt(pulse, one, now_us)
    return pulse, now_us


@pytest.mark.parametrize("sight", [Sight.STOPPED, Sight.RUBBISH])
def test_a_process_is_given_up_after_so_many_looks_in_a_row(sight: Sight) -> None:
    looks = LOOKS[sight]
    assert not failed(*feel(*[sight] * (looks - 1)), Bounds())
    assert failed(*feel(*[sight] * looks), Bounds())
    assert not failed(*feel(*[sight] * (looks - 1), Sight.WELL, sight), Bounds())


def test_silence_takes_looks_and_time() -> None:
    assert not failed(*feel(*[Sight.HUNG] * 6), Bounds())  # 25 s since the first
    assert failed(*feel(*[Sight.HUNG] * 7), Bounds())
    assert not failed(*feel(*[Sight.HUNG] * 3, every_us=60 * S), Bounds())
    assert not failed(*feel(*[Sight.HUNG] * 6, Sight.WELL, Sight.HUNG), Bounds())


def test_well_is_never_given_up() -> None:
    assert not failed(*feel(*[Sight.WELL] * 100), Bounds())


@pytest.mark.parametrize("hung_s", [0.5, 2.0, HUNG_S, 600.0])
def test_enough_looks_fit_into_the_time(hung_s: float) -> None:
    assert Bounds(hung_s).every_us * LOOKS[Sight.HUNG] < hung_s * S


def test_one_stopped_process_of_a_group_is_enough() -> None:
    assert is_stopped("SST")
    assert not is_stopped("SSRDIZt")
    assert not is_stopped("")


@pytest.fixture
async def engine(tiny_base: Path, tmp_path: Path) -> AsyncGenerator[Engine]:
    """A fake of our own: what it does wrong must not reach others."""
    process = await EngineProcess.start(tiny_spec("fake", tiny_base), log=tmp_path / "engine.log")
    await process.wait_healthy(60)
    async with Engine(process.url) as found:
        yield found
    await process.stop()


async def trouble(engine: Engine, how: str) -> None:
    """Have a fake do wrong."""
    async with httpx.AsyncClient(base_url=engine.url) as client:
        (await client.post("/trouble", params={"how": how})).raise_for_status()


async def test_a_look_tells_what_is_wrong(engine: Engine) -> None:
    assert await look(engine) == (Sight.WELL, "")
    await engine.pause()
    assert (await look(engine))[0] is Sight.WELL, "a paused engine is healthy"
    await trouble(engine, "rubbish")
    assert await look(engine) == (Sight.RUBBISH, "the answer of /v1/models is no JSON")
    await trouble(engine, "none")
    await trouble(engine, "hang")
    assert await look(engine, 0.3) == (Sight.HUNG, "no answer within 0.3 s")
    await trouble(engine, "none")
    assert (await look(engine))[0] is Sight.WELL


async def test_nobody_there_is_silence() -> None:
    async with Engine("http://127.0.0.1:9") as nobody:
        seen, words = await look(nobody)
    assert seen is Sight.HUNG
    assert "127.0.0.1:9" in words
