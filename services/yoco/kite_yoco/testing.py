"""A yoco in a process of its own, on a real bus, for tests: a desk gives it orders and hears what it says."""
# ruff: noqa: S101 - what a test stands on is asserted

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import psutil

from kite import probes
from kite.bus import EVT, Bus, dec_subject
from kite.engine import Engine
from kite.events import Origin, compose, new_id
from kite.launch import command
from kite.proof import Proven, prove_first
from kite.testing import adapters
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.engine import tiny_spec
from kite.testing.eventually import eventually
from kite_schemas.envelope import Event, decode
from kite_schemas.model import Data
from kite_schemas.upcycle import Resident
from kite_schemas.why import Order, Outcome, Reason, Why
from kite_schemas.yoco import (
    DrainOrdered,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    PrewarmOrdered,
    SleepMode,
    SleepOrdered,
    StartOrdered,
    State,
    StopOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import Path as ReadyPath
from kite_yoco.records import LOCK

NODE = "n1"
ARBITRATOR = Origin("kite/arbitrator/test", "arbitrator@0")
WHY = Why(reason=Reason.ASKED)
ANSWER_S = 60.0
NO_VARIABLES: Mapping[str, str] = {}

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


@dataclass(slots=True)
class Yoco:
    """A running yoco: its desk, its process, its folders, and the variables that it was given."""

    desk: Desk
    process: asyncio.subprocess.Process
    state_dir: Path
    adapter_root: Path
    variables: Mapping[str, str]

    @property
    def keepers(self) -> list[psutil.Process]:
        """The keepers of its engines, whoever started them."""
        return [one for one in psutil.process_iter() if keeps(one, self.state_dir)]

    @property
    def engines(self) -> list[psutil.Process]:
        """Its engines, whoever started them."""
        return [one for keeper in self.keepers for one in keeper.children()]

    @property
    def children(self) -> list[psutil.Process]:
        """Its engines and their keepers."""
        return [one for keeper in self.keepers for one in (keeper, *keeper.children(recursive=True))]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and return its exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(ANSWER_S):
            return await self.process.wait()

    async def again(self) -> NodeRegistered:
        """Start one more on the same folders, and return what it says of itself."""
        before = len(self.desk.facts(NodeRegistered))
        self.process = await spawn(self.desk.bus.url, self.state_dir, self.adapter_root, variables=self.variables)
        return (await eventually(lambda: self.desk.facts(NodeRegistered)[before:], ANSWER_S))[0]

    def log_of(self, name: str = "yoco.log") -> str:
        """Return what it wrote."""
        return (self.state_dir / name).read_text()


def keeps(process: psutil.Process, state_dir: Path) -> bool:
    """Say whether a process is a keeper that looks at the lock in a folder."""
    try:
        return str(state_dir / LOCK) in process.cmdline()
    except psutil.Error:
        return False


async def spawn(
    url: str, state_dir: Path, adapter_root: Path, log: str = "yoco.log", variables: Mapping[str, str] = NO_VARIABLES
) -> asyncio.subprocess.Process:
    """Start a yoco; it dies with the tests."""
    env = {
        **os.environ,
        "KITE_NATS_URL": url,
        "KITE_NODE": NODE,
        "KITE_STATE_DIR": str(state_dir),
        "KITE_ADAPTER_ROOT": str(adapter_root),
        **variables,
    }
    for folder in (state_dir, adapter_root):
        folder.mkdir(exist_ok=True)  # a folder of a test
    with (state_dir / log).open("ab") as out:
        return await asyncio.create_subprocess_exec(
            *command([sys.executable, "-m", "kite_yoco"]), env=env, stdout=out, stderr=out, start_new_session=True
        )


@asynccontextmanager
async def running(folder: Path, **variables: str) -> AsyncGenerator[Yoco]:
    """Run a bus and a registered yoco in a folder; at the end nothing of either is left."""
    async with nats(folder) as server, await Bus.connect(server.url, "desk") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        desk = Desk(bus)
        ear = asyncio.create_task(desk.listen())
        process = await spawn(server.url, folder / "yoco", folder / "adapters", variables=variables)
        yoco = Yoco(desk, process, folder / "yoco", folder / "adapters", variables)
        try:
            await eventually(lambda: desk.facts(NodeRegistered) or process.returncode, ANSWER_S)
            yield yoco
        finally:
            left = yoco.children
            if yoco.process.returncode is None:
                await yoco.end()
            for keeper in yoco.keepers:  # of a yoco that was killed and did not come again
                keeper.terminate()
            ear.cancel()
    await gone(left)


async def gone(processes: Sequence[psutil.Process]) -> None:
    """Wait until none of the processes runs."""
    await eventually(lambda: not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])


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
    base: Path,
    instance: str = "a",
    kind: Literal["fake", "vllm"] = "fake",
    ttl_us: int = TTL_US,
    *,
    device: str = "cpu0",
    residents: tuple[Resident, ...] | None = None,
) -> StartOrdered:
    """Return an order to start."""
    spec = tiny_spec(kind, base)
    said = {"why": WHY, "device": device, "standby": True, "spec": spec, "residents": residents}
    return StartOrdered.model_validate({**about(instance, ttl_us), **said})


def prewarm_order(
    base: Path, instance: str = "a", kind: Literal["fake", "vllm"] = "fake", ttl_us: int = TTL_US, *, cores: str = ""
) -> PrewarmOrdered:
    """Return an order to prewarm."""
    said = {"why": WHY, "device": "cpu0", "spec": tiny_spec(kind, base), "cores": cores}
    return PrewarmOrdered.model_validate({**about(instance, ttl_us), **said})


def drain_order(instance: str = "a") -> DrainOrdered:
    """Return an order to drain."""
    return DrainOrdered.model_validate({**about(instance), "why": WHY})


def sleep_order(instance: str = "a", mode: SleepMode = SleepMode.PAUSED) -> SleepOrdered:
    """Return an order to sleep."""
    return SleepOrdered.model_validate({**about(instance), "why": WHY, "mode": mode})


def wake_order(*residents: Resident, instance: str = "a", path: ReadyPath = ReadyPath.HOT) -> WakeOrdered:
    """Return an order to wake."""
    return WakeOrdered.model_validate(
        {
            **about(instance),
            "why": WHY,
            "request": new_id(),
            "path": path,
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
