"""The keeper of an engine: four reasons to end it, and none of them forgotten, whoever is killed."""

import os
import signal
import subprocess
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kite import keeper
from kite.engine.identity import identity
from kite.engine.kept import End, read_end
from kite.testing.eventually import eventually

KEEP_S = 1.0
FAMILY = "sleep 60 & sleep 60"


@dataclass
class Lock:
    """The lock of a state folder, held by this process until it is released."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Let go of it, as the kernel does when its holder is killed."""
        os.close(self.descriptor)
        self.descriptor = -1


@pytest.fixture
def lock(tmp_path: Path) -> Generator[Lock]:
    """A lock that we hold."""
    path = tmp_path / "state" / "yoco.lock"
    path.parent.mkdir()
    held = Lock(path, os.open(path, os.O_RDWR | os.O_CREAT))
    assert keeper.take(held.descriptor)
    yield held
    if held.descriptor >= 0:
        held.release()


Start = Callable[..., tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def start(lock: Lock, tmp_path: Path) -> Generator[Start]:
    """Start programs under keepers; what is left of them at the end is killed."""
    keepers: list[subprocess.Popen[bytes]] = []

    def starting(*program: str, nice: int = 0) -> tuple[subprocess.Popen[bytes], int]:
        argv = keeper.command(program, lock=str(lock.path), end=str(tmp_path / "end"), keep_s=KEEP_S, nice=nice)
        keeping = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        keepers.append(keeping)
        assert keeping.stdin is not None
        assert keeping.stdout is not None
        keeping.stdin.write(b"g")
        keeping.stdin.close()
        return keeping, int(keeping.stdout.readline())

    yield starting
    for keeping in keepers:
        keeping.kill()
        keeping.wait()
        if keeping.stdout is not None:
            keeping.stdout.close()


def said(tmp_path: Path) -> End | None:
    return read_end(tmp_path / "end", None)


def test_a_lock_can_be_seen_without_being_taken(lock: Lock) -> None:
    assert keeper.held(str(lock.path))
    lock.release()
    assert not keeper.held(str(lock.path))
    with pytest.raises(FileNotFoundError):
        keeper.held(str(lock.path.with_name("nothing")))


async def test_the_program_runs_in_a_group_of_its_own_with_its_niceness(start: Start, tmp_path: Path) -> None:
    keeping, pid = start("sleep", "60", nice=10)
    assert (os.getsid(pid), os.getpgid(pid)) == (keeping.pid, pid)
    await eventually(lambda: psutil.Process(pid).nice() == 10)
    assert psutil.Process(keeping.pid).nice() == 0
    keeping.terminate()
    assert keeping.wait(10) == 0
    assert said(tmp_path) == End(pid=pid, code=-signal.SIGTERM, why="told")
    assert identity(pid) is None


@pytest.mark.parametrize(("program", "code"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_the_end_of_a_program_is_written_down(start: Start, tmp_path: Path, program: str, code: int) -> None:
    keeping, pid = start("sh", "-c", program)
    assert keeping.wait(10) == 0
    assert said(tmp_path) == End(pid=pid, code=code, why="ended")


def test_what_a_dead_program_leaves_of_its_group_is_ended(start: Start, tmp_path: Path) -> None:
    keeping, pid = start("sh", "-c", FAMILY)
    children = psutil.Process(pid).children()
    os.kill(pid, signal.SIGKILL)
    assert keeping.wait(10) == 0
    assert said(tmp_path) == End(pid=pid, code=-signal.SIGKILL, why="ended")
    assert not [child for child in children if child.is_running()]


async def test_nobody_holding_the_lock_ends_it_after_the_bound(start: Start, lock: Lock, tmp_path: Path) -> None:
    keeping, pid = start("sleep", "60")
    lock.release()
    assert keeping.wait(KEEP_S + 2 * keeper.POLL_S + 5) == 0
    assert said(tmp_path) == End(pid=pid, code=-signal.SIGTERM, why="abandoned")


async def test_somebody_taking_the_lock_in_time_keeps_it(start: Start, lock: Lock) -> None:
    keeping, pid = start("sleep", "60")
    lock.release()
    descriptor = os.open(lock.path, os.O_RDWR)
    assert keeper.take(descriptor)
    with pytest.raises(subprocess.TimeoutExpired):
        keeping.wait(KEEP_S + 2 * keeper.POLL_S)
    assert identity(pid) is not None
    os.close(descriptor)


def test_a_folder_that_is_gone_ends_it_at_once(start: Start, lock: Lock, tmp_path: Path) -> None:
    keeping, pid = start("sleep", "60")
    lock.path.unlink()
    assert keeping.wait(keeper.POLL_S + 5) == 0
    assert said(tmp_path) == End(pid=pid, code=-signal.SIGTERM, why="gone")


def test_a_stopped_program_is_ended_too(start: Start, tmp_path: Path) -> None:
    keeping, pid = start("sleep", "60")
    os.kill(pid, signal.SIGSTOP)
    keeping.terminate()
    assert keeping.wait(5) == 0
    assert said(tmp_path) == End(pid=pid, code=-signal.SIGTERM, why="told")


async def test_a_killed_keeper_takes_its_program_with_it_however_early(start: Start) -> None:
    pids: list[int] = []
    for _ in range(10):  # killed as soon as there is a child, which may not have run at all
        keeping, pid = start("sleep", "60")
        keeping.kill()
        pids.append(pid)
    await eventually(lambda: not [pid for pid in pids if identity(pid) is not None])


def test_without_being_told_it_starts_nothing(lock: Lock, tmp_path: Path) -> None:
    argv = keeper.command(["touch", str(tmp_path / "ran")], lock=str(lock.path), end=str(tmp_path / "end"))
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode == keeper.EXIT_ORPHAN
    assert not (tmp_path / "ran").exists()


def test_a_program_that_cannot_be_run_says_so(start: Start, tmp_path: Path) -> None:
    keeping, pid = start("/no/such/program")
    assert keeping.wait(10) == 0
    assert said(tmp_path) == End(pid=pid, code=keeper.EXIT_NOT_FOUND, why="ended")


@pytest.mark.parametrize(
    "argv", [["--lock"], ["--", "true"], ["--lock", "a", "--end", "b", "--keep", "1", "--nice", "0", "--"]]
)
def test_a_command_line_that_is_none(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"usage|argument|literal"):
        keeper.parse(argv)
