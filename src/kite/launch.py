"""Start a program that does not outlive its parent: `python -m kite.launch [--nice N] -- CMD ARGS…`.

Linux forgets the death signal at fork but keeps it over exec, so a launcher that sets it and then becomes the program
needs no code between fork and exec in the (threaded, asynchronous) parent. The process id stays the same.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
EXIT_USAGE = 64  # <sysexits.h>
EXIT_NOT_FOUND = 127  # as a shell answers
EXIT_ORPHAN = 125
PARENT_FLAG = "--parent"
USAGE = "usage: python -m kite.launch [--nice N] [--parent PID] -- CMD ARGS…"


def command(program: Sequence[str], *, nice: int = 0) -> list[str]:
    """Return the command line that runs `program` (command and arguments) as a child that dies with this process.

    The parent's id travels along, so that a parent that died before the launcher ran is noticed. `nice` is the
    increment of niceness, 0 to 19. Start it from a thread that lives as long as the process: Linux takes the death of
    the starting *thread* for the death of the parent.
    """
    options = ["--nice", str(nice)] if nice else []
    return [sys.executable, "-m", "kite.launch", *options, PARENT_FLAG, str(os.getpid()), "--", *program]


def split(argv: Sequence[str]) -> tuple[int, int | None, list[str]]:
    """Split arguments into (niceness, expected parent or None, program). Raises ValueError when they are not so."""
    if "--" not in argv:
        raise ValueError(USAGE)
    end = list(argv).index("--")
    options, program = list(argv[:end]), list(argv[end + 1 :])
    values = dict(zip(options[::2], options[1::2], strict=True))
    if not program or not values.keys() <= {"--nice", PARENT_FLAG}:
        raise ValueError(USAGE)
    parent = values.get(PARENT_FLAG)
    return int(values.get("--nice", "0")), int(parent) if parent else None, program


def bind_to_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies; exit when it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the request took effect: no signal will come
        sys.exit(EXIT_ORPHAN)


def main(argv: Sequence[str]) -> NoReturn:
    """Become the program, or exit with one line that says why not."""
    before = os.getppid()
    try:
        nice, parent, program = split(argv)
    except ValueError:
        print(USAGE, file=sys.stderr)
        sys.exit(EXIT_USAGE)
    bind_to_parent(before if parent is None else parent)
    if nice:
        os.nice(nice)
    try:
        os.execvp(program[0], program)  # noqa: S606 - the point: become the program, without a shell
    except OSError as error:
        print(f"kite.launch: cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
