"""What an engine of an embedded fleet wrote: the end of its log, and what it adds."""

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from kite.errors import Fault, KiteError, MissingPath

FOLLOW_POLL_S = 0.2
LOGS = Path("state/yoco/logs")
FORMER = ".former.log"


class NoLog(KiteError):
    """The instance has written nothing that is still there."""

    code = "no_log"
    fault = Fault.USER

    def __init__(self, instance: str, folder: Path, known: list[str]) -> None:
        listed = ", ".join(known) or "none"
        super().__init__(f"no log of {instance} in {folder}", hint=f"there are logs of: {listed}")
        self.instance = instance
        self.known = known


def find(directory: Path, instance: str, *, former: bool) -> Path:
    """Return the log of an instance, or of its process before this one. Raises MissingPath and NoLog."""
    folder = directory / LOGS
    if not folder.is_dir():
        raise MissingPath(
            f"no engines' logs in {folder}",
            hint="`kite up` writes them in its --dir; elsewhere they are in `logs` of the yoco's KITE_STATE_DIR",
        )
    found = folder / f"{instance}{FORMER if former else '.log'}"
    if Path(instance).name != instance or not found.is_file():
        raise NoLog(instance, folder, _known(folder, former=former))
    return found


def _known(folder: Path, *, former: bool) -> list[str]:
    names = (path.name for path in folder.glob("*.log") if path.name.endswith(FORMER) is former)
    return sorted(name.removesuffix(FORMER if former else ".log") for name in names)


def last(log: Path, lines: int) -> list[str]:
    """Return the last lines of a log, without their ends."""
    with _opened(log) as stream:
        return [line.rstrip("\n") for line in deque(stream, maxlen=lines)]


def added(log: Path) -> Iterator[str]:
    """Return every line behind the present end of a log as it is written; it never ends by itself.

    A process that is started anew has a new file, which is read from its start.
    """
    stream = _opened(log)
    stream.seek(0, os.SEEK_END)
    return _added(log, stream)


def _added(log: Path, stream: TextIO) -> Iterator[str]:
    part = ""
    while True:
        part += stream.readline()
        if part.endswith("\n"):
            yield part.rstrip("\n")
            part = ""
        elif _replaced(log, stream):
            stream.close()
            stream, part = _opened(log), ""
        else:
            time.sleep(FOLLOW_POLL_S)


def _opened(log: Path) -> TextIO:
    return log.open(encoding="utf-8", errors="replace")


def _replaced(log: Path, stream: TextIO) -> bool:
    """Tell whether the name means another file than the one that is read."""
    try:
        return log.stat().st_ino != os.fstat(stream.fileno()).st_ino
    except FileNotFoundError:  # between two processes
        return False
