"""Where an engine's threads may run, and who goes before them: they are moved as a whole, whenever that changes."""

import os
import re
import resource
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from kite.engine.errors import EngineUnplaced

NICENESS = 10  # control must not starve beside inference
HELD_NICENESS = 19  # nor inference beside what only gets ready
CAP_SYS_NICE = 23  # <linux/capability.h>
NICE_ZERO = 20  # what RLIMIT_NICE calls niceness 0; 40 is -20
STATUS = Path("/proc/self/status")


def cores(text: str) -> frozenset[int]:
    """Return the cores that a list in the kernel's form names.

    >>> sorted(cores("0-2,5"))
    [0, 1, 2, 5]
    >>> cores("")
    frozenset()
    """
    found: set[int] = set()
    for span in text.split(",") if text else ():
        first, _, last = span.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def allowed() -> frozenset[int]:
    """Return the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def held_niceness() -> int:
    """Return the niceness of what waits: without the right to take it back, that of any engine."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    is_able = found is not None and bool(int(found[1], 16) >> CAP_SYS_NICE & 1)
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    is_allowed = limit >= NICE_ZERO - NICENESS or limit == resource.RLIM_INFINITY
    return HELD_NICENESS if is_able or is_allowed else NICENESS


def place(processes: Collection[int], where: Collection[int], niceness: int) -> None:
    """Move every thread of some processes to some cores (none: any of ours), with a niceness; one that ended is fine.

    Raises EngineUnplaced when none of the cores is there, or it is not allowed.
    """
    for thread in threads(processes):
        try:
            move(thread, where or allowed(), niceness)
        except ProcessLookupError:
            continue
        except OSError as error:
            raise EngineUnplaced(where, niceness, error.strerror or str(error)) from error


def move(thread: int, where: Collection[int], niceness: int) -> None:
    """Move one thread. Raises OSError."""
    os.sched_setaffinity(thread, where)
    if os.getpriority(os.PRIO_PROCESS, thread) != niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def threads(processes: Collection[int]) -> Iterator[int]:
    """Yield the threads of some processes."""
    for process in processes:
        with suppress(FileNotFoundError):
            yield from (int(thread.name) for thread in Path(f"/proc/{process}/task").iterdir())
