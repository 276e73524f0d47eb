"""Three real servers on deploy/cluster/cluster.conf, each with what `kite init` made: one is lost, then two."""

import asyncio
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from kite.bus import DEC, EVT, Bus, BusStalled, BusUnreachable, PublishUnanswered
from kite.bus.monitor import read
from kite.bus.server import find_server
from kite.events import Composed, Origin, compose, publish
from kite.launch import command
from kite.ledger import Reader
from kite.testing.eventually import eventually
from kite.trust import load_signer
from kite_cli.deploy.members import OPERATOR, PROVISIONER
from kite_cli.deploy.testing import Deployment, made, stop
from kite_incident.replay import verify
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusEpochChanged, BusGap, LeaseTaken
from kite_schemas.yoco import OrderRequested

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONF = Path("cluster.conf")
SERVERS = 3
BURST = 10
WORKER = "upcycle-n1"
AGAIN_S = 5.0
"""An order whose acknowledgement was lost with a server comes again after so long."""

ORIGIN = Origin(source="kite/operator", producer="test@0")
ELECTED_S = 30.0
"""For the servers to find each other and choose who leads; 1 to 5 s on an idle machine."""

STALLED_S = 60.0
"""For a client to give up: the first requests wait in full for a leader that is gone."""


@dataclass
class Cluster:
    """Three servers, each with a folder of its own, as on three machines."""

    folder: Path
    ports: list[int]
    route_ports: list[int]
    monitor_ports: list[int]
    running: dict[int, asyncio.subprocess.Process] = field(default_factory=dict[int, asyncio.subprocess.Process])

    @property
    def deployment(self) -> Deployment:
        """The deployment that they serve."""
        url, monitor_url = (
            ",".join(f"{scheme}://127.0.0.1:{port}" for port in ports)
            for scheme, ports in (("nats", self.ports), ("http", self.monitor_ports))
        )
        return Deployment(self.folder / "deployment", url, monitor_url)

    def prepare(self) -> None:
        """Give each a copy of the deployment's folder, and the file of its routes."""
        routes = json.dumps([f"nats://kite:a-password@127.0.0.1:{port}" for port in self.route_ports])
        for at, port in enumerate(self.route_ports):
            shutil.copytree(self.folder / "deployment", self.of(at))
            shutil.copy(ROOT / "deploy" / "cluster" / CONF, self.of(at) / CONF)
            told = f'listen: "127.0.0.1:{port}"\nauthorization {{ user: "kite", password: "a-password" }}\n'
            (self.of(at) / "secrets" / "routes.conf").write_text(f"{told}routes: {routes}\n")
            self.alter(at, str(self.folder / "store"), str(self.folder / f"store-{at}"))  # each machine has its own

    def alter(self, at: int, old: str, new: str) -> None:
        """Change the nats.conf of one server."""
        conf = self.of(at) / "nats.conf"
        text = conf.read_text()
        assert text.count(old) == 1
        conf.write_text(text.replace(old, new))

    def of(self, at: int) -> Path:
        """Return the folder of a server."""
        return self.folder / f"server-{at}"

    async def start(self, *which: int) -> None:
        """Start servers, and wait until each is healthy."""
        for at in which:
            self.running[at] = await self._spawn(at)
        for at in which:
            await self.healthy(at)

    async def kill(self, *which: int) -> None:
        """Kill servers, as a power cut would."""
        for at in which:
            self.running[at].kill()
            await self.running.pop(at).wait()

    async def healthy(self, at: int) -> None:
        """Wait until a server has caught up with the others."""
        await eventually(lambda: self._is_healthy(at), ELECTED_S)

    async def _is_healthy(self, at: int) -> bool:
        try:
            return b'"ok"' in await read(f"http://127.0.0.1:{self.monitor_ports[at]}", "healthz")
        except BusUnreachable:  # or not well: it answers 503 then
            return False

    async def _spawn(self, at: int) -> asyncio.subprocess.Process:
        own = ("-a", "127.0.0.1", "-p", str(self.ports[at]), "-m", str(self.monitor_ports[at]))
        with (self.folder / f"server-{at}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command([str(await find_server()), "-c", str(CONF), *own]),
                cwd=self.of(at),
                stdout=log,
                stderr=log,
                env={**os.environ, "KITE_SERVER": f"nats-{at}"},
            )


def free_ports(count: int) -> list[int]:
    """Return free loopback ports: a cluster is told all its addresses before it starts."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in held]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncGenerator[Cluster]:
    """The cluster, with all streams on all servers."""
    made(tmp_path)
    ports = free_ports(3 * SERVERS)
    cluster = Cluster(tmp_path, ports[:SERVERS], ports[SERVERS : 2 * SERVERS], ports[2 * SERVERS :])
    cluster.prepare()
    try:
        await cluster.start(*range(SERVERS))
        code, out, err = await cluster.deployment.kite("provision", "--replicas", str(SERVERS), name=PROVISIONER)
        assert code == 0, err
        assert [line.rpartition(", ")[2] for line in out.splitlines()] == ["3 replicas"] * 3
        yield cluster
    finally:
        for process in cluster.running.values():
            await stop(process)


def asked(actor: str) -> Composed:
    return compose("base/tiny", OrderRequested(actor=actor, base="tiny"), ORIGIN)


def actors(deployment: Deployment) -> list[str]:
    return [data.actor for data in deployment.found(OrderRequested)]


def is_in(deployment: Deployment, event: Composed) -> bool:
    with Reader.open(deployment.ledger_url) as reader:
        return reader.by_event_id(event.header.id) is not None


async def ids(bus: Bus, stream: str) -> list[str]:
    """Return the ids of all events that a stream holds."""
    state = await bus.stream(stream)
    found = [await bus.message(stream, seq) for seq in range(state.first_seq, state.last_seq + 1)]
    return [decode(one.payload).header.id for one in found if one]


async def nothing_lost_or_doubled(deployment: Deployment, bus: Bus, events: list[Composed]) -> None:
    """Compare what was acknowledged with the streams and the ledger."""
    wanted = [event.header.id for event in events]
    with Reader.open(deployment.ledger_url) as reader:
        assert [row.event_id for row in reader.find(types=[OrderRequested.TYPE])] == wanted
        assert verify(reader).identical
    assert await ids(bus, EVT) == wanted
    assert max(Counter(await ids(bus, DEC)).values()) == 1
    assert (deployment.found(BusEpochChanged), deployment.found(BusGap)) == ([], [])


async def test_any_one_server_may_be_lost_and_everything_goes_on(cluster: Cluster):
    deployment, events, done = cluster.deployment, list[Composed](), set[str]()
    async with (
        deployment.leading(),
        await deployment.connect(OPERATOR, signed_by=OPERATOR) as bus,
        await deployment.connect(WORKER) as theirs,
        asyncio.TaskGroup() as tasks,
    ):
        working = tasks.create_task(work(theirs, done))
        for at in range(SERVERS):
            burst = [asked(f"{at}-{number}") for number in range(BURST)]
            telling = asyncio.create_task(tell(bus, burst))
            await cluster.kill(at)
            await telling
            events += burst
            await eventually(partial(is_in, deployment, burst[-1]), ELECTED_S)
            await cluster.start(at)
        assert {(await bus.storage(stream)).replicas for stream in (EVT, DEC)} == {SERVERS}
        await nothing_lost_or_doubled(deployment, bus, events)
        given = set(await ids(bus, DEC))
        await eventually(lambda: done == given, ELECTED_S)
        working.cancel()
    assert len(deployment.found(LeaseTaken)) == 1, "one leader all the time"


async def work(bus: Bus, done: set[str]) -> None:
    """Take every decision, as a worker takes its own."""
    async for order in bus.work(DEC, WORKER, ["kite.dec.v1.>"], ack_wait_s=AGAIN_S):
        done.add(decode(order.message.payload).header.id)
        await order.ack()


async def tell(bus: Bus, events: list[Composed]) -> None:
    """Publish in order; again, as the error says, where the servers took long to choose another leader."""
    for event in events:
        while True:
            with suppress(PublishUnanswered):
                await publish(bus, event)
                break


async def test_with_two_servers_lost_nothing_is_acknowledged_and_it_says_so(cluster: Cluster):
    deployment, (first, second) = cluster.deployment, map(asked, ("first", "second"))
    async with deployment.leading(), await impatient(deployment) as bus:
        await publish(bus, first)
        await eventually(lambda: actors(deployment) == ["first"])
        await cluster.kill(0, 1)
        publishing = asyncio.create_task(publish(bus, second))
        stalled = await eventually(lambda: how_it_fails(bus), STALLED_S)
        with pytest.raises(PublishUnanswered) as unanswered:
            await publishing
        assert unanswered.value.retryable
        assert stalled is not None
        assert "cannot serve its streams" in str(stalled)
        assert "most servers have to run" in stalled.hint
        await eventually(lambda: "bus_reader_waits" in deployment.log("arbitrator").read_text(), STALLED_S)
        assert actors(deployment) == ["first"]
        await cluster.start(0)
        await tell(bus, [second])
        await eventually(lambda: len(actors(deployment)) > 1, ELECTED_S)
        await nothing_lost_or_doubled(deployment, bus, [first, second])
    assert len(deployment.found(LeaseTaken)) == 1, "one leader all the time"


async def impatient(deployment: Deployment) -> Bus:
    """Connect as the operator, to wait for acknowledgements less long than usual."""
    signer = load_signer(deployment.key(OPERATOR))
    return await Bus.connect(deployment.url, OPERATOR, signer=signer, login=deployment.login(OPERATOR), ack_s=1.0)


async def how_it_fails(bus: Bus) -> BusStalled | None:
    """Ask for a stream; the server that led it answers for some seconds after it lost the others."""
    try:
        await bus.stream(EVT)
    except BusStalled as stalled:
        return stalled
    return None


async def test_a_server_of_the_cluster_that_syncs_later_is_named(cluster: Cluster):
    deployment = cluster.deployment
    await cluster.kill(2)
    cluster.alter(2, "sync_interval: always", "sync_interval: 120s")
    async with deployment.leading():
        pass  # with one away it starts, on the word of those that answer
    await cluster.start(2)
    async with deployment.service("arbitrator") as process:
        assert await asyncio.wait_for(process.wait(), ELECTED_S) == 1
    said = deployment.log("arbitrator").read_text()
    assert f"http://127.0.0.1:{cluster.monitor_ports[2]} does not sync before it acknowledges" in said
    assert "bus_server_silent" in said
