"""What a judge reads: rows of a ledger, by any name."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kite_schemas.arbitration import OrderExpired
from kite_schemas.model import Data
from kite_schemas.why import Outcome
from kite_schemas.yoco import InstanceChanged, OrderFailed, State


class Row(Protocol):
    """A row of a ledger."""

    @property
    def pos(self) -> int:
        """Its position."""
        ...

    @property
    def id(self) -> str:
        """Id of its event."""
        ...

    @property
    def subject(self) -> str:
        """What its event is about."""
        ...

    @property
    def ledger_us(self) -> int:
        """Its ledger time."""
        ...

    @property
    def data(self) -> Data | None:
        """Its payload."""
        ...


Rows: TypeAlias = Sequence[Row]


def named(row: Row) -> str:
    """Return a row's place, type and subject."""
    return f"{row.pos} {row.data.TYPE if row.data else '?'} {row.subject}"


def closes(data: Data | None) -> str:
    """Return the order that a row ends."""
    match data:
        case Outcome(order=str(order), done=True) | OrderExpired(order=order):
            return order
        case _:
            return ""


def ends(data: Data | None) -> str:
    """Return the instance that has no process any more, from here on."""
    match data:
        case InstanceChanged(instance=name, to_state=State.ABSENT | State.FAILED):
            return name
        case OrderFailed(instance=name, state=State.ABSENT | State.FAILED):
            return name
        case OrderExpired(kind="start_ordered", target=target):
            return target.partition("/")[2]
        case _:
            return ""
