"""A yoco in a process of its own, with real engines and a real bus: a desk gives it orders and hears what it says."""

import asyncio
import importlib.util
import os
import re
import signal
from collections.abc import AsyncGenerator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from kite.engine import Engine
from kite.testing import zoo
from kite.testing.engine import tiny_spec
from kite.testing.eventually import eventually
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import BlendLoaded
from kite_schemas.yoco import (
    ChannelSampled,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    State,
)
from kite_schemas.yoco import Path as ReadyPath
from kite_yoco.offers import find_offers, offered
from kite_yoco.testing import (
    ANSWER_S,
    NODE,
    STANDBY,
    VERSION,
    VLLM_TTL_US,
    Yoco,
    asleep,
    drain_order,
    gone,
    ready,
    recorded,
    running,
    sleep_order,
    spawn,
    start_order,
    stop_order,
    wake_order,
)


@pytest.fixture
async def yoco(tmp_path: Path) -> AsyncGenerator[Yoco]:
    """A registered yoco without instances."""
    async with running(tmp_path) as started:
        yield started


async def test_a_node_registers_with_what_it_can_run_on(yoco: Yoco) -> None:
    (registered,) = yoco.desk.facts(NodeRegistered)
    assert registered.node == NODE
    assert registered.instances == ()
    assert registered.sleep_modes == offered(registered.engines)
    assert registered.engines == find_offers(registered.devices)
    assert {device.id for device in registered.devices if device.kind == "cpu"} <= {
        f"cpu{core}" for core in os.sched_getaffinity(0)
    }


async def test_a_node_says_how_its_channel_does_when_that_has_changed(
    yoco: Yoco, tiny_base: Path, tmp_path: Path
) -> None:
    def last() -> ChannelSampled:
        return ([ChannelSampled(node=NODE, instances=0), *yoco.desk.facts(ChannelSampled)])[-1]

    (registered,) = yoco.desk.facts(NodeRegistered)
    idle = ChannelSampled(node=NODE, instances=0, fragmentation_ppm=0)
    await eventually(lambda: last() == idle)
    await ready(yoco, start_order(tiny_base))
    well = ChannelSampled(
        node=NODE, instances=1, healthy_ppm=1_000_000, prewarm_success_ppm=1_000_000, fragmentation_ppm=0
    )
    await eventually(lambda: last() == well)
    await yoco.desk.carry_out(start_order(tmp_path / "nowhere", "b"))
    half = ChannelSampled(node=NODE, instances=2, healthy_ppm=500_000, prewarm_success_ppm=500_000, fragmentation_ppm=0)
    await eventually(lambda: last() == half)
    await asleep(yoco)
    cache, weights = tiny_spec("fake", tiny_base).kv_cache_bytes, (tiny_base / "model.safetensors").stat().st_size
    (capacity,) = {device.memory_bytes for device in registered.devices}
    await eventually(lambda: last().fragmentation_ppm == cache * 1_000_000 // (capacity - weights))
    said = yoco.desk.facts(ChannelSampled)
    assert all(before != after for before, after in pairwise(said)), "nothing is said twice"


async def test_a_standby_starts_drains_sleeps_and_wakes_with_its_resident_proven(yoco: Yoco, tiny_base: Path) -> None:
    desk = yoco.desk
    cold = await ready(yoco, start_order(tiny_base))
    assert cold.path is ReadyPath.COLD
    assert cold.noise_micronats < 100
    assert 0 < cold.t_wake_us <= cold.t_first_token_us
    resident = await recorded(yoco, tiny_base, cold.endpoint)
    await asleep(yoco)
    assert desk.steps("a") == [*STANDBY, "draining>asleep:paused"]

    order_id = await desk.order(wake_order(resident))
    woken = await desk.done(order_id)
    assert isinstance(woken, InstanceReady)
    told = [type(fact) for fact in desk.outcomes(order_id)]
    assert told == [InstanceChanged, BlendLoaded, EffectProven, InstanceReady]
    assert (woken.path, woken.versions, woken.pid) == (ReadyPath.HOT, (VERSION,), cold.pid)
    assert 0 < woken.t_wake_us <= woken.t_first_token_us
    print(f"woken in {woken.t_wake_us} us, first token after {woken.t_first_token_us} us")

    await asleep(yoco)  # the resident stays loaded: the next wake only proves it
    order_id = await desk.order(wake_order(resident))
    again = await desk.done(order_id)
    assert isinstance(again, InstanceReady)
    assert [type(fact) for fact in desk.outcomes(order_id)] == [InstanceChanged, EffectProven, InstanceReady]
    print(f"woken again in {again.t_wake_us} us, first token after {again.t_first_token_us} us")


async def test_starting_twice_is_one_process_and_stopping_ends_it(yoco: Yoco, tiny_base: Path) -> None:
    first = await ready(yoco, start_order(tiny_base))
    second = await ready(yoco, start_order(tiny_base))
    assert (second.pid, second.endpoint) == (first.pid, first.endpoint)
    engines = yoco.children
    refused = await yoco.desk.carry_out(sleep_order())
    assert isinstance(refused, OrderRefused)
    assert (refused.code, refused.message) == ("wrong_state", "a is ready: paused is no step from there")
    stopped = await yoco.desk.carry_out(stop_order())
    assert isinstance(stopped, InstanceChanged)
    assert stopped.to_state is State.ABSENT
    await gone(engines)


async def test_draining_waits_for_the_requests_that_run(yoco: Yoco, tiny_base: Path) -> None:
    endpoint = (await ready(yoco, start_order(tiny_base))).endpoint
    body = {"model": "tiny", "prompt": [1], "max_tokens": 200}
    async with httpx.AsyncClient(base_url=endpoint, timeout=ANSWER_S) as client, Engine(endpoint) as engine:
        request = asyncio.create_task(client.post("/v1/completions", json=body))

        async def runs() -> bool:
            return (await engine.activity()).running == 1

        await eventually(runs)
        drained = await yoco.desk.carry_out(drain_order())
        assert isinstance(drained, InstanceChanged)
        assert drained.code == "drained"
        assert (await engine.activity()).running == 0
        assert (await request).status_code == 200


async def test_a_base_that_is_not_there_is_one_clear_failure(yoco: Yoco, tmp_path: Path) -> None:
    failed = await yoco.desk.carry_out(start_order(tmp_path / "nowhere"))
    assert isinstance(failed, OrderFailed)
    assert (failed.state, failed.stage, failed.code) == (State.FAILED, "spawn", "base_missing")
    assert str(tmp_path / "nowhere") in failed.message
    assert yoco.children == []


async def test_an_engine_that_dies_in_its_start_is_one_clear_failure_and_can_be_started_again(
    yoco: Yoco, tmp_path: Path, tiny_base: Path
) -> None:
    (tmp_path / "empty").mkdir()
    order_id = await yoco.desk.order(start_order(tmp_path / "empty"))
    failed = await yoco.desk.done(order_id)
    assert isinstance(failed, OrderFailed)
    assert (failed.state, failed.stage, failed.code) == (State.FAILED, "health", "engine_died")
    assert "base_unreadable" in failed.message
    assert yoco.children == []
    await ready(yoco, start_order(tiny_base))
    assert yoco.desk.steps("a") == ["absent>starting:ordered", "failed>starting:ordered", "starting>warming:healthy"]


@pytest.mark.parametrize("sleeping", [False, True])
async def test_an_engine_that_is_killed_is_reported(yoco: Yoco, tiny_base: Path, *, sleeping: bool) -> None:
    pid = (await ready(yoco, start_order(tiny_base))).pid
    if sleeping:
        await asleep(yoco)
    os.kill(pid, signal.SIGKILL)
    last = "asleep" if sleeping else "ready"
    await eventually(lambda: f"{last}>failed:engine_died.signalled" in yoco.desk.steps("a"))
    died = yoco.desk.facts(InstanceChanged)[-1]
    assert (died.order, died.message) == (None, "the engine ended with code -9 (signalled)")
    assert (await ready(yoco, start_order(tiny_base))).pid != pid


async def test_an_effect_that_is_gone_quarantines_the_instance(yoco: Yoco, tiny_base: Path) -> None:
    resident = await recorded(yoco, tiny_base, (await ready(yoco, start_order(tiny_base))).endpoint)
    zoo.defective(yoco.adapter_root / "risk", yoco.adapter_root / "hollow", "wrong_prefix")
    await asleep(yoco)
    failed = await yoco.desk.carry_out(wake_order(resident.model_copy(update={"path": "hollow"})))
    assert isinstance(failed, OrderFailed)
    assert (failed.state, failed.stage, failed.code) == (State.QUARANTINED, "prove", "effect_missing")
    (missing,) = yoco.desk.facts(EffectMissing)
    assert missing.version == VERSION


async def test_a_wake_that_fails_ends_in_sleep_and_the_next_one_succeeds(yoco: Yoco, tiny_base: Path) -> None:
    resident = await recorded(yoco, tiny_base, (await ready(yoco, start_order(tiny_base))).endpoint)
    await asleep(yoco)
    failed = await yoco.desk.carry_out(wake_order(resident.model_copy(update={"path": "nowhere"})))
    assert isinstance(failed, OrderFailed)
    assert (failed.state, failed.stage, failed.code) == (State.ASLEEP, "load", "engine_refused")
    assert "adapter_missing" in failed.message
    assert isinstance(await yoco.desk.carry_out(wake_order(resident)), InstanceReady)


async def test_an_order_that_is_late_leaves_no_half_started_engine(yoco: Yoco, tiny_base: Path) -> None:
    failed = await yoco.desk.carry_out(start_order(tiny_base, ttl_us=100_000))
    assert isinstance(failed, OrderFailed)
    assert failed.state is State.FAILED
    assert failed.code in {"engine_late", "timeout"}
    await gone(yoco.children)


async def test_sigterm_ends_every_engine_and_says_so(yoco: Yoco, tiny_base: Path) -> None:
    await ready(yoco, start_order(tiny_base, "a"))
    await ready(yoco, start_order(tiny_base, "b"))
    await asleep(yoco, "b")
    await yoco.desk.order(start_order(tiny_base, "c"))
    await eventually(lambda: yoco.desk.steps("c"))
    await eventually(lambda: len(yoco.engines) == 3)
    engines = yoco.children
    assert await yoco.end() == 0
    await gone(engines)
    for instance, last in (("a", "ready"), ("b", "asleep"), ("c", "starting")):
        await eventually(lambda i=instance, s=last: yoco.desk.steps(i)[-1] == f"{s}>absent:shutdown")


async def test_a_second_yoco_on_the_same_node_ends_unregistered(yoco: Yoco) -> None:
    second = await spawn(yoco.desk.bus.url, yoco.state_dir, yoco.adapter_root, "second.log")
    async with asyncio.timeout(ANSWER_S):
        assert await second.wait() == 1
    assert "state_held" in yoco.log_of("second.log")
    assert len(yoco.desk.facts(NodeRegistered)) == 1


async def test_a_state_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "yoco").mkdir()
    (tmp_path / "yoco" / "logs").write_text("a file where the folder should be")
    process = await spawn("nats://127.0.0.1:1", tmp_path / "yoco", tmp_path / "adapters")
    async with asyncio.timeout(ANSWER_S):
        assert await process.wait() == 1
    text = (tmp_path / "yoco" / "yoco.log").read_text()
    assert re.search(r"code=state_unwritable .*event=service_failed", text)
    assert "Traceback" not in text


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_a_real_server_starts_sleeps_and_wakes(yoco: Yoco, tiny_base: Path) -> None:
    cold = await ready(yoco, start_order(tiny_base, kind="vllm", ttl_us=VLLM_TTL_US))
    resident = await recorded(yoco, tiny_base, cold.endpoint)
    await asleep(yoco)
    woken = await yoco.desk.carry_out(wake_order(resident))
    assert isinstance(woken, InstanceReady), woken
    assert woken.versions == (VERSION,)
    print(f"noise {cold.noise_micronats}, woken in {woken.t_wake_us} us, first token {woken.t_first_token_us} us")
    engines = yoco.children
    assert await yoco.end() == 0
    await gone(engines)
