"""The worker of a fault run: a real `kite.orders.Worker` for the life of a node's instances.

Its effects are lines of a file, which outlives it, as a process on a node would. A handler looks before it acts.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kite.bus import Bus, consume
from kite.events import Origin
from kite.orders import Emit, Received, Task, Tasks, Worker
from kite.runtime import run
from kite.testing.crash import ORDERS
from kite.testing.faults.fuses import Yard, wire
from kite.testing.faults.plan import Fault, Role
from kite.testing.load.answers import answer
from kite_schemas.why import Outcome
from kite_schemas.yoco import DrainOrdered, InstanceOrder, OrderFailed, SleepOrdered, StartOrdered, State, WakeOrdered

NODE = "n1"
ORIGIN = Origin(source=f"kite/yoco/{NODE}", producer="yoco@test")
KINDS: tuple[type[InstanceOrder], ...] = (StartOrdered, DrainOrdered, SleepOrdered, WakeOrdered)
ACK_WAIT_S = 0.5
ACK_S = 1.0
"""How long an acknowledgement waits for its answer: a bus that has another store gives none."""

TOOK_US = 1_000
BEGAN, MADE = "began", "made"


@dataclass(frozen=True, slots=True)
class Deed:
    """One line of the world: an order was begun, or had its effect, in one of its attempts."""

    what: str
    order: str
    attempt: int


def deeds(world: Path) -> list[Deed]:
    """Return what was done, in order."""
    lines = world.read_text().splitlines() if world.exists() else []
    return [Deed(what, order, int(attempt)) for what, order, attempt in map(str.split, lines)]


def be(url: str, yard: Yard, faults: Sequence[Fault]) -> None:
    """Be the yoco of the node as a process, until it is told to end, or dies of a fault."""
    consume.ACK_S = ACK_S
    wire(Role.WORKER, faults, ORDERS, yard)
    sys.exit(run("yoco", "info", _work(url, yard)))


async def _work(url: str, yard: Yard) -> None:
    async with await Bus.connect(url, f"yoco-{NODE}") as bus:
        await Worker(
            bus=bus,
            origin=ORIGIN,
            service="yoco",
            node=NODE,
            journal=yard.journal,
            handlers=_tasks(yard.world),
            ack_wait_s=ACK_WAIT_S,
        ).run()


def _tasks(world: Path) -> Tasks:
    async def carry_out(received: Received[InstanceOrder], emit: Emit) -> Outcome:
        _do(world, BEGAN, received)
        said = [one.data for one in answer(received.data, received.id, TOOK_US, well=True)]
        steps = [data for data in said if isinstance(data, Outcome)]
        for step in steps[:-1]:
            await emit(step)
        if not any(deed.what == MADE and deed.order == received.id for deed in deeds(world)):
            _do(world, MADE, received)
        return steps[-1]

    return {kind: Task(carry_out, _failed) for kind in KINDS}


def _do(world: Path, what: str, received: Received[InstanceOrder]) -> None:
    """Add a line; one write, so that it is there as a whole or not at all."""
    handle = os.open(world, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{what} {received.id} {received.attempt}\n".encode())
    os.close(handle)


def _failed(received: Received[InstanceOrder], at: str, code: str, message: str) -> Outcome:
    return OrderFailed(instance=received.data.instance, state=State.FAILED, stage=at, code=code, message=message)
