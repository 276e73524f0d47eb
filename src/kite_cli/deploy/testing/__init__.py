"""A deployment on this machine, for tests: its folder, a server on its nats.conf, and its services as processes."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kite.bus import Bus, BusUnreachable, Login
from kite.bus.link import Link
from kite.bus.monitor import read
from kite.bus.server import find_server
from kite.launch import command
from kite.ledger import LedgerMissing, NotALedger, Reader
from kite.testing.bus import FACTS_BYTES
from kite.testing.eventually import eventually
from kite.trust import load_signer
from kite_cli.deploy.conf import AUTHORITY, Server
from kite_cli.deploy.folder import CONF, KEYS, SEEDS, Plan, write
from kite_cli.deploy.members import ARBITRATOR, OPERATOR, PROVISIONER
from kite_cli.embedded.supervisor import ServiceFailed
from kite_schemas.envelope import decode
from kite_schemas.ledger import LeaseTaken
from kite_schemas.model import Data

NODES = ("n1", "n2")
READY_S = 20.0
STOP_S = 20.0
AnyData = TypeVar("AnyData", bound=Data)

PASSED_ON = ("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A folder that `kite init` made, and where its bus listens; `pid` is the server's, `tls` whether it encrypts."""

    dir: Path
    url: str
    monitor_url: str
    tls: bool = False
    pid: int = 0

    @property
    def ledger_url(self) -> str:
        """A ledger beside the folder."""
        return f"sqlite:///{self.dir.parent / 'ledger.db'}"

    @property
    def adapter_root(self) -> Path:
        """The folder of adapters, beside it too."""
        return self.dir.parent / "adapter-root"

    def seed(self, name: str) -> Path:
        """Return the file of a member's nkey."""
        return self.dir / SEEDS / f"{name}.seed"

    def key(self, name: str, kind: str = "key") -> Path:
        """Return the file of a member's signing key, or its public half (`pub`)."""
        return self.dir / KEYS / f"{name}.{kind}"

    def login(self, name: str) -> Login:
        """Return what a member logs in with."""
        return Login.load(self.seed(name), self.dir / AUTHORITY if self.tls else None)

    async def connect(self, name: str, *, signed_by: str = "", trusting: bool = False) -> Bus:
        """Connect as a member, signing with a member's key if one is named."""
        signer = load_signer(self.key(signed_by)) if signed_by else None
        trusted = bytes.fromhex(self.key(ARBITRATOR, "pub").read_text().split()[1]) if trusting else None
        return await Bus.connect(self.url, name, signer=signer, login=self.login(name), trusted=trusted)

    @asynccontextmanager
    async def link(self, name: str) -> AsyncGenerator[Link]:
        """Connect as a member, to send what no part of KITE would."""
        link = Link(self.url, self.login(name))
        await link.open(name)
        try:
            yield link
        finally:
            await link.close()

    async def provision(self) -> None:
        """Make the streams, small, as the one who may."""
        async with await self.connect(PROVISIONER) as bus:
            await bus.provision(facts_bytes=FACTS_BYTES)

    def env(self, name: str, node: str = "") -> dict[str, str]:
        """Return the environment of a member's process; the operator's is that of a command."""
        signs = {} if name == PROVISIONER else {"KITE_SIGNING_KEY": str(self.key(name))}
        state = self.dir.parent / "state" / name
        state.mkdir(parents=True, exist_ok=True)
        self.adapter_root.mkdir(exist_ok=True)
        own = {
            "KITE_NODE": node,
            "KITE_STATE_DIR": str(state),
            "KITE_ARBITRATOR_KEY": str(self.key(ARBITRATOR, "pub")),
        }
        return {
            **{key: os.environ[key] for key in PASSED_ON if key in os.environ},
            "KITE_NATS_URL": self.url,
            "KITE_NATS_NKEY_FILE": str(self.seed(name)),
            **({"KITE_NATS_CA_FILE": str(self.dir / AUTHORITY)} if self.tls else {}),
            "KITE_NATS_MONITOR_URL": self.monitor_url,
            "KITE_LEDGER_URL": self.ledger_url,
            "KITE_ADAPTER_ROOT": str(self.adapter_root),
            "KITE_OPERATOR_KEY": str(self.key(OPERATOR, "pub")),
            **signs,
            **(own if node else {}),
        }

    def found(self, kind: type[AnyData]) -> list[AnyData]:
        """Return the payloads of one type in the ledger; none while it is being made."""
        try:
            with Reader.open(self.ledger_url) as reader:
                datas = [decode(row.raw).data for row in reader.find(types=[kind.TYPE])]
        except (LedgerMissing, NotALedger):
            return []
        return [data for data in datas if isinstance(data, kind)]

    @asynccontextmanager
    async def leading(self) -> AsyncGenerator[asyncio.subprocess.Process]:
        """Run the arbitrator until the block ends; it leads when the block begins."""
        terms = len(self.found(LeaseTaken))
        async with self.service(ARBITRATOR) as process:
            await eventually(lambda: process.returncode is not None or len(self.found(LeaseTaken)) > terms, READY_S)
            if process.returncode is not None:
                raise ServiceFailed(ARBITRATOR, f"ended with status {process.returncode}", self.log(ARBITRATOR))
            yield process

    @asynccontextmanager
    async def service(self, service: str, node: str = "") -> AsyncGenerator[asyncio.subprocess.Process]:
        """Run a service as a process until the block ends; its log is in `log`."""
        name = f"{service}-{node}" if node else service
        program = command([sys.executable, "-m", f"kite_{service}"])
        with self.log(name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *program, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=self.env(name, node)
            )
        try:
            yield process
        finally:
            await stop(process)

    def log(self, name: str) -> Path:
        """Return where a process's output goes."""
        return self.dir.parent / f"{name}.log"

    async def kite(self, *arguments: str, name: str = OPERATOR) -> tuple[int, str, str]:
        """Run a command as a member; return its exit code, stdout and stderr."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kite_cli",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.env(name),
        )
        out, err = await process.communicate()
        return int(process.returncode or 0), out.decode(), err.decode()


async def stop(process: asyncio.subprocess.Process) -> None:
    """End a process: SIGTERM, and SIGKILL after STOP_S."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def made(folder: Path, nodes: Sequence[str] = NODES, *, tls: bool = False) -> Path:
    """Write a deployment in `folder`, as `kite init` does, and return its own folder."""
    directory = folder / "deployment"
    write(directory, Plan(tuple(nodes), Server(store=str(folder / "store"), tls=tls)))
    return directory


@asynccontextmanager
async def serving(directory: Path, *, tls: bool = False) -> AsyncGenerator[Deployment]:
    """Run a server on a deployment's nats.conf, on free loopback ports, until the block ends."""
    run = directory.parent / "run"
    run.mkdir(exist_ok=True)
    ports = ("-a", "127.0.0.1", "-p", "-1", "-m", "-1", "--ports_file_dir", str(run))
    with (directory.parent / "nats.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command([str(await find_server()), "-c", str(CONF), *ports]), cwd=directory, stdout=log, stderr=log
        )
    try:
        found = await eventually(lambda: _found(directory, run / f"nats-server_{process.pid}.ports", tls=tls), READY_S)
        assert found is not None  # noqa: S101 # `eventually` does not return before
        yield replace(found, pid=process.pid)
    finally:
        await stop(process)


async def _found(directory: Path, ports: Path, *, tls: bool) -> Deployment | None:
    try:
        told = json.loads(ports.read_text())  # noqa: ASYNC240 # a line
        monitor_url = str(told["monitoring"][0])
        healthy = b'"ok"' in await read(monitor_url, "healthz")
    except (OSError, ValueError, LookupError, BusUnreachable):  # not there yet, or half written
        return None
    port = str(told["nats"][0]).rpartition(":")[2]
    return (
        Deployment(directory, f"{'tls' if tls else 'nats'}://127.0.0.1:{port}", monitor_url, tls) if healthy else None
    )


def certify(folder: Path, name: str) -> None:
    """Make an authority and a server's certificate for a host, as in IP:127.0.0.1, with openssl."""
    tls = folder / "tls"
    tls.mkdir(exist_ok=True)
    found = shutil.which("openssl")
    assert found is not None, "openssl is needed to make certificates"  # noqa: S101 # as above

    def openssl(*arguments: str) -> None:
        subprocess.run([found, *arguments], cwd=tls, check=True, capture_output=True)  # noqa: S603 # openssl

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(*new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=KITE test authority")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", f"subjectAltName={name}")
    openssl(*new, *signed, "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", "server.key", "-out",
            "server.crt", "-subj", "/CN=nats")  # fmt: skip
