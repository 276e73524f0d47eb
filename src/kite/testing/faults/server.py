"""The bus of a fault run: its server comes back on its port, whatever was done to its store meanwhile."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Never

from kite.bus import EmbeddedServer
from kite.testing.faults.fuses import BUS, Yard
from kite.testing.faults.plan import Store

STORE = "store"


class Nats:
    """One server at a time; `keep` starts it again as often as it dies. `fate` tells what becomes of its store then.

    While one is `up` its addresses are known; that for clients stays the same.
    """

    def __init__(self, yard: Yard, fate: Callable[[], list[Store]]) -> None:
        self.up = asyncio.Event()
        self.server = EmbeddedServer(yard.folder / "nats")
        self.lost: Path | None = None
        self._yard = yard
        self._fate = fate

    async def start(self) -> None:
        """Start it."""
        await self.server.start()
        self._yard.note(BUS, self.server.pid)
        self.up.set()

    async def keep(self) -> Never:
        """Start it again whenever it has died, for ever."""
        while True:
            await self.server.wait()
            self.up.clear()
            self._yard.note(BUS, None)
            for store in self._fate():
                self._treat(store)
            self.server = EmbeddedServer(self.server.directory, port=self.server.port)
            await self.start()

    async def stop(self) -> None:
        """Stop it for good."""
        self._yard.note(BUS, None)
        await self.server.stop()

    def _treat(self, store: Store) -> None:
        """Do to the store what is to be done; one that is replaced is kept where the judge can look at it."""
        here, copy = self.server.directory / STORE, self._yard.folder / "copy"
        if store is Store.COPIED:
            shutil.copytree(here, copy)
        if store in {Store.DELETED, Store.OLDER}:
            self.lost = self._yard.folder / "lost"
            self.lost.mkdir()
            here.rename(self.lost / STORE)
        if store is Store.OLDER:
            copy.rename(here)
