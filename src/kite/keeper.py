"""Keep one engine beyond the life of its yoco, and end it when nobody comes back: a program of its own.

    python -I -S keeper.py --lock FILE --end FILE --keep S --nice N -- CMD ARGS…

It leads a session, starts the program as its child in a group of its own once it is told to (one byte on its standard
input), says the child's process id on its standard output, and writes to the end file how the child ended. It ends the
whole group when it is told to (SIGTERM), when the child has ended, when nobody has held the lock for `--keep` seconds,
or when the file of the lock is gone. It waits in one system call, once a second.

Run by path and without site-packages: it imports nothing of ours, so that it is there in some 20 ms and holds some MB.
What other modules need of it (`command`, `held`, `take`) is here as well, so that each fact stands once.
"""

import ctypes
import fcntl
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

KEEP_S = 30.0
"""How long an engine is kept without a yoco: `kite up` starts one again after 1 s, Docker and systemd within 10 s."""

POLL_S = 1.0  # between two looks at the lock
GRACE_S = 10.0  # from SIGTERM to SIGKILL: vLLM takes 1-3 s
KILL_S = 10.0  # after SIGKILL, for the kernel to take memory back
STEP_S = 0.05  # between two looks at a group that is ending

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
LOCK = struct.Struct("hhqqi4x")  # <fcntl.h>, struct flock, 64 bits
EXIT_USAGE = 64  # <sysexits.h>
EXIT_NOT_FOUND = 127  # as a shell answers
EXIT_ORPHAN = 125
USAGE = "usage: keeper.py --lock FILE --end FILE --keep S --nice N -- CMD ARGS…"

TOLD = "told"
ENDED = "ended"
ABANDONED = "abandoned"
GONE = "gone"
"""Why a keeper ended its engine: it was told to, the engine had ended, no yoco held the lock, the folder is gone."""


class Orders(NamedTuple):
    """The command line of a keeper."""

    lock: str
    end: str
    keep_s: float
    nice: int
    program: Sequence[str]


def command(program: Sequence[str], *, lock: str, end: str, keep_s: float = KEEP_S, nice: int = 0) -> list[str]:
    """Return the command line of a keeper for `program`. `lock` and `end` are absolute paths."""
    options = ["--lock", lock, "--end", end, "--keep", str(keep_s), "--nice", str(nice)]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *options, "--", *program]  # noqa: PTH100 # no pathlib: it costs more than all other imports


def parse(argv: Sequence[str]) -> Orders:
    """Return what the arguments say. Raises ValueError when they are not so."""
    if "--" not in argv:
        raise ValueError(USAGE)
    at = list(argv).index("--")
    values = dict(zip(argv[:at:2], argv[1:at:2], strict=True))
    program = list(argv[at + 1 :])
    if values.keys() != {"--lock", "--end", "--keep", "--nice"} or not program:
        raise ValueError(USAGE)
    return Orders(values["--lock"], values["--end"], float(values["--keep"]), int(values["--nice"]), program)


def take(lock: int) -> bool:
    """Take the lock on an open file for this process, without waiting; False when another has it.

    An open file description lock: closing another descriptor of the file does not drop it, no child inherits it, and a
    keeper can ask for it without taking it, so that no keeper is in the way of a yoco that starts.
    """
    try:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


def held(path: str) -> bool:
    """Say whether a process holds the lock. Raises FileNotFoundError when the file is not there, and OSError."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(lock)
    return LOCK.unpack(found)[0] != fcntl.F_UNLCK


class Keeper:
    """One engine and its group. Single-threaded, with its signals blocked: they are waited for, never handled."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.pid = 0
        self.status: int | None = None
        self.told = False
        self.held_at = time.monotonic()

    def start(self) -> None:
        """Start the program."""
        keeper = os.getpid()  # asked before there is a child: one that asks who its parent is may be an orphan already
        self.pid = os.fork()
        if not self.pid:
            become(self.orders, keeper)
        try:
            os.setpgid(self.pid, self.pid)  # the child does it too: whoever comes first
        except (PermissionError, ProcessLookupError):  # it has become the program, or has ended
            return

    def keep(self) -> str:
        """Wait until there is a reason to end it all, and return that."""
        while True:
            self.wait(POLL_S)
            if self.told:
                return TOLD
            if self.status is not None:
                return ENDED
            try:
                if held(self.orders.lock):
                    self.held_at = time.monotonic()
            except FileNotFoundError:
                return GONE
            except OSError:  # no descriptor, no memory: it says nothing of who holds it
                continue
            if time.monotonic() - self.held_at >= self.orders.keep_s:
                return ABANDONED

    def wait(self, limit_s: float) -> None:
        """Wait for a signal, at most so long, and take what has ended."""
        heard = signal.sigtimedwait(WAITED, limit_s)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            self.told = True
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """End the whole group: SIGTERM, GRACE_S, SIGKILL, KILL_S. One that was stopped is continued for its SIGTERM."""
        for numbers, limit_s in (((signal.SIGTERM, signal.SIGCONT), GRACE_S), ((signal.SIGKILL,), KILL_S)):
            until = time.monotonic() + limit_s
            for number in numbers:
                self.send(number)
            while self.send(0):
                if time.monotonic() >= until:
                    break
                self.wait(STEP_S)
            else:
                return

    def send(self, number: int) -> bool:
        """Signal the group; False when there is nobody in it."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def tell(self, why: str) -> None:
        """Write how the engine ended, where a later yoco finds it, in one step. A folder that is gone is fine."""
        code = "null" if self.status is None else self.status
        said = f'{{"pid": {self.pid}, "code": {code}, "why": "{why}"}}\n'  # the module json would cost 10 ms
        aside = f"{self.orders.end}.new"
        try:
            with open(aside, "w", encoding="utf-8") as file:  # noqa: PTH123 # no pathlib
                file.write(said)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.orders.end)  # noqa: PTH105 # no pathlib
        except OSError:
            return


WAITED = (signal.SIGCHLD, signal.SIGTERM)
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)


def become(orders: Orders, keeper: int) -> NoReturn:
    """Be the program, in the child: in a group of its own, ended by the kernel when its keeper (a process id) is."""
    os.setpgid(0, 0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED)
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != keeper:  # it died before the request took effect: no signal will come
        os._exit(EXIT_ORPHAN)
    if orders.nice:
        os.nice(orders.nice)
    try:
        os.execvp(orders.program[0], list(orders.program))  # noqa: S606 - the point: become the program
    except OSError as error:
        os.write(2, f"keeper: cannot run {orders.program[0]}: {error.strerror}\n".encode())
        os._exit(EXIT_NOT_FOUND)


def main(argv: Sequence[str]) -> int:
    """Keep one engine; return 0 when it has ended, or 125 when nobody told to start it."""
    try:
        orders = parse(argv)
    except ValueError:
        os.write(2, f"{USAGE}\n".encode())
        return EXIT_USAGE
    if not os.read(0, 1):  # whoever wanted the engine died before it had written down that there is one
        return EXIT_ORPHAN
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a dead engine leaves is ours to end and to take
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    keeper = Keeper(orders)
    keeper.start()
    os.write(1, f"{keeper.pid}\n".encode())
    os.dup2(nowhere, 1)
    os.chdir("/")
    why = keeper.keep()
    if keeper.status is not None:
        keeper.tell(why)  # at once: somebody waits for the reason, and its group may take its time
    keeper.end()
    if why != ENDED:
        keeper.tell(why)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
