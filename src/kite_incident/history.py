"""Histories as text: a ledger's rows as JSON lines, and back into a ledger that replays."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kite.ledger import Draft, Ledger
from kite.ledger import Row as LedgerRow

COLUMNS = ("event_id", "type", "subject", "occurred_us", "ledger_us", "trace_id", "bus_stream", "bus_epoch", "bus_seq")


def lines(rows: Iterable[LedgerRow]) -> Iterator[str]:
    """Yield one line of JSON per row; the chain's hashes are left out, they are made anew on the way back."""
    for row in rows:
        columns = {name: getattr(row, name) for name in COLUMNS}
        yield json.dumps({**columns, "event": json.loads(row.raw)}, ensure_ascii=False, separators=(",", ":"))


def restore(text: Iterable[str], url: str) -> None:
    """Append the rows that `lines` wrote to a new ledger. Raises the ledger's errors and ValueError for other text."""
    with Ledger.open(url) as ledger:
        ledger.append([_draft(json.loads(line)) for line in text])


def _draft(fields: dict[str, Any]) -> Draft:
    event = fields.pop("event")
    return Draft(**fields, raw=json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
