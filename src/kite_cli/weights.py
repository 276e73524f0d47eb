"""What a blend meant over time: every promotion, who asked for it, and how every member's share moved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kite.ledger import Reader
from kite.ledger import Row as LedgerRow
from kite_cli.blends import ANCHOR, shares
from kite_cli.output import Record, moment, percent
from kite_schemas.envelope import decode
from kite_schemas.model import PPM
from kite_schemas.upcycle import BlendPromoted, Member, RollbackRequested
from kite_schemas.why import Request

HISTORY = ("POS", "TIME", "VERSION", "BY", "WHO", "WHY", "MEMBERS")
WEIGHTS = ("POS", "VERSION", "MEMBER", "WEIGHT", "", "MOVED")
BASE = "(base)"
BAR_CHARS = 25
FULL, EMPTY = "█", "·"


@dataclass(frozen=True, slots=True)
class Promotion:
    """One time that a blend came to mean a version: by an injection or a rollback, and who asked for it and why."""

    pos: int
    at_us: int
    version: str
    how: str
    actor: str
    reason: str
    members: tuple[Member, ...]
    base_weight_ppm: int

    @property
    def weights(self) -> dict[str, int]:
        """The weight of every member by name, and of the base, in ppm: together 1 000 000."""
        return {**{m.adapter.name: m.weight_ppm for m in self.members}, BASE: self.base_weight_ppm}

    @property
    def anchors(self) -> frozenset[str]:
        """Names of the members whose weight is locked."""
        return frozenset(m.adapter.name for m in self.members if m.anchored)


def history(reader: Reader, blend: str) -> list[Promotion]:
    """Return every promotion of a blend, the oldest first; empty for a name that was never promoted."""
    rows = reader.find(types=(BlendPromoted.TYPE,))
    return [_promotion(reader, row, data) for row, data in _promoted(rows) if data.blend == blend]


def _promoted(rows: Iterator[LedgerRow]) -> Iterator[tuple[LedgerRow, BlendPromoted]]:
    for row in rows:
        data = decode(row.raw).data
        if isinstance(data, BlendPromoted):
            yield row, data


def _promotion(reader: Reader, row: LedgerRow, data: BlendPromoted) -> Promotion:
    asked = reader.by_event_id(data.request)
    request = decode(asked.raw).data if asked else None
    told = request if isinstance(request, Request) else None
    return Promotion(
        pos=row.pos,
        at_us=row.ledger_us,
        version=data.resident.version,
        how="rollback" if isinstance(told, RollbackRequested) else "injection",
        actor=told.actor if told else "",
        reason=told.reason if told else "",
        members=data.members,
        base_weight_ppm=data.base_weight_ppm,
    )


def moved(promotions: Sequence[Promotion]) -> Iterator[tuple[Promotion, Mapping[str, int]]]:
    """Yield each promotion with how much every share moved by it, in ppm: of members that left, joined or stayed.

    The base had everything before the first one.
    """
    before = {BASE: PPM}
    for promotion in promotions:
        now = promotion.weights
        names = [*promotion.weights, *(name for name in before if name not in now)]
        yield promotion, {name: now.get(name, 0) - before.get(name, 0) for name in names}
        before = now


def weight_records(promotions: Sequence[Promotion]) -> list[Record]:
    """Return the weights as JSON, one object for each promotion."""
    return [
        {
            "kind": "weights",
            "pos": promotion.pos,
            "at": moment(promotion.at_us),
            "at_us": promotion.at_us,
            "version": promotion.version,
            "by": promotion.how,
            "weights_ppm": {name: ppm for name, ppm in promotion.weights.items() if name != BASE},
            "base_weight_ppm": promotion.base_weight_ppm,
            "anchored": sorted(promotion.anchors),
            "moved_ppm": {name: by for name, by in changes.items() if name != BASE},
            "base_moved_ppm": changes[BASE],
        }
        for promotion, changes in moved(promotions)
    ]


def weight_rows(promotions: Sequence[Promotion]) -> list[tuple[str, ...]]:
    """Return the weights as cells: a row for each member at each promotion, with a bar for its share."""
    return [row for promotion, changes in moved(promotions) for row in _rows(promotion, changes)]


def _rows(promotion: Promotion, changes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    head = (str(promotion.pos), promotion.version)
    for name, by in changes.items():
        ppm = promotion.weights.get(name)
        called = f"{name}{ANCHOR if name in promotion.anchors else ''}"
        yield (*head, called, "left" if ppm is None else percent(ppm), bar(ppm or 0), _moved(by))
        head = ("", "")


def bar(ppm: int) -> str:
    """Draw a share.

    >>> bar(600_000)
    '███████████████··········'
    """
    full = round(ppm * BAR_CHARS / PPM)
    return FULL * full + EMPTY * (BAR_CHARS - full)


def _moved(ppm: int) -> str:
    return f"{'+' if ppm > 0 else '−'}{percent(abs(ppm))}" if ppm else ""  # noqa: RUF001 # a minus, as it is printed


def history_records(promotions: Sequence[Promotion]) -> list[Record]:
    """Return the promotions as JSON."""
    return [
        {
            "kind": "promotion",
            "pos": one.pos,
            "at": moment(one.at_us),
            "at_us": one.at_us,
            "version": one.version,
            "by": one.how,
            "actor": one.actor,
            "reason": one.reason,
            "members": [member.model_dump(mode="json") for member in one.members],
            "base_weight_ppm": one.base_weight_ppm,
        }
        for one in promotions
    ]


def history_rows(promotions: Sequence[Promotion]) -> list[tuple[str, ...]]:
    """Return the promotions as cells."""
    return [
        (
            str(one.pos),
            moment(one.at_us),
            one.version,
            one.how,
            one.actor,
            one.reason,
            shares(one.members, one.base_weight_ppm),
        )
        for one in promotions
    ]
