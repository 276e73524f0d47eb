"""From stored rows to what the core reads."""

from kite.ledger import Row as LedgerRow
from kite_arbitrator.state import Row
from kite_schemas.envelope import Header, decode


def read(row: LedgerRow) -> tuple[Header, Row]:
    """Return a ledger row's header and the row as the core sees it. Raises MalformedEvent for bytes that are none."""
    event = decode(row.raw)
    return event.header, Row(
        pos=row.pos,
        id=row.event_id,
        type=row.type,
        subject=row.subject,
        ledger_us=row.ledger_us,
        data=event.data,
    )
