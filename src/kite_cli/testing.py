"""`kite up` as a process of its own, for tests: started, waited for, hurt, ended, and searched for what it left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from kite.clock import US_PER_S, mono_us

READY_S = 120.0
END_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


class Up:
    """`kite up` on the fake engine. `with Up(base, directory) as up:` waits until the fleet is ready."""

    def __init__(
        self,
        base: Path,
        directory: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        """`before` is a command line that becomes the one behind it; another `--engine` among the options counts."""
        self.dir = directory
        self._out = directory.parent / f"{directory.name}.out"
        self._err = directory.parent / f"{directory.name}.err"
        up = command("up", "--base", str(base), "--engine", "fake", "--dir", str(directory), *options)
        self._argv = [*before, *up]
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running command."""
        assert self._process is not None  # noqa: S101 # `start` comes first
        return self._process

    def start(self) -> Self:
        """Start it and return at once."""
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(  # noqa: S603 # our own command
                self._argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self._env, start_new_session=True
            )
        return self

    def wait_for(self, text: str, limit_s: float = READY_S) -> None:
        """Wait until it has printed a text, on either stream. Raises AssertionError when it ended before, or late."""
        until_us = mono_us() + int(limit_s * US_PER_S)
        while text not in self.said():
            if self.process.poll() is not None or mono_us() > until_us:
                msg = f"no {text!r} in what `kite up` said:\n{self.said()}"
                raise AssertionError(msg)
            time.sleep(POLL_S)

    def said(self) -> str:
        """Return everything it printed so far."""
        return self._out.read_text() + self._err.read_text()

    def end(self, number: signal.Signals = signal.SIGINT) -> Ended:
        """Signal it, wait for its end, and return that."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self, limit_s: float = END_S) -> Ended:
        """Wait for its end by itself. Raises TimeoutExpired, after killing one that does not end."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        return Ended(code, self._out.read_text(), self._err.read_text())

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_for("fleet_ready" if "--json" in self._argv else "fleet ready")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self.process.poll() is None:
            self.end()


def command(*arguments: str) -> list[str]:
    """Return the command line of `kite` with these arguments."""
    return [sys.executable, "-m", "kite_cli", *arguments]


def run(*arguments: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run `kite` as a process of its own."""
    done = subprocess.run(  # noqa: S603 # our own command
        command(*arguments),
        capture_output=True,
        check=False,
        text=True,
        timeout=READY_S,
        env={**os.environ, **(env or {})},
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def left(directory: Path) -> Sequence[str]:
    """Return the command lines of processes that were started for a fleet folder and still run."""
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _belongs(process, str(directory)):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def _belongs(process: psutil.Process, folder: str) -> bool:
    if process.pid == os.getpid():
        return False
    words = [*process.cmdline(), *process.environ().values()]
    return any(folder in word for word in words)
