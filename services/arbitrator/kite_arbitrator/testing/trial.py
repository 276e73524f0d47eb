"""One fault run over the whole path: bus, arbitrator, ledger, outbox, worker, and the bus again, as real processes."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from kite.bus import EVT, Bus, BusUnreachable, EmbeddedServer, StreamMissing
from kite.clock import US_PER_S, mono_us
from kite.ledger import Reader
from kite.orders import Journal
from kite.testing.crash import KILLED, process
from kite.testing.eventually import eventually
from kite.testing.faults import History, Plan, Role, Store, Stored, Victim, yoco
from kite.testing.faults.client import Client
from kite.testing.faults.fuses import DATABASE, Yard
from kite.testing.faults.history import entry, found, stored
from kite.testing.faults.server import Nats
from kite.testing.orders import left
from kite.testing.postgres import Postgres
from kite_arbitrator.testing import crashing, story
from kite_arbitrator.testing.watch import Watch

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

POLL_S = 0.01
REST_S = 30.0
"""A run that has not come to rest by then never will."""

END_S = 10.0
"""How long a process that is told to end may take."""

EXPLAINED = {
    "ledger_unreachable": {Victim.DATABASE, Victim.SESSION},
    "bus_unreachable": {Victim.BUS},
}
"""The errors with which a process may end, and the faults that explain each."""

SETTINGS: Mapping[str, JsonValue] = {
    "arbitration.switch_window_us": None,  # answers come at once here: each would be jitter
    "arbitration.sync_timeout_us": None,  # nobody sends windows, and nobody is to be called lost
    "arbitration.idle_tick_us": 100_000,
    "arbitration.tick_us": 50_000,
}

Replay = Callable[[Reader], str]
"""Tells how a replay differs from the ledger, "" when it does not."""


async def trial(
    plan: Plan, folder: Path, replay: Replay, postgres: Postgres | None = None, *, forgetful: bool = False
) -> History:
    """Carry out a plan in `folder` and return what it leaves. A shared ledger needs `postgres`, and has it alone.

    A `forgetful` worker loses its journal when it dies: what the judge has to notice.
    """
    shared = postgres if plan.shared else None
    url = shared.create_database(f"faults_{plan.seed}") if shared else f"sqlite:///{folder / 'ledger.db'}"
    run = Run(plan, Yard(folder, url), shared, forgetful=forgetful)
    await run.nats.start()
    try:
        async with await Bus.connect(run.nats.server.url, "client") as bus:
            await bus.provision()
            return await run.history(bus, replay)
    finally:
        await run.nats.stop()


class Run:
    """The processes of one run, and who starts them again."""

    def __init__(self, plan: Plan, yard: Yard, postgres: Postgres | None, *, forgetful: bool) -> None:
        self.nats = Nats(yard, self._fate)
        self._plan = plan
        self._yard = yard
        self._postgres = postgres
        self._forgetful = forgetful
        self._treated: set[int] = set()
        self._lives = dict.fromkeys(Role, 0)
        self._over = asyncio.Event()
        self._asleep = asyncio.Event()
        self._complaints: list[str] = []

    async def history(self, bus: Bus, replay: Replay) -> History:
        """Run to the end, and return what is left of it."""
        pools: list[JsonValue] = [story.pool(yoco.NODE, 1, self._plan.standbys)]
        settings = {**SETTINGS, "fleet.pools": pools}
        client = Client(bus, self._plan, settings, story.BASE, self._asleep)
        async with asyncio.TaskGroup() as tasks:
            keepers = [tasks.create_task(one) for one in (self.nats.keep(), self._keep_database())]
            processes = [tasks.create_task(self._keep(role)) for role in Role]
            await self._rest(bus, client, tasks.create_task(client.run()))
            self._over.set()
            await asyncio.wait(processes)
            on_bus = await stored(bus)
            for keeper in keepers:
                keeper.cancel()
        await self.nats.stop()
        self._check_journal()
        with Reader.open(self._yard.url) as reader:
            entries, differs = [entry(row) for row in reader.rows()], replay(reader)
        return History(
            plan=self._plan,
            spent=[fault for index, fault in enumerate(self._plan.faults) if self._yard.is_spent(index)],
            entries=entries,
            bus=on_bus,
            lost=await self._lost(),
            acked=client.acked,
            world=yoco.deeds(self._yard.world),
            deaths=self._lives[Role.WORKER] - 1,
            replay=differs,
            complaints=self._complaints,
        )

    async def _rest(self, bus: Bus, client: Client, asking: "asyncio.Task[None]") -> None:
        """Wait until nothing is left to do."""
        watch, until_us, seen = Watch(self._yard.url), mono_us() + int(REST_S * US_PER_S), 0
        while not await self._rests(bus, watch, asked=asking.done()):
            if mono_us() >= until_us:
                asking.cancel()
                self._complaints.append(f"not at rest after {REST_S:g} s: {watch}")
                break
            if watch.sleepers:
                self._asleep.set()
            else:
                self._asleep.clear()
            if watch.state.gap_pos > seen:
                seen = watch.state.gap_pos
                await client.look()
            await asyncio.sleep(POLL_S)
        watch.close()

    async def _rests(self, bus: Bus, watch: Watch, *, asked: bool) -> bool:
        """Tell whether nothing is left to do; what was `asked` is on the bus, so that comes first."""
        facts = None
        if asked and self.nats.up.is_set():
            with suppress(BusUnreachable, StreamMissing):
                facts = await bus.stream(EVT)
        return watch.look(facts) and await self._is_idle()

    async def _is_idle(self) -> bool:
        """Tell whether the worker has nothing more to do."""
        if not self.nats.up.is_set():
            return False
        try:
            return not await left(self.nats.server.monitor_url, "yoco", yoco.NODE)
        except BusUnreachable:
            return False

    async def _keep(self, role: Role) -> None:
        """Start a process again as often as it ends, until all is over; then tell it to end."""
        while not self._over.is_set():
            await self.nats.up.wait()  # the port of its monitor changes
            self._lives[role] += 1
            async with self._process(role) as child:
                self._yard.note(role, child.pid)
                await self._await(child)
                self._yard.note(role, None)
                self._explain(role, child.exitcode)
            if self._forgetful and not self._over.is_set():
                self._yard.journal.unlink(missing_ok=True)

    def _process(self, role: Role) -> "AbstractAsyncContextManager[BaseProcess]":
        log, url, faults = self._yard.log(role), self.nats.server.url, self._plan.faults
        if role is Role.WORKER:
            return process(log, None, yoco.be, url, self._yard, faults)
        settings: dict[str, object] = {
            "nats_url": url,
            "nats_monitor_url": self.nats.server.monitor_url,
            "ledger_url": self._yard.url,
        }
        return process(log, None, crashing.lead, settings, self._yard, faults)

    async def _await(self, child: "BaseProcess") -> None:
        """Wait until a process ends, and tell it to when all is over."""
        until_us = 0
        while child.exitcode is None:
            if self._over.is_set() and not until_us:
                child.terminate()
                until_us = mono_us() + int(END_S * US_PER_S)
            if until_us and mono_us() >= until_us:
                return
            await asyncio.sleep(POLL_S)

    def _explain(self, role: Role, code: int | None) -> None:
        """Complain about an end that no fault explains."""
        if code == KILLED or (code == 0 and self._over.is_set()):
            return
        victims = {victim for fault in self._plan.faults for victim in fault.victims}
        lines = [line for line in self._yard.log(role).read_text().splitlines() if "service_failed" in line]
        why = lines[-1] if lines else "without a word"
        if code and any(f"code={error} " in why and victims & causes for error, causes in EXPLAINED.items()):
            return
        self._complaints.append(f"the {role} ended with {code}: {why}")

    async def _keep_database(self) -> None:
        """Start the database server again after each of its faults."""
        if self._postgres is None:
            return
        self._yard.note(DATABASE, self._postgres.pid)
        for index, fault in enumerate(self._plan.faults):
            if Victim.DATABASE in fault.victims:
                await eventually(partial(self._yard.is_spent, index), deadline_s=2 * REST_S)
                self._postgres.restart(immediate=True)
                self._yard.note(DATABASE, self._postgres.pid)

    def _fate(self) -> list[Store]:
        """Return what becomes of the bus's store, now that its server is dead."""
        found = [
            (index, fault.store)
            for index, fault in enumerate(self._plan.faults)
            if Victim.BUS in fault.victims and self._yard.is_spent(index) and index not in self._treated
        ]
        self._treated |= {index for index, _ in found}
        return [store for _, store in found]

    async def _lost(self) -> Stored | None:
        return await found(EmbeddedServer(self.nats.lost)) if self.nats.lost else None

    def _check_journal(self) -> None:
        with Journal.open(self._yard.journal) as journal:
            self._complaints += [f"the journal still has {one.id} as {one.state}" for one in journal.unfinished()]
