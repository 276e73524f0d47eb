"""A yoco that is killed and comes back: its engines serve on, or are ended with a reason, and none is forgotten."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kite.engine import Engine
from kite.engine.identity import identity
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_schemas.yoco import Found, InstanceChanged, InstanceReady, NodeRegistered, SleepMode, State
from kite_yoco.records import Records
from kite_yoco.testing import (
    VERSION,
    VLLM_TTL_US,
    Yoco,
    asleep,
    drain_order,
    gone,
    ready,
    running,
    start_order,
    stop_order,
    wake_order,
)


@pytest.fixture
async def yoco(tmp_path: Path) -> AsyncGenerator[Yoco]:
    """A registered yoco without instances."""
    async with running(tmp_path) as started:
        yield started


@asynccontextmanager
async def asked(endpoint: str) -> AsyncGenerator[list[int]]:
    """Ask an engine for short answers, one after the other, while the block lasts; every one has to come."""
    answers: list[int] = []
    body = {"model": "tiny", "prompt": [1], "max_tokens": 40}

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=endpoint, timeout=30) as client:
            while True:
                answers.append((await client.post("/v1/completions", json=body)).status_code)

    asking = asyncio.create_task(ask())
    yield answers
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled(), asking.exception()
    assert set(answers) == {200}


async def loaded(yoco: Yoco, base: Path, endpoint: str) -> None:
    """Load a version into an engine, as upcycle would."""
    async with Engine(endpoint) as engine:
        await engine.load(VERSION, str(adapters.adapter(yoco.adapter_root / "risk", base)))


async def stopped_start(yoco: Yoco, base: Path, instance: str, device: str) -> psutil.Process:
    """Order a start whose engine is stopped as soon as it is there, so that it stays starting."""
    before = {one.pid for one in yoco.engines}
    await yoco.desk.order(start_order(base, instance, device=device))
    (engine,) = await eventually(lambda: [one for one in yoco.engines if one.pid not in before], 30)
    engine.suspend()
    return engine


def kinds(yoco: Yoco, count: int) -> list[type[object]]:
    """Return the types of the last facts before and including the newest registration."""
    at = max(n for n, event in enumerate(yoco.desk.heard) if isinstance(event.data, NodeRegistered))
    return [type(event.data) for event in yoco.desk.heard[at + 1 - count : at + 1]]


async def test_a_killed_yoco_comes_back_to_what_served_and_what_slept(yoco: Yoco, tiny_base: Path) -> None:
    serving = await ready(yoco, start_order(tiny_base, "a"))
    await loaded(yoco, tiny_base, serving.endpoint)
    sleeping = await ready(yoco, start_order(tiny_base, "b", device="cpu1"))
    await asleep(yoco, "b")
    half = await stopped_start(yoco, tiny_base, "c", "cpu2")
    async with asked(serving.endpoint) as answers:
        for _ in range(2):  # killed twice
            await yoco.end(signal.SIGKILL)
            at = len(answers)
            registered = await yoco.again()
            assert [found.instance for found in registered.instances] == ["a", "b"]
            assert registered.instances[0] == Found(
                instance="a",
                pid=serving.pid,
                state=State.READY,
                endpoint=serving.endpoint,
                versions=(VERSION,),
                base="tiny",
                device="cpu0",
                noise_micronats=serving.noise_micronats,
            )
            slept = registered.instances[1]
            assert (slept.pid, slept.state, slept.mode) == (sleeping.pid, State.ASLEEP, SleepMode.PAUSED)
            assert len(answers) > at, "it serves while no yoco is there"
    assert "starting>failed:engine_unfinished" in yoco.desk.steps("c")
    await gone([half])
    print([line for line in yoco.log_of().splitlines() if "engines_adopted" in line])

    woken = await yoco.desk.carry_out(wake_order(instance="b"))
    assert isinstance(woken, InstanceReady)
    assert woken.pid == sleeping.pid
    stopped = await yoco.desk.carry_out(stop_order("a"))
    assert isinstance(stopped, InstanceChanged)
    assert (stopped.from_state, stopped.to_state) == (State.READY, State.ABSENT)
    assert identity(serving.pid) is None
    left = yoco.children
    assert await yoco.end() == 0  # in order: what was adopted ends at once, as what was started
    await gone(left)
    assert yoco.desk.steps("b")[-1] == "ready>absent:shutdown"
    assert Records(yoco.state_dir).all() == []


async def test_what_was_half_done_is_ended_with_a_reason_before_the_node_registers(yoco: Yoco, tiny_base: Path) -> None:
    waking = await ready(yoco, start_order(tiny_base, "a"))
    draining = await ready(yoco, start_order(tiny_base, "b", device="cpu1"))
    await asleep(yoco, "a")
    os.kill(waking.pid, signal.SIGSTOP)
    await yoco.desk.order(wake_order(instance="a"))
    await eventually(lambda: "asleep>waking:ordered" in yoco.desk.steps("a"))
    await yoco.desk.carry_out(drain_order("b"))
    async with Engine(draining.endpoint) as engine:
        await engine.pause()  # as far as a sleep had come
        await yoco.end(signal.SIGKILL)
        registered = await yoco.again()
        assert not await engine.is_paused()
    assert kinds(yoco, 2) == [InstanceChanged, NodeRegistered]
    assert yoco.desk.steps("a")[-1] == "waking>failed:engine_unfinished"
    assert identity(waking.pid) is None
    (found,) = registered.instances
    assert (found.instance, found.state, found.pid) == ("b", State.READY, draining.pid)


async def test_engines_end_when_no_yoco_comes_back(tmp_path: Path, tiny_base: Path) -> None:
    async with running(tmp_path, KITE_KEEP_S="1") as yoco:
        pid = (await ready(yoco, start_order(tiny_base))).pid
        await stopped_start(yoco, tiny_base, "b", "cpu1")
        left = yoco.children
        await yoco.end(signal.SIGKILL)
        await gone(left)
        assert identity(pid) is None
        assert (await yoco.again()).instances == ()
        lost = {f.instance: f for f in yoco.desk.facts(InstanceChanged) if f.code == "engine_abandoned"}
        assert {name: fact.from_state for name, fact in lost.items()} == {"a": State.READY, "b": State.STARTING}
        assert lost["a"].message == "its keeper ended it: no yoco was there for 1 s"


async def test_what_died_meanwhile_is_told_and_a_stranger_with_its_id_is_left_alone(
    yoco: Yoco, tiny_base: Path
) -> None:
    pid = (await ready(yoco, start_order(tiny_base))).pid
    other = (await ready(yoco, start_order(tiny_base, "b", device="cpu1"))).pid
    engines = yoco.engines
    await yoco.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.kill(other, signal.SIGKILL)
    await gone(engines)
    stranger = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    records = Records(yoco.state_dir)
    (record,) = (one for one in records.all() if one.instance == "b")
    assert record.process is not None
    process = record.process.model_copy(update={"pid": stranger.pid})
    records.save(record.model_copy(update={"process": process}))
    try:
        assert (await yoco.again()).instances == ()
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()
    assert yoco.desk.steps("a")[-1] == "ready>failed:engine_died.signalled"
    assert yoco.desk.steps("b")[-1] == "ready>failed:engine_died.keeper_lost"


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_a_real_server_serves_on(tmp_path: Path, tiny_base: Path) -> None:
    async with running(tmp_path) as yoco:
        serving = await ready(yoco, start_order(tiny_base, kind="vllm", ttl_us=VLLM_TTL_US))
        await loaded(yoco, tiny_base, serving.endpoint)
        async with asked(serving.endpoint) as answers:
            await yoco.end(signal.SIGKILL)
            at = len(answers)
            (found,) = (await yoco.again()).instances
            assert (found.pid, found.state, found.versions) == (serving.pid, State.READY, (VERSION,))
            assert len(answers) > at
        print([line for line in yoco.log_of().splitlines() if "engines_adopted" in line])
        left = yoco.children
        assert await yoco.end() == 0
        await gone(left)
