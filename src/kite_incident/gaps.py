"""What of the bus did not come in: gaps and who has acknowledged them, other buses, and what was refused. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from kite.ledger import Row
from kite_schemas.arbitration import GapAcknowledged
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusEpochChanged, BusGap, EpochEnd, EventIdConflict, Rejected

OPENED = frozenset({BusGap.TYPE, BusEpochChanged.TYPE, GapAcknowledged.TYPE})
"""The rows that tell what has to be acknowledged, and what was."""

EVERY = OPENED | {Rejected.TYPE, EventIdConflict.TYPE}
"""The rows that all of it is told by: the others may be left out, and are ignored."""

CONFLICT = EventIdConflict.TYPE.split(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Something of a stream that may be missing; `acknowledged_pos` is 0 until somebody has looked at it."""

    pos: int
    at_us: int
    stream: str
    acknowledged_pos: int = 0
    actor: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(Hole):
    """Messages `first` to `last` are lost."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch(Hole):
    """The stream was not the one read up to `seq`, and was read again from its start as `bus_epoch`."""

    bus_epoch: int
    seq: int
    why: EpochEnd


AnyHole = TypeVar("AnyHole", bound=Hole)


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

    @property
    def open(self) -> list[Hole]:
        """Those that nobody has acknowledged, by position."""
        return sorted((one for one in (*self.gaps, *self.epochs) if not one.acknowledged_pos), key=lambda one: one.pos)


def holes(rows: Iterable[Row]) -> Holes:
    """Return everything of the bus that did not come in; an acknowledgement is for all before it that is still open."""
    found, epochs = list[Gap](), list[Epoch]()
    refused = dict[str, Refused]()
    for row in rows:
        data = decode(row.raw).data if row.type in EVERY else None
        match data:
            case BusGap(stream=stream, first=first, last=last):
                found.append(Gap(pos=row.pos, at_us=row.ledger_us, stream=stream, first=first, last=last))
            case GapAcknowledged():
                found, epochs = _closed(found, row.pos, data), _closed(epochs, row.pos, data)
            case BusEpochChanged():
                epochs.append(_epoch(row, data))
            case Rejected(code=code):
                refused[code] = _more(refused.get(code), code, row.pos)
            case EventIdConflict():
                refused[CONFLICT] = _more(refused.get(CONFLICT), CONFLICT, row.pos)
            case _:
                pass
    return Holes(found, epochs, [refused[code] for code in sorted(refused)])


def _epoch(row: Row, data: BusEpochChanged) -> Epoch:
    return Epoch(
        pos=row.pos,
        at_us=row.ledger_us,
        stream=data.stream,
        bus_epoch=data.bus_epoch,
        seq=data.seq,
        why=data.why,
    )


def _closed(found: list[AnyHole], pos: int, data: GapAcknowledged) -> list[AnyHole]:
    return [
        one if one.acknowledged_pos else replace(one, acknowledged_pos=pos, actor=data.actor, reason=data.reason)
        for one in found
    ]


def _more(so_far: Refused | None, code: str, pos: int) -> Refused:
    return replace(so_far, count=so_far.count + 1, last_pos=pos) if so_far else Refused(code, 1, pos, pos)
