"""The arbitrator on real parts: a NATS server, a ledger, and what can be done to both."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kite.bus import Bus, EmbeddedServer
from kite.bus.link import Link
from kite.ledger import LedgerMissing, LedgerUnreachable, NotALedger, Reader
from kite.runtime import run
from kite.testing import crash
from kite.testing.eventually import eventually
from kite.trust import Signer
from kite_arbitrator.service import serve
from kite_arbitrator.settings import Settings
from kite_schemas.envelope import decode
from kite_schemas.ledger import LeaseTaken
from kite_schemas.model import Data

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

AnyData = TypeVar("AnyData", bound=Data)


@dataclass
class Place:
    """Where one test's arbitrators live. `url` names the ledger; `more` are settings beside the addresses."""

    server: EmbeddedServer
    url: str
    more: dict[str, object] = field(default_factory=dict[str, object])

    @classmethod
    def beside(cls, server: EmbeddedServer, folder: Path) -> "Place":
        """Return a place whose ledger is a SQLite file in `folder`."""
        return cls(server, f"sqlite:///{folder / 'ledger.db'}")

    @property
    def settings(self) -> Settings:
        """What the arbitrator is told."""
        return Settings.model_validate(
            {
                "nats_url": self.server.url,
                "nats_monitor_url": self.server.monitor_url,
                "ledger_url": self.url,
                **self.more,
            }
        )

    def found(self, kind: type[AnyData]) -> list[AnyData]:
        """Return the payloads of one type in the ledger; none while it is being made, or away."""
        try:
            with Reader.open(self.url) as reader:
                datas = [decode(row.raw).data for row in reader.find(types=[kind.TYPE])]
        except (LedgerMissing, NotALedger, LedgerUnreachable):
            return []
        return [data for data in datas if isinstance(data, kind)]

    async def administer(self, request: str, body: dict[str, object]) -> None:
        """Do to a stream what KITE never does."""
        link = Link(self.server.url)
        await link.open("administrator", 5.0)
        await link.api(request, body)
        await link.close()


@asynccontextmanager
async def arbitrator(place: Place, *, signer: Signer | None = None) -> AsyncGenerator[Bus]:
    """Run an arbitrator until the block ends; yields a connection to its bus, signing by `signer`, once it leads."""
    terms = len(place.found(LeaseTaken))
    async with served(place) as task:
        await eventually(lambda: task.done() or len(place.found(LeaseTaken)) > terms)
        if task.done():
            await task
        async with await Bus.connect(place.server.url, "test", signer=signer) as bus:
            yield bus


@asynccontextmanager
async def served(place: Place) -> AsyncGenerator[asyncio.Task[None]]:
    """Run an arbitrator as a task, leading or not, and end it with the block."""
    task = asyncio.create_task(serve(place.settings))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def forked(place: Place, log: Path) -> AsyncGenerator["BaseProcess"]:
    """Run an arbitrator as a process that may be stopped and killed; it ends with the block. Its log is in `log`."""
    async with crash.process(log, None, _process, place.settings.model_dump()) as child:
        yield child


def _process(settings: dict[str, object]) -> None:
    told = Settings.model_validate(settings)
    sys.exit(run("arbitrator", told.log_level, serve(told)))
