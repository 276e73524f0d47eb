"""A yoco in a process of its own, on a real bus, and a desk that gives it orders and hears what it says."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from kite.bus import EVT, Bus, dec_subject
from kite.events import Origin, compose
from kite.launch import command
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.eventually import eventually
from kite_schemas.envelope import Event, decode
from kite_schemas.model import Data
from kite_schemas.why import Order, Outcome, Reason, Why
from kite_schemas.yoco import InstanceChanged, NodeRegistered

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
        return await eventually(lambda: next((f for f in self.outcomes(order_id) if f.done), None), limit_s)

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
    state_dir.mkdir(exist_ok=True)
    adapter_root.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "KITE_NATS_URL": url,
        "KITE_NODE": NODE,
        "KITE_STATE_DIR": str(state_dir),
        "KITE_ADAPTER_ROOT": str(adapter_root),
    }
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
