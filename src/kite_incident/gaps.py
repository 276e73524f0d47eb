"""The gaps of the bus, and who has acknowledged them. Pure over rows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kite.ledger import Row
from kite_schemas.arbitration import GapAcknowledged
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusGap

TYPES = frozenset({BusGap.TYPE, GapAcknowledged.TYPE})
"""The rows that gaps are told by: the others may be left out, and are ignored."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages `first` to `last` of a stream that are lost; `acknowledged_pos` is 0 until somebody has looked at it."""

    pos: int
    at_us: int
    stream: str
    first: int
    last: int
    acknowledged_pos: int = 0
    actor: str = ""
    reason: str = ""


def gaps(rows: Iterable[Row]) -> list[Gap]:
    """Return the gaps by position; an acknowledgement is for all those before it that are still open."""
    found: list[Gap] = []
    for row in rows:
        data = decode(row.raw).data if row.type in TYPES else None
        match data:
            case BusGap(stream=stream, first=first, last=last):
                found.append(Gap(row.pos, row.ledger_us, stream, first, last))
            case GapAcknowledged():
                found = [_closed(gap, row.pos, data) for gap in found]
            case _:
                pass
    return found


def _closed(gap: Gap, pos: int, data: GapAcknowledged) -> Gap:
    if gap.acknowledged_pos:
        return gap
    return replace(gap, acknowledged_pos=pos, actor=data.actor, reason=data.reason)
