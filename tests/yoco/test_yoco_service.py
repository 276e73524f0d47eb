"""A yoco in a process of its own, with real engines and a real bus: a desk gives it orders and hears what it says."""

import asyncio
import importlib.util
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

import httpx
import psutil
import pytest

from kite import probes
from kite.bus import EVT, Bus, dec_subject
from kite.engine import Engine
from kite.events import Origin, compose, new_id
from kite.launch import command
from kite.proof import Proven, prove_first
from kite.testing import adapters, zoo
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.engine import tiny_spec
from kite.testing.eventually import eventually
from kite_schemas.envelope import Event, decode
from kite_schemas.model import Data
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import BlendLoaded, Resident
from kite_schemas.why import Order, Outcome, Reason, Why
from kite_schemas.yoco import (
    ChannelSampled,
    DrainOrdered,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    SleepMode,
    SleepOrdered,
    StartOrdered,
    State,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import Path as ReadyPath

NODE = "n1"
ARBITRATOR = Origin("kite/arbitrator/test", "arbitrator@0")
WHY = Why(reason=Reason.ASKED)
ANSWER_S = 60.0

Fact = TypeVar("Fact", bound=Data)


@dataclass(slots=True)
class Desk:
    """Gives orders over the bus, and keeps every fact in the order of the stream."""

    bus: Bus
    heard: list[Event] = field(default_factory=list[Event])

    async def listen(self) -> None:
        """Hear everything, for ever."""
        async for messages in self.bus.pull(EVT, 0):
            self.heard.extend(decode(message.payload) for message in messages)

    async def order(self, order: Order) -> str:
        """Publish an order as the relay does; return its id."""
        event = compose(order.target, order, ARBITRATOR)
        kind = order.TYPE.split(".")[2]
        await self.bus.publish(dec_subject("yoco", NODE, kind, order.target), event.raw, event.header.id)
        return event.header.id

    async def done(self, order_id: str, limit_s: float = ANSWER_S) -> Outcome:
        """Return the last outcome of an order."""
        return (await eventually(lambda: [f for f in self.outcomes(order_id) if f.done], limit_s))[0]

    async def carry_out(self, order: Order, limit_s: float = ANSWER_S) -> Outcome:
        """Give an order and return its last outcome."""
        return await self.done(await self.order(order), limit_s)

    def outcomes(self, order_id: str) -> list[Outcome]:
        """Return what was said about an order."""
        return [e.data for e in self.heard if isinstance(e.data, Outcome) and e.data.order == order_id]

    def facts(self, kind: type[Fact]) -> list[Fact]:
        """Return the facts of one type."""
        return [e.data for e in self.heard if isinstance(e.data, kind)]

    def steps(self, instance: str) -> list[str]:
        """Return the steps of an instance as `from>to:code`."""
        changes = (c for c in self.facts(InstanceChanged) if c.instance == instance)
        return [f"{c.from_state}>{c.to_state}:{c.code}" for c in changes]


@dataclass(frozen=True, slots=True)
class Yoco:
    """A running yoco: its desk, its process, its folders."""

    desk: Desk
    process: asyncio.subprocess.Process
    state_dir: Path
    adapter_root: Path

    @property
    def children(self) -> list[psutil.Process]:
        """The processes below it: the engines."""
        return psutil.Process(self.process.pid).children(recursive=True)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and return its exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(ANSWER_S):
            return await self.process.wait()

    def log_of(self, name: str = "yoco.log") -> str:
        """Return what it wrote."""
        return (self.state_dir / name).read_text()


async def spawn(url: str, state_dir: Path, adapter_root: Path, log: str = "yoco.log") -> asyncio.subprocess.Process:
    """Start a yoco; it dies with the tests."""
    env = {
        **os.environ,
        "KITE_NATS_URL": url,
        "KITE_NODE": NODE,
        "KITE_STATE_DIR": str(state_dir),
        "KITE_ADAPTER_ROOT": str(adapter_root),
    }
    for folder in (state_dir, adapter_root):
        folder.mkdir(exist_ok=True)  # a folder of a test
    with (state_dir / log).open("wb") as out:
        return await asyncio.create_subprocess_exec(
            *command([sys.executable, "-m", "kite_yoco"]), env=env, stdout=out, stderr=out, start_new_session=True
        )


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[Yoco]:
    """Run a bus and a registered yoco in a folder; at the end nothing of either is left."""
    async with nats(folder) as server, await Bus.connect(server.url, "desk") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        desk = Desk(bus)
        ear = asyncio.create_task(desk.listen())
        process = await spawn(server.url, folder / "yoco", folder / "adapters")
        yoco = Yoco(desk, process, folder / "yoco", folder / "adapters")
        try:
            await eventually(lambda: desk.facts(NodeRegistered) or process.returncode, ANSWER_S)
            yield yoco
        finally:
            left = yoco.children if process.returncode is None else []
            if process.returncode is None:
                await yoco.end()
            ear.cancel()
    await gone(left)


async def gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until none of the processes runs."""
    await eventually(lambda: not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])


@pytest.fixture
async def yoco(tmp_path: Path) -> AsyncGenerator[Yoco]:
    """A registered yoco without instances."""
    async with running(tmp_path) as started:
        yield started


TTL_US = 60_000_000
VLLM_TTL_US = 240_000_000
VERSION = "risk@0123456789ab"
STANDBY = ["absent>starting:ordered", "starting>warming:healthy", "ready>draining:ordered", "draining>draining:drained"]


def about(instance: str, ttl_us: int = TTL_US) -> dict[str, str | int]:
    """Return what every order says."""
    return {
        "node": NODE,
        "target": f"instance/{instance}",
        "instance": instance,
        "expires_us": ttl_us,
        "ttl_us": ttl_us,
    }


def start_order(
    base: Path, instance: str = "a", kind: Literal["fake", "vllm"] = "fake", ttl_us: int = TTL_US
) -> StartOrdered:
    """Return an order to start."""
    spec = tiny_spec(kind, base)
    return StartOrdered.model_validate(
        {**about(instance, ttl_us), "why": WHY, "device": "cpu0", "standby": True, "spec": spec}
    )


def drain_order(instance: str = "a") -> DrainOrdered:
    """Return an order to drain."""
    return DrainOrdered.model_validate({**about(instance), "why": WHY})


def sleep_order(instance: str = "a") -> SleepOrdered:
    """Return an order to sleep."""
    return SleepOrdered.model_validate({**about(instance), "why": WHY, "mode": SleepMode.PAUSED})


def wake_order(*residents: Resident, instance: str = "a") -> WakeOrdered:
    """Return an order to wake."""
    return WakeOrdered.model_validate(
        {
            **about(instance),
            "why": WHY,
            "request": new_id(),
            "path": ReadyPath.HOT,
            "deadline_us": 417_000,
            "residents": residents,
            "noise_micronats": 0,
        }
    )


def stop_order(instance: str = "a") -> StopOrdered:
    """Return an order to stop."""
    return StopOrdered.model_validate({**about(instance), "why": WHY})


async def ready(yoco: Yoco, order: StartOrdered) -> InstanceReady:
    """Start an instance."""
    outcome = await yoco.desk.carry_out(order, order.ttl_us / 1e6)
    assert isinstance(outcome, InstanceReady), outcome
    return outcome


async def asleep(yoco: Yoco, instance: str = "a") -> None:
    """Drain a ready instance and put it to sleep."""
    await yoco.desk.carry_out(drain_order(instance))
    outcome = await yoco.desk.carry_out(sleep_order(instance))
    assert isinstance(outcome, InstanceChanged)
    assert (outcome.from_state, outcome.to_state, outcome.code) == (State.DRAINING, State.ASLEEP, "paused")


async def recorded(yoco: Yoco, base: Path, endpoint: str) -> Resident:
    """Write an adapter, prove it on the running engine as upcycle would, take it out again, return the resident."""
    folder = adapters.adapter(yoco.adapter_root / "risk", base)
    async with Engine(endpoint) as engine:
        await engine.load(VERSION, str(folder))
        found = await prove_first(engine, "tiny", VERSION, probes.default(), 0, yoco.adapter_root)
        await engine.unload(VERSION)
    assert isinstance(found, Proven)
    return Resident(blend="risk", version=VERSION, path="risk", effect_print=found.effect_print)


async def test_a_node_registers_with_what_it_can_run_on(yoco: Yoco) -> None:
    (registered,) = yoco.desk.facts(NodeRegistered)
    assert registered.node == NODE
    assert registered.instances == ()
    assert registered.sleep_modes == (SleepMode.PAUSED,)
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
    refused = await yoco.desk.carry_out(wake_order())
    assert isinstance(refused, OrderRefused)
    assert (refused.code, refused.message) == ("wrong_state", "a is ready: wake is no step from there")
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
    await eventually(lambda: f"{last}>failed:engine_died" in yoco.desk.steps("a"))
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
    engines = await eventually(lambda: [*yoco.children] if len(yoco.children) == 3 else [])
    assert await yoco.end() == 0
    await gone(engines)
    for instance, last in (("a", "ready"), ("b", "asleep"), ("c", "starting")):
        await eventually(lambda i=instance, s=last: yoco.desk.steps(i)[-1] == f"{s}>absent:shutdown")


async def test_a_yoco_that_is_killed_takes_its_engines_with_it(yoco: Yoco, tiny_base: Path) -> None:
    await ready(yoco, start_order(tiny_base))
    engines = yoco.children
    assert engines
    await yoco.end(signal.SIGKILL)
    await gone(engines)


async def test_a_second_yoco_on_the_same_node_ends_unregistered(yoco: Yoco) -> None:
    second = await spawn(yoco.desk.bus.url, yoco.state_dir, yoco.adapter_root, "second.log")
    async with asyncio.timeout(ANSWER_S):
        assert await second.wait() == 1
    assert "journal_held" in yoco.log_of("second.log")
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
