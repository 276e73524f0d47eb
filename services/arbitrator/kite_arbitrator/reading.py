"""From stored rows to what the core reads."""

from kite.ledger import Row as LedgerRow
from kite_arbitrator.records import Row
from kite_schemas.envelope import decode
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.registry import TYPES
from kite_schemas.telemetry import Window

TICK = Tick()

LASTING = frozenset(TYPES) - {Tick.TYPE, Window.TYPE}
"""The types of the rows that stay in the state: what windows said is forgotten when a new leader begins."""


def read(row: LedgerRow) -> Row:
    """Return a ledger row as the core sees it. Raises MalformedEvent for bytes that are no event."""
    return Row(
        pos=row.pos,
        id=row.event_id,
        type=row.type,
        subject=row.subject,
        ledger_us=row.ledger_us,
        data=_payload(row),
    )


def _payload(row: LedgerRow) -> Data | None:
    # Most rows of a quiet fleet are ticks, which say nothing but their time: decoding them would cost 20 times as much.
    return TICK if row.type == Tick.TYPE else decode(row.raw).data
