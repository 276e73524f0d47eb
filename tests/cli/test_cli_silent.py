"""A bus without an arbitrator: a request is told that nobody answers, and can be given up."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio

from kite.bus import EVT, Bus, EmbeddedServer
from kite.ledger import Ledger
from kite.testing.eventually import eventually
from kite_cli import place
from kite_cli.asking.following import ANSWER_S
from kite_cli.place import FleetFile
from kite_cli.testing import command


@pytest_asyncio.fixture
async def bus(tmp_path: Path) -> AsyncGenerator[Bus]:
    """A provisioned bus and an empty ledger, as `tmp_path` names them."""
    ledger_url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger.open(ledger_url).close()
    async with EmbeddedServer(tmp_path / "nats") as server, await Bus.connect(server.url, "test") as bus:
        await bus.provision()
        file = FleetFile(node="n", nats_url=server.url, ledger_url=ledger_url, adapter_root=str(tmp_path), pid=1)
        place.write(tmp_path, file)
        yield bus


async def begin(bus: Bus, directory: Path) -> asyncio.subprocess.Process:
    """Start a request, and return once it is on the bus."""
    process = await asyncio.create_subprocess_exec(
        *command("yoco", "order", "tiny", "--dir", str(directory)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def asked() -> bool:
        return (await bus.stream(EVT)).last_seq > 0

    await eventually(asked)
    return process


async def test_a_request_that_nobody_answers(bus: Bus, tmp_path: Path):
    process = await begin(bus, tmp_path)
    out, err = await process.communicate()
    assert (process.returncode, out) == (4, b"")
    assert b"error: no arbitrator answers request" in err
    assert f"within {ANSWER_S:g} s".encode() in err


async def test_a_request_can_be_given_up(bus: Bus, tmp_path: Path):
    process = await begin(bus, tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")
