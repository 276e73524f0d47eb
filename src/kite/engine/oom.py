"""How often the kernel has ended a process of our memory group because there was no memory: of control groups only.

The signal is SIGKILL like anybody's, so that only the counter tells. Version 2 has it in `memory.events`, version 1 in
`memory.oom_control` <admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst>.
"""

import re
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def kills() -> int | None:
    """Return the counter, None where the kernel keeps none."""
    for path in counters():
        try:
            found = _KILLS.search(path.read_text(encoding="ascii"))
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


@cache
def counters() -> tuple[Path, ...]:
    """Return where the counter may stand: in our own group as named, or at the root of what a container sees."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()
    return tuple(path for line in lines for path in named(line))


def named(line: str) -> tuple[Path, ...]:
    """Return the files that one line of `/proc/self/cgroup` names.

    >>> [str(path) for path in named("0::/a")]
    ['/sys/fs/cgroup/a/memory.events', '/sys/fs/cgroup/memory.events']
    >>> [str(path) for path in named("4:memory:/")]
    ['/sys/fs/cgroup/memory/memory.oom_control', '/sys/fs/cgroup/memory/memory.oom_control']
    >>> named("8:pids:/")
    ()
    """
    _, controllers, group = line.split(":", 2)
    below = group.lstrip("/")
    if not controllers:
        return (ROOT / below / "memory.events", ROOT / "memory.events")
    if "memory" in controllers.split(","):
        return (ROOT / "memory" / below / "memory.oom_control", ROOT / "memory" / "memory.oom_control")
    return ()
