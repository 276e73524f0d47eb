"""Faults in the process that passes their points: it hurts whom it is told to, itself last."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kite.testing.crash import Fuse, Port, arm, die
from kite.testing.faults.plan import Fault, Role, Victim

BUS, DATABASE = "bus", "database"
SIGNALS = {BUS: signal.SIGKILL, DATABASE: signal.SIGQUIT}  # PostgreSQL: "immediate", as a crash
CUT = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name LIKE 'kite-ledger-%'"""


@dataclass(frozen=True, slots=True)
class Yard:
    """The folder of one run: each process has its log there, and writes down what it did. `url` names the ledger."""

    folder: Path
    url: str

    @property
    def journal(self) -> Path:
        """The worker's journal."""
        return self.folder / "orders.sqlite"

    @property
    def world(self) -> Path:
        """What the worker's handlers did."""
        return self.folder / "world"

    def log(self, name: str) -> Path:
        """The log of a process."""
        return self.folder / f"{name}.log"

    def note(self, name: str, pid: int | None) -> None:
        """Write down which process somebody is, or that there is none now."""
        beside = self._pid(name).with_suffix(".new")
        beside.write_text(f"{pid or ''}")
        beside.rename(self._pid(name))

    def kill(self, name: str) -> None:
        """Kill somebody, if it is there."""
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int(self._pid(name).read_text()), SIGNALS.get(name, signal.SIGKILL))

    def spend(self, index: int) -> None:
        """Write down that a fault happens now."""
        self._spent(index).touch()

    def is_spent(self, index: int) -> bool:
        """Tell whether a fault has happened."""
        return self._spent(index).exists()

    def _spent(self, index: int) -> Path:
        return self.folder / f"{index}.spent"

    def _pid(self, name: str) -> Path:
        return self.folder / f"{name}.pid"


def wire(role: Role, faults: Sequence[Fault], ports: Sequence[Port], yard: Yard) -> None:
    """Arm this process with those faults of a plan that are its own and have not happened."""
    for index, fault in enumerate(faults):
        if fault.role is role and not yard.is_spent(index):
            arm(Fuse(fault.point, fault.count), ports, partial(_hurt, index, fault, yard))


def _hurt(index: int, fault: Fault, yard: Yard) -> None:
    yard.spend(index)
    for victim in fault.victims:
        match victim:
            case Victim.SELF:
                die()
            case Victim.PEER:
                yard.kill(Role.WORKER if fault.role is Role.ARBITRATOR else Role.ARBITRATOR)
            case Victim.BUS:
                yard.kill(BUS)
            case Victim.DATABASE:
                yard.kill(DATABASE)
            case Victim.SESSION:
                _cut(yard.url)


def _cut(url: str) -> None:
    from kite.testing.ledger import attempt

    attempt(url, CUT)
