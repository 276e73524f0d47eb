"""What of the bus did not come in: gaps and who has acknowledged them, other buses, and what was refused. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kite.ledger import Row
from kite_schemas.arbitration import GapAcknowledged
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusEpochChanged, BusGap, EpochEnd, EventIdConflict, Rejected

TYPES = frozenset({BusGap.TYPE, GapAcknowledged.TYPE})
"""The rows that gaps are told by."""

EVERY = TYPES | {BusEpochChanged.TYPE, Rejected.TYPE, EventIdConflict.TYPE}
"""The rows that all of it is told by: the others may be left out, and are ignored."""

CONFLICT = EventIdConflict.TYPE.split(".")[2]


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


@dataclass(frozen=True, slots=True)
class Epoch:
    """A stream that was not the one read up to `seq`, and was read again from its start as `bus_epoch`."""

    pos: int
    at_us: int
    stream: str
    bus_epoch: int
    seq: int
    why: EpochEnd


@dataclass(frozen=True, slots=True)
class Refused:
    """Messages that did not become rows of their own, for one reason."""

    code: str
    count: int
    first_pos: int
    last_pos: int


@dataclass(frozen=True, slots=True)
class Holes:
    """Gaps and epochs by position, refusals by code."""

    gaps: list[Gap]
    epochs: list[Epoch]
    refused: list[Refused]


def gaps(rows: Iterable[Row]) -> list[Gap]:
    """Return the gaps by position; an acknowledgement is for all those before it that are still open."""
    return holes(rows).gaps


def holes(rows: Iterable[Row]) -> Holes:
    """Return everything of the bus that did not come in."""
    found, epochs = list[Gap](), list[Epoch]()
    refused = dict[str, Refused]()
    for row in rows:
        data = decode(row.raw).data if row.type in EVERY else None
        match data:
            case BusGap(stream=stream, first=first, last=last):
                found.append(Gap(row.pos, row.ledger_us, stream, first, last))
            case GapAcknowledged():
                found = [_closed(gap, row.pos, data) for gap in found]
            case BusEpochChanged(stream=stream, bus_epoch=bus_epoch, seq=seq, why=why):
                epochs.append(Epoch(row.pos, row.ledger_us, stream, bus_epoch, seq, why))
            case Rejected(code=code):
                refused[code] = _more(refused.get(code), code, row.pos)
            case EventIdConflict():
                refused[CONFLICT] = _more(refused.get(CONFLICT), CONFLICT, row.pos)
            case _:
                pass
    return Holes(found, epochs, [refused[code] for code in sorted(refused)])


def _closed(gap: Gap, pos: int, data: GapAcknowledged) -> Gap:
    if gap.acknowledged_pos:
        return gap
    return replace(gap, acknowledged_pos=pos, actor=data.actor, reason=data.reason)


def _more(so_far: Refused | None, code: str, pos: int) -> Refused:
    return replace(so_far, count=so_far.count + 1, last_pos=pos) if so_far else Refused(code, 1, pos, pos)
