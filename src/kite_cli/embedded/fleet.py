"""The embedded fleet: bus, ledger and the four services of one node, as processes of this machine."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from kite.bus import Bus
from kite.clock import US_PER_S, mono_us
from kite.errors import Fault, KiteError
from kite.ledger import NotALedger
from kite.trust import public_path
from kite_arbitrator.state import State
from kite_cli import place
from kite_cli.asking.following import Told, ends, watch
from kite_cli.asking.request import change
from kite_cli.asking.sending import CONNECT_S
from kite_cli.embedded import keys
from kite_cli.embedded.claim import Claim, claimed
from kite_cli.embedded.options import Options
from kite_cli.embedded.readiness import Counter, check_engine, check_port, load_pool, settled
from kite_cli.embedded.supervisor import STOP_S, Program, Server, ServiceFailed, Supervisor
from kite_cli.place import MONITOR, FleetFile
from kite_cli.view import View
from kite_schemas.envelope import Event
from kite_schemas.policy import Pool
from kite_yoco.records import LOCK

SERVICES = ("yoco", "upcycle", "guard")
STOP_ORDER = ("yoco", "upcycle", "guard", "arbitrator", "nats")
"""yoco first: it stops its engines, and what it says of that is still recorded."""

MEASURED = ("arbitrator", *SERVICES)
"""The services with metrics, in the order of their ports."""

METRICS_PORT = "KITE_METRICS_PORT"
YOCO_STOP_S = 45.0  # engines get 10 s, then they are killed
LEAD_S = 60.0  # an arbitrator folds the whole ledger before it leads
SETTLE_S = 600.0
POLL_S = 0.1
POOLS = "fleet.pools"


class NotSettled(KiteError):
    """The fleet is not what it should be within the time given."""

    code = "not_settled"
    fault = Fault.OPERATOR

    def __init__(self, wait_s: float, logs: Path) -> None:
        super().__init__(
            f"the fleet is not ready within {wait_s:g} s", hint=f"`kite yoco instances`; logs are in {logs}"
        )
        self.wait_s = wait_s


class NotRequested(KiteError):
    """The arbitrator refuses the fleet that was asked for."""

    code = "fleet_refused"
    fault = Fault.USER

    def __init__(self, detail: str) -> None:
        super().__init__(f"the fleet as asked for is refused: {detail}", hint="see the options of `kite up`")
        self.detail = detail


class Fleet:
    """A running embedded fleet; what it is reached by, and the means to wait for it and to hurt it."""

    def __init__(self, options: Options, pool: Pool, claim: Claim) -> None:
        """Use `embedded`."""
        self.options = options
        self.pool = pool
        self.dir = claim.directory
        self.ledger_url = f"sqlite:///{self.dir / 'ledger.db'}"
        self.nats_url = ""
        self.failure: BaseException | None = None
        self._owner = asyncio.current_task()
        self._claim = claim
        self._keys = keys.Keys(self.dir)
        self._server = Server(self.dir / "nats", options.nats_port)
        self._supervisor = Supervisor(self._started, self._fail)
        self._after: Mapping[str, int] = {}
        self._since_pos = 0

    @property
    def adapter_root(self) -> Path:
        """Folder of adapters and of the store."""
        return self.dir / "adapter-root"

    @property
    def signing_key(self) -> Path:
        """The operator's private key: it signs requests."""
        return self._keys.operator

    @property
    def logs(self) -> Path:
        """Folder of the services' logs; the engines' are in `state/yoco/logs`."""
        return self.dir / "logs"

    @property
    def node(self) -> str:
        """Name of the one node."""
        return self.pool.node

    @property
    def base(self) -> str:
        """Served name of the base."""
        return self.pool.spec.served_name

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the processes: `pid` and `kill` take them."""
        return tuple(self._supervisor.pids())

    def pid(self, service: str) -> int:
        """Return the process id of a service (`nats`, `arbitrator`, `yoco`, `upcycle`, `guard`)."""
        return self._supervisor.pids()[service]

    def kill(self, service: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a service; it is started again."""
        self._supervisor.kill(service, number)

    def listen(self, notice: Callable[[str], None]) -> None:
        """Have `notice` told whenever a service ended and is started again."""
        self._supervisor.notice = notice

    def state(self) -> State:
        """Return the state of the core at the end of the ledger."""
        with place.reading(self) as reader:
            return View(reader).refresh()

    async def wait_settled(self, deadline_s: float = SETTLE_S, on_event: Told | None = None) -> None:
        """Wait until every instance is ready or asleep as the policy says, with every promoted blend loaded.

        Raises InstanceKeepsFailing after three failures in a row of one instance, and NotSettled.
        """
        counter = Counter(self.dir / "state" / "yoco" / "logs", on_event)
        async with await Bus.connect(self.nats_url, "up", wait_s=CONNECT_S) as bus:
            watching = asyncio.create_task(watch(bus, self._after, counter.see))
            settling = asyncio.create_task(self._settled())
            try:
                async with asyncio.timeout(deadline_s):
                    done, _ = await asyncio.wait({watching, settling}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            except TimeoutError:
                raise NotSettled(deadline_s, self.logs) from None
            finally:
                for task in (watching, settling):
                    task.cancel()
                await asyncio.gather(watching, settling, return_exceptions=True)

    async def follow(self, on_event: Told) -> None:
        """Tell every event from now on, until cancelled."""

        def see(event: Event) -> bool:
            on_event(event)
            return False

        async with await Bus.connect(self.nats_url, "up", wait_s=CONNECT_S) as bus:
            await watch(bus, await ends(bus), see)

    async def _settled(self) -> None:
        with place.reading(self) as reader:
            view = View(reader)
            while not settled(view.refresh(), self.pool, self._since_pos):  # noqa: ASYNC110 # another process's file
                await asyncio.sleep(POLL_S)

    async def start(self) -> None:
        """Start everything; introduce the services' keys, and request the pool, unless that was done before."""
        self._prepare()
        self._since_pos = self._head()
        await self._supervisor.start(self._server)
        self.nats_url = self._server.url
        self._supervisor.keep(self._server)
        arbitrator = self._program("arbitrator")
        await self._supervisor.start(arbitrator)
        await self._leading(arbitrator)
        self._supervisor.keep(arbitrator)
        async with await Bus.connect(self.nats_url, "up", wait_s=CONNECT_S) as bus:
            self._after = await ends(bus)
        await keys.introduce(self, self._keys, keys.sources(SERVICES, self.node))
        await self._request()
        for name in SERVICES:
            program = self._program(name)
            await self._supervisor.start(program)
            self._supervisor.keep(program)

    async def stop(self) -> None:
        """Stop everything in order; afterwards nothing of the fleet runs."""
        await self._supervisor.stop(STOP_ORDER)
        (self.dir / "state" / "yoco" / LOCK).unlink(missing_ok=True)  # engines of a yoco that failed end now
        if self.nats_url:
            self.nats_url = ""
            self._record(running=False)

    def forgive(self) -> None:
        """Take back the cancellation that a failure brought about."""
        if self._owner is not None:
            self._owner.uncancel()

    def _prepare(self) -> None:
        for folder in (self.logs, self.adapter_root, *(self.dir / "state" / name for name in SERVICES)):
            self._claim.folder(folder)
        keys.make(self.dir, keys.sources(SERVICES, self.node))

    def _program(self, name: str) -> Program:
        log = self.logs / f"{name}.log"
        stop_s = YOCO_STOP_S if name == "yoco" else STOP_S
        return Program(name, f"kite_{name}", self._env(name), log, keep=(self._claim.lock,), stop_s=stop_s)

    def _env(self, name: str) -> dict[str, str]:
        """Return the environment of a process."""
        return {
            **{key: value for key, value in os.environ.items() if key != METRICS_PORT},  # one port, several processes
            "KITE_NATS_URL": self.nats_url,
            "KITE_NATS_MONITOR_URL": self._server.monitor_url,
            "KITE_LEDGER_URL": self.ledger_url,
            "KITE_NODE": self.node,
            "KITE_STATE_DIR": str(self.dir / "state" / name),
            "KITE_ADAPTER_ROOT": str(self.adapter_root),
            "KITE_LOG_LEVEL": self.options.log_level,
            "KITE_OPERATOR_KEY": str(self._keys.operator_public),
            "KITE_ARBITRATOR_KEY": str(public_path(self._keys.of("arbitrator"))),
            "KITE_SIGNING_KEY": str(self._keys.of(name)),
            **({METRICS_PORT: str(port)} if (port := metrics_ports(self.options.metrics_port).get(name)) else {}),
        }

    def _head(self) -> int:
        """Return the last position of the ledger, 0 before there is one. Raises LedgerTooNew and NotALedger."""
        if not (self.dir / "ledger.db").exists():
            return 0
        with place.reading(self) as reader:
            return reader.head.pos

    async def _leading(self, arbitrator: Program) -> None:
        """Wait until the arbitrator has written its first row. Raises ServiceFailed as soon as it ends instead."""
        until_us = mono_us() + int(LEAD_S * US_PER_S)
        while not self._leads():
            if arbitrator.exit_code is not None:
                raise ServiceFailed("arbitrator", "ended while it was starting", arbitrator.log)
            if mono_us() >= until_us:
                raise ServiceFailed("arbitrator", f"does not lead within {LEAD_S:g} s", arbitrator.log)
            await asyncio.sleep(POLL_S / 2)

    def _leads(self) -> bool:
        try:
            return self._head() > self._since_pos
        except NotALedger:  # the file is there a moment before its tables are
            return False

    async def _request(self) -> None:
        policy = self.state().policy
        if policy is not None and policy.fleet.pools == (self.pool,):
            return
        changed = await change(self, [(POOLS, [self.pool.model_dump(mode="json")])], reason="kite up")
        if not changed.ok:
            raise NotRequested(changed.detail)

    def _started(self, name: str) -> None:
        """A service has a new process; what the last yoco knew of its engines says nothing about those of this one."""
        if name == "yoco":
            self._since_pos = self._head()
        self._record()

    def _record(self, *, running: bool = True) -> None:
        """Write `fleet.json`, once there is an address to write."""
        if running and not self.nats_url:
            return
        place.write(
            self.dir,
            FleetFile(
                node=self.node,
                nats_url=self.nats_url,
                ledger_url=self.ledger_url,
                adapter_root=str(self.adapter_root),
                pid=os.getpid() if running else 0,
                pids=self._supervisor.pids() if running else {},
                ports=self._ports() if running else {},
            ),
        )

    def _ports(self) -> dict[str, int]:
        monitor = int(self._server.monitor_url.rpartition(":")[2])
        return {"nats": self._server.port, MONITOR: monitor, **metrics_ports(self.options.metrics_port)}

    def _fail(self, error: BaseException) -> None:
        """A service cannot be kept: end whoever runs this fleet, who gets the error from `embedded`."""
        if self.failure is None and self._owner is not None:
            self.failure = error
            self._owner.cancel()


def metrics_ports(first: int | None) -> dict[str, int]:
    """Return the port of each service's metrics, none when no port was named.

    >>> metrics_ports(9100)
    {'arbitrator': 9100, 'yoco': 9101, 'upcycle': 9102, 'guard': 9103}
    """
    return {} if first is None else {name: first + offset for offset, name in enumerate(MEASURED)}


@asynccontextmanager
async def embedded(options: Options) -> AsyncGenerator[Fleet]:
    """Run an embedded fleet for the time of the block; its engines may still be starting when the block begins.

    When a service cannot be kept, the block is cancelled and the reason raised here. Everything is checked before
    anything is started, and nothing runs afterwards, however the block ends. Raises MissingPath, UnreadableBase,
    EngineMissing, UsageError, BusPortTaken, DirectoryUnusable, FleetRuns, LedgerTooNew, NotALedger, ServiceFailed.
    """
    check_engine(options.engine)
    pool = await asyncio.to_thread(load_pool, options)
    for port in (options.nats_port, *metrics_ports(options.metrics_port).values()):
        check_port(port)
    async with claimed(options.dir) as claim:
        fleet = Fleet(options, pool, claim)
        try:
            await fleet.start()
            yield fleet
        except asyncio.CancelledError:
            if fleet.failure is None:
                raise
            fleet.forgive()
            raise fleet.failure from None
        finally:
            await fleet.stop()
