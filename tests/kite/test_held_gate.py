"""The gate of a held engine: who asks learns that it waits, and only the right word lets it on."""

import os
import threading
from collections.abc import Generator
from concurrent.futures import Future

import pytest

from kite.engine import EngineUnreachable
from kite.engine.gate import gate_name, let_on, visited, waits
from kite.engine.manners import cores, held_niceness, place, threads
from kite.held.gate import GATE, wait
from kite.testing.eventually import eventually

NAME = f"kite-test-gate-{os.getpid()}"


@pytest.fixture
def waiting() -> Generator[Future[bool]]:
    """Somebody who waits at the gate, in a thread."""
    passed: Future[bool] = Future()
    thread = threading.Thread(target=lambda: passed.set_result(wait({GATE: NAME})), daemon=True)
    thread.start()
    yield passed
    thread.join(10)
    assert not thread.is_alive()


def test_without_a_gate_nobody_waits() -> None:
    assert not wait({})
    assert gate_name(8000) == "kite-gate-8000"


async def test_who_asks_learns_who_waits_and_lets_nobody_on(waiting: Future[bool]) -> None:
    assert await eventually(lambda: waits(NAME)) == os.getpid()
    assert await waits(NAME) == os.getpid()
    assert not waiting.done()
    told: list[int] = []
    await let_on(NAME, told.append)
    assert waiting.result(10)
    assert told == [os.getpid()]


async def test_another_word_lets_nobody_on(waiting: Future[bool]) -> None:
    await eventually(lambda: waits(NAME))
    async with visited(NAME) as (reader, writer):
        writer.write(b"??\n")
        assert await reader.read() == b"", "it has hung up"
    assert not waiting.done()
    with pytest.raises(OSError, match="in use"):
        wait({GATE: NAME})
    await let_on(NAME, print)
    assert waiting.result(10)


async def test_where_nobody_waits_nobody_is_let_on() -> None:
    assert await waits(NAME) is None
    with pytest.raises(EngineUnreachable, match=f"nobody waits at {NAME}"):
        await let_on(NAME, print)


def test_what_has_ended_is_moved_nowhere() -> None:
    assert list(threads([0])) == []
    place([0], cores("0"), held_niceness())
