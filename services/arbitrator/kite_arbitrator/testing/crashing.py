"""The arbitrator as a process that is hurt at chosen points of its writing and publishing."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps

from kite.ledger import Row
from kite.ledger.postgres import PostgresStore
from kite.ledger.sqlite import SqliteStore
from kite.runtime import run
from kite.testing.crash import Port
from kite.testing.faults.fuses import Yard, wire
from kite.testing.faults.plan import Fault, Role, Step
from kite_arbitrator import standby
from kite_arbitrator.relay import Relay
from kite_arbitrator.service import serve
from kite_arbitrator.settings import Settings

LEASE_US = 300_000
"""How long a lease on a server stands still before it is taken over: there is one candidate here, and it waits."""


class Write:
    """The passages of an append that no method of its own stands for; they are called from its rows."""

    @staticmethod
    def half() -> None:
        """Half of the rows are on their way."""

    @staticmethod
    def whole() -> None:
        """All of them are, and nothing is committed."""


PORTS = (
    Port(Write, "half", Step.MID_WRITE, None),
    Port(Write, "whole", Step.BEFORE_COMMIT, None),
    Port(SqliteStore, "write", None, Step.AFTER_COMMIT),
    Port(PostgresStore, "write", None, Step.AFTER_COMMIT),
    Port(Relay, "_publish", Step.BEFORE_PUBLISH, Step.AFTER_PUBLISH),
)
"""The points of an arbitrator. The ledger's are passed on its thread."""


class Rows(list[Row]):
    """Rows of an append, which tell how far they are."""

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows."""
        for index, row in enumerate(super().__iter__()):
            if index == len(self) // 2:
                Write.half()
            yield row
        Write.whole()


def lead(settings: dict[str, object], yard: Yard, faults: Sequence[Fault]) -> None:
    """Be an arbitrator as a process, until it is told to end, or dies of a fault."""
    standby.LEASE_US = LEASE_US
    for store in (SqliteStore, PostgresStore):
        store.write = _telling(store.write)
    wire(Role.ARBITRATOR, faults, PORTS, yard)
    told = Settings.model_validate(settings)
    sys.exit(run("arbitrator", told.log_level, serve(told)))


def _telling(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def told(self: object, rows: Sequence[Row], *args: object, **kwargs: object) -> None:
        write(self, Rows(rows) if rows else rows, *args, **kwargs)

    return told
