"""A simulated history as the rows of a real ledger, so that it can be stored, replayed and explained like any other."""

from collections import Counter
from collections.abc import Iterator

from kite import clock
from kite.bus import EVT, TEL
from kite.events import Origin
from kite.ledger import Draft
from kite_arbitrator.records import Row
from kite_arbitrator.simulation.run import History, payload
from kite_schemas.envelope import Header, encode
from kite_schemas.telemetry import Window
from kite_schemas.why import Decision, LedgerRow

BUS_EPOCH = 1
WORLD = Origin(source="kite/simulation/1", producer="simulation@1")
ARBITRATOR = Origin(source="kite/arbitrator/leader", producer="simulation@1")


def drafts(history: History) -> Iterator[Draft]:
    """Yield every row as it would be appended; streams are counted from 1, as on a bus of its own."""
    places: Counter[str] = Counter()
    cause = ""
    for row, occurred_us in zip(history.rows, history.arbitrator.occurred_us, strict=True):
        decided = isinstance(row.data, Decision)
        stream = "" if decided or isinstance(row.data, LedgerRow) else _stream(row)
        places[stream] += 1
        yield Draft(
            event_id=row.id,
            type=row.type,
            subject=row.subject,
            occurred_us=occurred_us,
            ledger_us=row.ledger_us,
            raw=_raw(row, occurred_us, cause if decided else None),
            bus_stream=stream,
            bus_epoch=BUS_EPOCH if stream else 0,
            bus_seq=places[stream] if stream else 0,
        )
        cause = cause if decided else row.id


def _stream(row: Row) -> str:
    return TEL if isinstance(row.data, Window) else EVT


def _raw(row: Row, occurred_us: int, cause: str | None) -> bytes:
    origin = ARBITRATOR if isinstance(row.data, Decision | LedgerRow) else WORLD
    header = Header(
        id=row.id,
        source=origin.source,
        type=row.type,
        subject=row.subject,
        time=clock.iso(occurred_us),
        correlationid=getattr(row.data, "request", None) or cause,
        causationid=cause,
        producer=origin.producer,
    )
    return encode(header, payload(row))
