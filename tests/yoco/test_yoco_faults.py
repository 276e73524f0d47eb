"""Engines that live and do not serve, in a real yoco: each is told with its reason, and ended for good."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kite.engine.identity import identity
from kite.launch import command
from kite.testing.eventually import eventually
from kite_schemas.yoco import InstanceChanged, InstanceReady, State
from kite_yoco.testing import Yoco, asleep, ready, running, start_order

HUNG_S = 2.0
SEEN_S = 20.0  # on a busy machine
ROOM_BYTES = 256 * 1024**2
HOGS = 4


@pytest.fixture
async def yoco(tmp_path: Path) -> AsyncGenerator[Yoco]:
    """A registered yoco without instances, that waits for engines no longer than a moment."""
    async with running(tmp_path, KITE_HUNG_S=str(HUNG_S)) as started:
        yield started


async def trouble(served: InstanceReady, how: str) -> None:
    """Have a fake do wrong."""
    async with httpx.AsyncClient(base_url=served.endpoint) as client:
        (await client.post("/trouble", params={"how": how})).raise_for_status()


async def told(yoco: Yoco, instance: str) -> InstanceChanged:
    """Return how an instance failed, once it has."""

    def failures() -> list[InstanceChanged]:
        facts = yoco.desk.facts(InstanceChanged)
        return [fact for fact in facts if fact.instance == instance and fact.to_state is State.FAILED]

    return (await eventually(failures, SEEN_S))[-1]


async def ended(pid: int) -> None:
    """Wait until a process is no more."""
    await eventually(lambda: identity(pid) is None, SEEN_S)


async def test_each_way_not_to_serve_has_its_reason(yoco: Yoco, tiny_base: Path) -> None:
    names = ("stopped", "slept", "hung", "rubbish", "eaten", "exited", "orphan")
    starts = (ready(yoco, start_order(tiny_base, name, device=f"cpu{n}")) for n, name in enumerate(names))
    served = dict(zip(names, await asyncio.gather(*starts), strict=True))
    await asleep(yoco, "slept")
    os.kill(served["stopped"].pid, signal.SIGSTOP)
    os.kill(served["slept"].pid, signal.SIGSTOP)
    await trouble(served["hung"], "hang")
    await trouble(served["rubbish"], "rubbish")
    limit_bytes = room_bytes(served["eaten"].pid)
    resource.prlimit(served["eaten"].pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    await trouble(served["eaten"], "eat")
    os.kill(served["exited"].pid, signal.SIGKILL)
    os.kill(psutil.Process(served["orphan"].pid).ppid(), signal.SIGKILL)
    facts = {name: await told(yoco, name) for name in names}
    print(*(f"{name}: {fact.message}" for name, fact in facts.items()), sep="\n")
    assert {name: fact.code for name, fact in facts.items()} == {
        "stopped": "engine_stopped",
        "slept": "engine_stopped",
        "hung": "engine_hung",
        "rubbish": "engine_rubbish",
        "eaten": "engine_died.out_of_memory",
        "exited": "engine_died.signalled",
        "orphan": "engine_died.keeper_lost",
    }
    for one in served.values():
        await ended(one.pid)
    again = await ready(yoco, start_order(tiny_base, "stopped"))
    assert again.pid != served["stopped"].pid


def room_bytes(pid: int) -> int:
    """Return what a process may map at most so that little is left."""
    return psutil.Process(pid).memory_info().vms + ROOM_BYTES


@asynccontextmanager
async def hogs() -> AsyncGenerator[None]:
    """Use all cores, more than once, for as long as the block lasts."""
    spin = command([sys.executable, "-c", "while True: pass"])
    busy = [await asyncio.create_subprocess_exec(*spin) for _ in range(HOGS)]
    yield
    for process in busy:
        process.kill()
        await process.wait()


async def test_a_slow_machine_is_no_hang(tmp_path: Path, tiny_base: Path) -> None:
    async with running(tmp_path, KITE_HUNG_S="4") as yoco:
        await asyncio.gather(
            ready(yoco, start_order(tiny_base, "a")), ready(yoco, start_order(tiny_base, "b", device="cpu1"))
        )
        await asleep(yoco, "b")
        async with hogs():
            await asyncio.sleep(6.0)  # longer than the bound: nothing may come of it
        assert not [fact for fact in yoco.desk.facts(InstanceChanged) if fact.to_state is State.FAILED]
        assert len(yoco.engines) == 2


async def test_starts_on_one_device_come_one_after_the_other(yoco: Yoco, tiny_base: Path) -> None:
    await yoco.desk.order(start_order(tiny_base, "a", ttl_us=4_000_000))
    (first,) = await eventually(lambda: yoco.engines)
    first.suspend()
    second = asyncio.create_task(ready(yoco, start_order(tiny_base, "b")))
    await yoco.desk.order(start_order(tiny_base, "c", device="cpu1"))
    await eventually(lambda: yoco.desk.steps("c"))
    assert yoco.desk.steps("b") == [], "it waits for what starts on its device, and not for another"
    await second
    assert identity(first.pid) is None, "what was late is gone before the next begins"
