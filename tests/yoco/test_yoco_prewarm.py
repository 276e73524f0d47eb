"""Prewarmed: a process that waits for its weights where nothing serves, until a start lets it on."""

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import pytest

from kite.engine.manners import NICENESS, cores, held_niceness
from kite.testing.eventually import eventually
from kite_schemas.yoco import (
    EngineOffer,
    InstanceChanged,
    InstanceReady,
    Lack,
    OrderFailed,
    OrderRefused,
    SleepMode,
    State,
)
from kite_schemas.yoco import Path as ReadyPath
from kite_yoco.spawn import EngineTooOld, check_version
from kite_yoco.testing import VLLM_TTL_US, Yoco, gone, prewarm_order, ready, running, start_order, stop_order

HELD = ["absent>starting:ordered", "starting>prewarmed:held"]
LET_ON = ["prewarmed>starting:let_on", "starting>warming:healthy"]
REPLACED = ["prewarmed>failed:replaced", "failed>starting:ordered", "starting>warming:healthy"]


@pytest.fixture
async def yoco(tmp_path: Path) -> AsyncGenerator[Yoco]:
    """A registered yoco without instances."""
    async with running(tmp_path) as started:
        yield started


async def held(yoco: Yoco, base: Path) -> psutil.Process:
    """Prewarm an instance and return its process."""
    outcome = await yoco.desk.carry_out(prewarm_order(base))
    assert isinstance(outcome, InstanceChanged), outcome
    assert (outcome.to_state, outcome.code) == (State.PREWARMED, "held")
    (engine,) = yoco.engines
    return engine


def manners(engine: psutil.Process) -> tuple[set[int], set[frozenset[int]]]:
    """Return the niceness and the cores of all threads of an engine."""
    threads = [thread.id for one in (engine, *engine.children(recursive=True)) for thread in one.threads()]
    return (
        {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads},
        {frozenset(os.sched_getaffinity(thread)) for thread in threads},
    )


async def test_a_spare_waits_where_nothing_serves_and_a_start_lets_it_on(yoco: Yoco, tiny_base: Path) -> None:
    last = max(os.sched_getaffinity(0))
    outcome = await yoco.desk.carry_out(prewarm_order(tiny_base, cores=str(last)))
    assert isinstance(outcome, InstanceChanged), outcome
    (engine,) = yoco.engines
    assert not engine.net_connections("tcp"), "it serves nobody yet"
    assert manners(engine) == ({held_niceness()}, {frozenset({last})})

    found = await ready(yoco, start_order(tiny_base))
    assert (found.pid, found.path) == (engine.pid, ReadyPath.COLD)
    assert yoco.desk.steps("a") == HELD + LET_ON
    assert manners(engine) == ({NICENESS}, {cores(start_order(tiny_base).spec.cpus)})


async def test_one_that_waits_already_is_reported_as_it_is(yoco: Yoco, tiny_base: Path) -> None:
    engine = await held(yoco, tiny_base)
    assert await held(yoco, tiny_base) == engine
    assert yoco.desk.steps("a") == [*HELD, "prewarmed>prewarmed:held"]


async def test_a_start_of_another_engine_replaces_the_one_that_waits(yoco: Yoco, tiny_base: Path) -> None:
    engine = await held(yoco, tiny_base)
    other = start_order(tiny_base)
    other = other.model_copy(update={"spec": other.spec.model_copy(update={"max_loras": 5})})
    assert (await ready(yoco, other)).pid != engine.pid
    assert not engine.is_running()
    assert yoco.desk.steps("a") == HELD + REPLACED


async def test_one_that_serves_is_not_prewarmed(yoco: Yoco, tiny_base: Path) -> None:
    await ready(yoco, start_order(tiny_base))
    refused = await yoco.desk.carry_out(prewarm_order(tiny_base))
    assert isinstance(refused, OrderRefused), refused
    assert refused.code == "wrong_state"


async def test_a_stop_ends_one_that_waits_and_leaves_nothing(yoco: Yoco, tiny_base: Path) -> None:
    await held(yoco, tiny_base)
    left = yoco.children
    await yoco.desk.carry_out(stop_order())
    await gone(left)
    assert yoco.desk.steps("a") == [*HELD, "prewarmed>absent:ordered"]


async def test_a_killed_yoco_finds_what_waits_and_a_start_lets_it_on(yoco: Yoco, tiny_base: Path) -> None:
    engine = await held(yoco, tiny_base)
    await yoco.end(signal.SIGKILL)
    (found,) = (await yoco.again()).instances
    assert (found.pid, found.state, found.versions) == (engine.pid, State.PREWARMED, ())
    assert (await ready(yoco, start_order(tiny_base))).pid == engine.pid


async def test_a_spare_that_dies_is_told_with_its_reason_and_started_anew(yoco: Yoco, tiny_base: Path) -> None:
    engine = await held(yoco, tiny_base)
    engine.kill()
    await eventually(lambda: yoco.desk.steps("a")[-1] == "prewarmed>failed:engine_died.signalled", 20)
    assert (await ready(yoco, start_order(tiny_base))).pid != engine.pid


async def test_a_spare_that_is_stopped_is_replaced(yoco: Yoco, tiny_base: Path) -> None:
    engine = await held(yoco, tiny_base)
    engine.suspend()
    assert (await ready(yoco, start_order(tiny_base))).pid != engine.pid
    assert yoco.desk.steps("a") == HELD + REPLACED


async def test_cores_that_are_not_there_fail_the_order_and_leave_nothing(yoco: Yoco, tiny_base: Path) -> None:
    failed = await yoco.desk.carry_out(prewarm_order(tiny_base, cores="4095"))
    assert isinstance(failed, OrderFailed), failed
    assert (failed.state, failed.stage, failed.code) == (State.FAILED, "spawn", "engine_unplaced")
    assert "cores 4095" in failed.message
    await eventually(lambda: not yoco.children)


def test_a_version_with_known_holes_is_not_started() -> None:
    old = EngineOffer(kind="vllm", version="0.17.2", modes=(), lacks=(Lack(mode=SleepMode.PAUSED, reason="holes"),))
    with pytest.raises(EngineTooOld, match=r"vllm 0\.17\.2 is not started: holes") as caught:
        check_version([old], "vllm")
    assert (caught.value.kind, caught.value.version) == ("vllm", "0.17.2")
    check_version([old], "fake")
    check_version([old.model_copy(update={"modes": (SleepMode.PAUSED,)})], "vllm")


@pytest.mark.vllm
async def test_a_real_server_waits_for_its_weights_and_is_there_sooner(yoco: Yoco, tiny_base: Path) -> None:
    outcome = await yoco.desk.carry_out(prewarm_order(tiny_base, kind="vllm", ttl_us=VLLM_TTL_US), 240)
    assert isinstance(outcome, InstanceChanged), yoco.log_of("../yoco/a.log")
    assert (outcome.to_state, outcome.code) == (State.PREWARMED, "held")
    (engine,) = yoco.engines
    assert manners(engine)[0] == {held_niceness()}

    found = await ready(yoco, start_order(tiny_base, kind="vllm", ttl_us=VLLM_TTL_US))
    print(f"held after {outcome.duration_us} us, first token {found.t_first_token_us} us after it was let on")
    assert found.pid == engine.pid
    assert found.t_first_token_us < outcome.duration_us, "the long part came before"
    assert manners(engine)[0] == {NICENESS}
    assert isinstance(found, InstanceReady)
