"""Histories for tests: what a story of the core saw and decided, as rows of a real ledger."""

from collections.abc import Iterable

from kite.clock import iso
from kite.ledger import Draft, Ledger
from kite_arbitrator.state import Row
from kite_schemas.envelope import Header, encode


def record(rows: Iterable[Row], url: str) -> None:
    """Append the rows of a story to the ledger at `url`, which is made; a decision's cause is the input before it."""
    drafts: list[Draft] = []
    cause: str | None = None
    for row in rows:
        assert row.data is not None  # noqa: S101 # a story has typed rows only
        if row.data.KIND != "decision":
            cause = row.id
        drafts.append(_draft(row, cause))
    with Ledger.open(url) as ledger:
        ledger.append(drafts)


def _draft(row: Row, cause: str | None) -> Draft:
    assert row.data is not None  # noqa: S101 # as above
    request = getattr(row.data, "request", None)
    header = Header(
        id=row.id,
        source="kite/test/1",
        type=row.type,
        subject=row.subject,
        time=iso(row.ledger_us),
        correlationid=request if isinstance(request, str) else None,
        causationid=cause if row.data.KIND == "decision" else getattr(row.data, "order", None),
        producer="test@0",
    )
    return Draft(
        event_id=row.id,
        type=row.type,
        subject=row.subject,
        occurred_us=row.ledger_us,
        ledger_us=row.ledger_us,
        raw=encode(header, row.data),
    )
