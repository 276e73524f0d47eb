"""A node's windows on the real bus: a yoco in its own process with real engines, and the sampler cornered."""

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import httpx
import pytest

from kite.bus import EVT, TEL, Bus, dec_subject, tel_subject
from kite.engine import Engine
from kite.events import Origin, compose, new_id
from kite.launch import command
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.engine import tiny_spec
from kite.testing.eventually import eventually
from kite.testing.orders import notify
from kite_schemas.arbitration import Transport
from kite_schemas.envelope import decode
from kite_schemas.telemetry import FragmentationSource, InstanceWindow, Source, Window
from kite_schemas.why import Reason, Why
from kite_schemas.yoco import InstanceChanged, InstanceReady, NodeRegistered, StartOrdered
from kite_yoco.devices import find_devices
from kite_yoco.instances import Instance, Instances
from kite_yoco.lifecycle import Event
from kite_yoco.telemetry.gpu import device_windows
from kite_yoco.telemetry.listener import Listener
from kite_yoco.telemetry.memory import Fragmentation, Memory
from kite_yoco.telemetry.outlet import IN_FLIGHT_MAX, Outlet
from kite_yoco.telemetry.sampler import Sampler

NODE = "n1"
ORIGIN = Origin("kite/yoco/n1", "yoco@test")
START_US = 240_000_000
ANSWER_S = 60.0
PROMPT = (11, 87, 203, 45)
CC = shutil.which("cc")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@dataclass(slots=True)
class Heard:
    """The windows of the bus, in the order of the stream."""

    windows: list[Window] = field(default_factory=list[Window])

    async def listen(self, bus: Bus) -> None:
        """Hear all windows, for ever."""
        async with aclosing(bus.pull(TEL, 0)) as pulled:
            async for messages in pulled:
                assert {message.subject for message in messages} == {tel_subject(NODE)}
                events = [decode(message.payload) for message in messages]
                self.windows += [event.data for event in events if isinstance(event.data, Window)]

    def of(self, instance: str) -> list[InstanceWindow]:
        """Return what was told of one instance."""
        return [one for window in self.windows for one in window.instances if one.id == instance]

    def last(self, instance: str = "a") -> InstanceWindow:
        """Return the newest that was told of an instance."""
        return ([InstanceWindow(id=instance), *self.of(instance)])[-1]

    def sum(self, name: str, instance: str = "a") -> int:
        """Return the sum of a counter over all windows."""
        return sum(getattr(one, name) or 0 for one in self.of(instance))

    async def still(self, count: int = 3) -> None:
        """Wait for a few more windows."""
        least = len(self.windows) + count
        await eventually(lambda: len(self.windows) >= least)


@dataclass(frozen=True, slots=True)
class Node:
    """A yoco that runs as a process, and what is heard of it."""

    bus: Bus
    heard: Heard
    process: asyncio.subprocess.Process
    registered: NodeRegistered
    log: Path

    async def start(self, base: Path, kind: Literal["fake", "vllm"] = "fake", instance: str = "a") -> InstanceReady:
        """Order a start and wait until it is ready."""
        order = StartOrdered(
            why=Why(reason=Reason.ASKED),
            node=NODE,
            target=f"instance/{instance}",
            instance=instance,
            expires_us=START_US,
            ttl_us=START_US,
            device="cpu0",
            standby=False,
            spec=tiny_spec(kind, base),
        )
        event = compose(order.target, order, Origin("kite/arbitrator/test", "arbitrator@0"))
        await self.bus.publish(dec_subject("yoco", NODE, "start_ordered", order.target), event.raw, event.header.id)
        async with asyncio.timeout(START_US / 1e6), aclosing(self.bus.follow(EVT, after_seq=0)) as followed:
            async for message in followed:
                fact = decode(message.payload).data
                if isinstance(fact, InstanceReady) and fact.instance == instance:
                    return fact
        raise AssertionError(instance)


@asynccontextmanager
async def hearing(bus: Bus) -> AsyncGenerator[Heard]:
    """Provision a bus and listen to its windows meanwhile."""
    await bus.provision(facts_bytes=FACTS_BYTES)
    heard = Heard()
    ear = asyncio.create_task(heard.listen(bus))
    try:
        yield heard
    finally:
        ear.cancel()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncGenerator[Node]:
    """A bus and a registered yoco; at the end it must have ended well."""
    log = tmp_path / "yoco.log"
    async with nats(tmp_path) as server, await Bus.connect(server.url, "desk") as bus, hearing(bus) as heard:
        env = {
            **os.environ,
            "KITE_NATS_URL": server.url,
            "KITE_NODE": NODE,
            "KITE_STATE_DIR": str(tmp_path / "yoco"),
            "KITE_ADAPTER_ROOT": str(tmp_path),
        }
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *command([sys.executable, "-m", "kite_yoco"]), env=env, stdout=out, stderr=out, start_new_session=True
            )
        try:
            await eventually(lambda: heard.windows, ANSWER_S)
            first = await bus.message(EVT, 1)
            assert first is not None
            registered = decode(first.payload).data
            assert isinstance(registered, NodeRegistered)
            yield Node(bus, heard, process, registered, log)
        finally:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(ANSWER_S):
                code = await process.wait()
    assert code == 0
    assert "watch_failed" not in log.read_text()


async def completion(client: httpx.AsyncClient, tokens: int) -> int:
    """Ask for some tokens and return how long it took, in ms."""
    answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": tokens})
    assert answer.status_code == 200
    return round(answer.elapsed.total_seconds() * 1_000)


async def traffic(node: Node, endpoint: str, tokens: int, requests: int = 3) -> None:
    """Run some requests side by side; what the windows tell of them must be what was asked."""
    heard = node.heard
    await heard.still()
    counted = {name: heard.sum(name) for name in ("arrivals", "finished", "latency_sum_us", "latency_squares_ms2")}

    async def new(name: str, expected: int) -> None:
        await eventually(lambda: heard.sum(name) - counted[name] >= expected)
        assert heard.sum(name) - counted[name] == expected

    async with httpx.AsyncClient(base_url=endpoint, timeout=ANSWER_S) as client:
        asked = [asyncio.create_task(completion(client, tokens)) for _ in range(requests)]
        await eventually(lambda: heard.last().running == requests)
        await new("arrivals", requests)
        took_ms = await asyncio.gather(*asked)
    await new("finished", requests)
    await eventually(lambda: heard.last().running == 0)
    sum_ms = (heard.sum("latency_sum_us") - counted["latency_sum_us"]) // 1_000
    assert sum(took_ms) * 0.5 < sum_ms <= sum(took_ms) + requests
    squares = heard.sum("latency_squares_ms2") - counted["latency_squares_ms2"]
    assert sum_ms**2 <= squares * requests, "the mean of the squares is never below the square of the mean"


async def test_an_idle_node_sends_windows_in_step(node: Node) -> None:
    await eventually(lambda: len(node.heard.windows) >= 15)
    windows = node.heard.windows
    assert [window.seq for window in windows] == list(range(1, len(windows) + 1))
    assert {window.boot for window in windows} == {node.registered.boot}
    assert {(window.node, window.instances) for window in windows} == {(NODE, ())}
    nothing = Fragmentation(0, FragmentationSource.ESTIMATE)
    empty = {device.id: nothing for device in node.registered.devices if device.kind == "cpu"}
    await eventually(lambda: windows[-1].devices == device_windows({}, empty))
    assert all(window.sampled_us <= window.emitted_us for window in windows)
    for before, after in pairwise(windows):
        assert abs(after.sampled_us - before.sampled_us - after.interval_us) < 50_000
    steady = sorted(window.interval_us for window in windows)[len(windows) // 2]
    assert 90_000 < steady < 110_000


async def test_a_fake_engine_under_traffic_is_counted_exactly(node: Node, tiny_base: Path) -> None:
    ready = await node.start(tiny_base)
    await eventually(lambda: node.heard.last().source is Source.STAT_LOGGER)
    await node.heard.still()
    queried = node.heard.sum("cache_queries")
    await traffic(node, ready.endpoint, tokens=150)
    assert node.heard.sum("cache_queries") - queried == 3 * len(PROMPT)

    def idle() -> bool:
        last = node.heard.last()
        return (last.waiting, last.arrivals, last.finished) == (0, 0, 0)

    await eventually(idle)
    last = node.heard.last()
    assert (last.kv_usage_ppm, last.preemptions) == (None, None), "a fake has none"
    assert last.age_us is not None
    assert last.age_us <= 250_000
    age_us = last.engine_step_age_us
    assert age_us is not None
    await eventually(lambda: (node.heard.last().engine_step_age_us or 0) > age_us + 300_000)
    os.kill(ready.pid, signal.SIGSTOP)
    await eventually(lambda: node.heard.last() == InstanceWindow(id="a"))
    os.kill(ready.pid, signal.SIGCONT)
    await eventually(lambda: node.heard.last().running == 0)
    os.kill(ready.pid, signal.SIGKILL)
    await eventually(lambda: not node.heard.windows[-1].instances)


async def test_a_decision_about_the_transport_is_for_one_start_of_yoco_only(node: Node) -> None:
    await notify(node.bus, Transport.RELIABLE, new_id())
    await eventually(lambda: "transport_ignored" in node.log.read_text())
    assert "event=transport_changed" not in node.log.read_text()
    await notify(node.bus, Transport.RELIABLE, node.registered.boot)
    await eventually(lambda: "transport=reliable" in node.log.read_text())
    await node.heard.still(10)
    windows = node.heard.windows
    assert [window.seq for window in windows] == list(range(1, len(windows) + 1))


@pytest.mark.vllm
@needs_vllm
async def test_a_real_vllm_under_traffic_is_counted_exactly(node: Node, tiny_base: Path) -> None:
    ready = await node.start(tiny_base, "vllm")
    await eventually(lambda: node.heard.last().source is Source.STAT_LOGGER)
    await node.heard.still()  # what the start itself asked of it is told by then
    queried = node.heard.sum("cache_queries")
    await traffic(node, ready.endpoint, tokens=400)
    assert node.heard.sum("cache_queries") - queried == 3 * len(PROMPT)
    assert max(one.kv_usage_ppm or 0 for one in node.heard.of("a")) > 0
    assert node.heard.last().kv_usage_ppm == 0
    assert node.heard.sum("preemptions") == 0
    counted = [one for one in node.heard.of("a") if one.source]
    assert {one.source for one in counted} == {Source.STAT_LOGGER}


async def no_report(fact: InstanceChanged) -> None:
    raise AssertionError(fact)


@asynccontextmanager
async def sampled(tmp_path: Path, bus: Bus, base: Path) -> AsyncGenerator[tuple[Instance, Sampler]]:
    """Run a sampler in this process, with one fake engine that was not told of its socket."""
    instances = Instances(NODE, no_report)
    instance = instances.get("a")
    with Listener() as listener:
        memory = Memory(find_devices(), instances)
        sampler = Sampler(NODE, new_id(), ORIGIN, instances=instances, listener=listener, memory=memory)
        running = asyncio.create_task(sampler.run(Outlet(bus, NODE)))
        try:
            await instance.spawn(tiny_spec("fake", base), tmp_path / "a.log", {})
            for event in (Event.START, Event.ANSWERED, Event.WARMED):
                instance.move(event)
            await instance.running.wait_healthy(ANSWER_S)
            yield instance, sampler
        finally:
            running.cancel()
            await asyncio.wait({running})
            await instance.end()
    assert running.cancelled()


async def test_an_engine_without_a_stat_logger_is_read_from_its_page(tmp_path: Path, tiny_base: Path) -> None:
    async with (
        nats(tmp_path) as server,
        await Bus.connect(server.url, "test") as bus,
        hearing(bus) as heard,
        sampled(tmp_path, bus, tiny_base) as (instance, sampler),
        Engine(instance.running.url) as engine,
    ):
        await eventually(lambda: heard.last().source is Source.METRICS)
        assert (heard.last().running, heard.last().arrivals) == (0, None)
        await engine.distributions("tiny", [PROMPT] * 4, top=1)
        await eventually(lambda: heard.sum("finished") == 4)
        assert heard.sum("latency_sum_us") > 0
        assert {one.latency_squares_ms2 for one in heard.of("a")} == {None}, "a page has none"
        assert sampler.board.strays == 0


async def test_a_bus_that_is_gone_drops_windows_at_once_and_counts_them(tmp_path: Path) -> None:
    async with await connected_to_a_bus_that_ends(tmp_path) as bus:
        outlet = Outlet(bus, NODE)
        for window in range(20):
            outlet.put(compose("node/n1", empty(window), ORIGIN))
        assert (outlet.sent, outlet.dropped) == (0, 20)
        await outlet.close()


async def test_a_bus_that_does_not_keep_up_drops_windows_and_counts_them(tmp_path: Path) -> None:
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as bus:  # no stream takes them
        outlet = Outlet(bus, NODE)
        for window in range(20):
            outlet.put(compose("node/n1", empty(window), ORIGIN))
        assert outlet.dropped == 20 - IN_FLIGHT_MAX, "they are dropped, and not waited for"
        await eventually(lambda: outlet.dropped == 20)
        await bus.provision(facts_bytes=FACTS_BYTES)
        outlet.put(compose("node/n1", empty(20), ORIGIN))
        await eventually(lambda: outlet.sent == 1)
        await outlet.close()


async def connected_to_a_bus_that_ends(tmp_path: Path) -> Bus:
    """Return a connection whose server has gone."""
    async with nats(tmp_path) as server:
        bus = await Bus.connect(server.url, "test")
    await eventually(lambda: not bus.is_connected)
    return bus


def empty(seq: int) -> Window:
    """Return a window without anything in it."""
    return Window(node=NODE, boot=new_id(), seq=seq, interval_us=100_000, sampled_us=1, emitted_us=1)


NVML = """
#include <string.h>
typedef struct { unsigned id; int ret; double value; const char *info[3]; } metric;
typedef struct { unsigned version, count; void *before, *after; metric metrics[1]; } query;
static int samples = 0;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(index + 1L); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
  strcpy(text, handle == (void *)1 ? "GPU-1" : "GPU-2"); return 0;
}
int nvmlGpmQueryDeviceSupport(void *handle, unsigned *support) {
  support[1] = handle == (void *)1 || SUPPORTED; return 0;
}
int nvmlGpmSampleAlloc(void **sample) { *sample = (void *)(long)++samples; return 0; }
int nvmlGpmSampleGet(void *handle, void *sample) { return 0; }
int nvmlGpmMetricsGet(query *q) {
  if (q->count != 1 || q->metrics[0].id != 10 || q->before == q->after) return 2;
  q->metrics[0].value = VALUE; q->metrics[0].ret = RETURN; return 0;
}
const char *nvmlErrorString(int code) { return "?"; }
"""
READ = """
import json
from kite_yoco.telemetry.gpu import Gpus
gpus = Gpus()
gpus.open()
print(json.dumps([dict(gpus.read()) for _ in range(3)]))
"""
ONE = {"GPU-1": 375_000}
BOTH = {**ONE, "GPU-2": 375_000}
NONE: dict[str, int] = {}


@pytest.mark.skipif(CC is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("supported", "value", "code", "expected"),
    [
        (1, "37.5", 0, [NONE, BOTH, BOTH]),
        (0, "37.5", 0, [NONE, ONE, ONE]),
        (0, "0.0 / 0.0", 0, [NONE, NONE, NONE]),
        (0, "37.5", 999, [NONE, NONE, NONE]),
    ],
)
def test_bandwidth_is_what_the_monitor_measured_between_two_samples_or_absent(
    tmp_path: Path, supported: int, value: str, code: int, expected: list[dict[str, int]]
) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    defined = [f"-DSUPPORTED={supported}", f"-DVALUE=({value})", f"-DRETURN={code}"]
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run([str(CC), "-shared", "-fPIC", *defined, "-o", library, tmp_path / "nvml.c"], check=True)
    assert read_gpus({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) == expected


def test_without_nvml_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert read_gpus({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) == [{}, {}, {}]


def read_gpus(env: dict[str, str]) -> object:
    """Return three readings of a process that sees a driver's library."""
    done = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
