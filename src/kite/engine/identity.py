"""Which process is meant: an id alone is given to another one sooner or later."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kite_schemas.model import Count, Model, Text

BOOT = Path("/proc/sys/kernel/random/boot_id")
ENDED = frozenset("ZXx")  # zombie, dead: <man 5 proc>
_STATE = 0  # of the fields behind the name
_GROUP = 2
_SESSION = 3
_STARTED = 19


class Identity(Model):
    """One process of one boot of one machine; `started` in ticks of the kernel's clock since that boot."""

    pid: Count
    started: Count
    boot: Text

    @property
    def lives(self) -> bool:
        """Whether this very process has not ended."""
        return identity(self.pid) == self


def identity(pid: int) -> Identity | None:
    """Return who has this process id now, None when nobody has, or only what has ended already."""
    fields = stat(pid)
    if fields is None or fields[_STATE] in ENDED:
        return None
    return Identity(pid=pid, started=int(fields[_STARTED]), boot=boot())


@cache
def boot() -> str:
    """Return the id of this boot of the machine."""
    return BOOT.read_text(encoding="ascii").strip()


def stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/PID/stat` from the third on (the name before may hold blanks and brackets)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def states() -> dict[int, str]:
    """Return the states of the processes of each group, one letter a process, by the group's id."""
    found: dict[int, str] = {}
    for _, fields in everybody():
        group = int(fields[_GROUP])
        found[group] = found.get(group, "") + fields[_STATE]
    return found


def sessions() -> dict[int, list[int]]:
    """Return the processes of each session by its id."""
    found: dict[int, list[int]] = {}
    for pid, fields in everybody():
        found.setdefault(int(fields[_SESSION]), []).append(pid)
    return found


def everybody() -> Iterator[tuple[int, list[str]]]:
    """Yield the id and the fields of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := stat(int(entry.name))) is not None:
            yield int(entry.name), fields
