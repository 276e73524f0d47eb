"""A gap in the bus: what it stops is said, somebody looks at it, and decisions may destroy again. A real arbitrator."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kite.bus import EmbeddedServer
from kite.events import Origin, compose
from kite.ledger import Draft, Ledger, LedgerMissing, NotALedger, Reader
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite_arbitrator.service import serve
from kite_arbitrator.settings import Settings
from kite_cli import place
from kite_cli.place import FleetFile
from kite_cli.testing import Ended, command
from kite_schemas.arbitration import GapAcknowledged, ModeChanged
from kite_schemas.ledger import BusGap
from kite_schemas.model import Data
from kite_schemas.policy import PolicySet

ORIGIN = Origin(source="kite/test/1", producer="test@0")
Record = dict[str, Any]  # JSON


class Fleet:
    """A bus, and a ledger in a folder that `kite` finds; an arbitrator runs inside `leading`."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.folder = folder
        self.ledger_url = f"sqlite:///{folder / 'ledger.db'}"
        self._settings = Settings(nats_url=server.url, nats_monitor_url=server.monitor_url, ledger_url=self.ledger_url)
        file = FleetFile(node="n", nats_url=server.url, ledger_url=self.ledger_url, adapter_root=str(folder), pid=1)
        place.write(folder, file)

    @asynccontextmanager
    async def leading(self, kind: type[Data]) -> AsyncGenerator[None]:
        """Run an arbitrator; the block begins once the ledger has a row of a type."""
        task = asyncio.create_task(serve(self._settings))
        try:
            await eventually(lambda: task.done() or self.count(kind) > 0)
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def count(self, kind: type[Data]) -> int:
        """Return how many rows of a type there are; none while the ledger is being made."""
        try:
            with Reader.open(self.ledger_url) as reader:
                return sum(1 for _ in reader.find(types=[kind.TYPE]))
        except (LedgerMissing, NotALedger):
            return 0

    def lose(self, first: int, last: int) -> None:
        """Write down that messages were lost, as an arbitrator does whose bus no longer has them."""
        event = compose("ledger/fleet", BusGap(stream="KITE_EVT", first=first, last=last), ORIGIN)
        with Ledger.open(self.ledger_url) as ledger:
            now_us = ledger.head.ledger_us + 1
            draft = Draft(
                event_id=event.header.id,
                type=event.header.type,
                subject=event.header.subject,
                occurred_us=now_us,
                ledger_us=now_us,
                raw=event.raw,
            )
            ledger.append([draft])

    async def kite(self, *arguments: str) -> Ended:
        process = await asyncio.create_subprocess_exec(
            *command(*arguments, "--dir", str(self.folder)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncGenerator[Fleet]:
    async with nats(tmp_path) as server:
        yield Fleet(server, tmp_path)


def one(ended: Ended) -> Record:
    (line,) = ended.out.splitlines()
    return json.loads(line)


async def test_a_gap_stops_what_destroys_until_somebody_has_looked(fleet: Fleet):
    async with fleet.leading(PolicySet):
        pass
    fleet.lose(5, 7)
    async with fleet.leading(ModeChanged):
        status = await fleet.kite("status")
        assert status.out.startswith("degraded: the bus may have lost messages")
        assert "`kite gap acknowledge --reason …`" in status.out
        listed = one(await fleet.kite("ledger", "gaps", "--json"))
        assert (listed["first"], listed["last"], listed["acknowledged_pos"]) == (5, 7, None)
        tried = await fleet.kite("gap", "acknowledge", "--reason", "x", "--dry-run")
        assert (tried.code, tried.out) == (
            0,
            f"the gap at position {listed['pos']} would be acknowledged: KITE_EVT 5 to 7\n",
        )
        assert fleet.count(GapAcknowledged) == 0
        ended = await fleet.kite("gap", "acknowledge", "--reason", "the disk was full", "--json")
        found = one(ended)
        assert (ended.code, found["ok"], found["mode"]) == (0, True, "static")
        assert "mode static: gap_acknowledged" in ended.err
        again = await fleet.kite("gap", "acknowledge", "--reason", "x")
        assert (again.code, again.out) == (0, "")
        assert again.err == "no gap is open: there is nothing to acknowledge\n"
        assert fleet.count(GapAcknowledged) == 1
        assert one(await fleet.kite("ledger", "gaps", "--json"))["reason"] == "the disk was full"
        assert not (await fleet.kite("status")).out.startswith("degraded")
        told = (await fleet.kite("timeline")).out
        assert "acknowledge the gap in the bus" in told
        assert "3 messages of KITE_EVT lost" in told


async def test_a_gap_is_not_acknowledged_without_a_reason(fleet: Fleet):
    ended = await fleet.kite("gap", "acknowledge")
    assert ended.code == 2
    assert "--reason" in ended.err
