"""What a judge reads: rows of a ledger, by any name."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kite_schemas.model import Data


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
