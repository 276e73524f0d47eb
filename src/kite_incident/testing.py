"""Histories for tests: what a story of the core saw and decided, as rows of a real ledger."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from kite.clock import iso
from kite.events import new_id
from kite.ledger import Draft, Ledger
from kite.ledger import Row as LedgerRow
from kite.trust import Signer
from kite_arbitrator.records import Row
from kite_schemas.envelope import Header, encode
from kite_schemas.ledger import Checkpointed, Created, ProducerKeyAdded, sealed
from kite_schemas.model import Data
from kite_schemas.yoco import ChannelSampled

STEP_US = 1_000_000


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


class Book:
    """A ledger whose rows real keys have signed, in a database at `url`: each call appends a row and returns it."""

    def __init__(self, ledger: Ledger, name: str, operator: Signer) -> None:
        """Use `new` or `of`."""
        self.id = name
        self._ledger = ledger
        self._operator = operator

    @classmethod
    def new(cls, url: str, operator: Signer) -> Self:
        """Make a ledger, with its first row."""
        book = cls(Ledger.open(url), new_id(), operator)
        book.put(Created(ledger=book.id, format=1))
        return book

    @classmethod
    def of(cls, url: str, name: str, operator: Signer) -> Self:
        """Go on with a ledger that is there."""
        return cls(Ledger.open(url), name, operator)

    @property
    def rows(self) -> list[LedgerRow]:
        """Every row so far."""
        return list(self._ledger.rows())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger.close()

    def let_in(self, source: str, signer: Signer, by: Signer | None = None) -> LedgerRow:
        """Add a key that the operator (else `by`) has signed for."""
        added = ProducerKeyAdded(actor="operator", source=source, public_key=signer.public.hex())
        return self.put(added, signer=by or self._operator, source="kite/cli/operator", bus="KITE_EVT")

    def fact(self, number: int, signer: Signer | None = None, node: str = "a") -> LedgerRow:
        """Add what yoco of a node says, signed or not."""
        data = ChannelSampled(node=node, instances=number)
        return self.put(data, f"node/{node}", signer=signer, source=f"kite/yoco/{node}", bus="KITE_EVT")

    def checkpoint(self, signer: Signer, pos: int | None = None) -> LedgerRow:
        """Sign for the row at the end, or claim its hash for another position."""
        head = self._ledger.head
        pos = head.pos if pos is None else pos
        signature = signer.sign(sealed(self.id, pos, head.hash.hex())).value.hex()
        return self.put(
            Checkpointed(ledger=self.id, pos=pos, hash=head.hash.hex(), key_id=signer.key_id, signature=signature)
        )

    def put(
        self,
        data: Data,
        subject: str = "ledger/fleet",
        *,
        signer: Signer | None = None,
        source: str = "kite/arbitrator/1",
        bus: str = "",
    ) -> LedgerRow:
        """Add an event."""
        pos = self._ledger.head.pos + 1
        at_us = pos * STEP_US
        header = Header(id=new_id(), source=source, type=data.TYPE, subject=subject, time=iso(at_us), producer="test@0")
        raw = encode(header, data)
        signature = signer.sign(raw) if signer else None
        draft = Draft(
            event_id=header.id,
            type=header.type,
            subject=subject,
            occurred_us=at_us,
            ledger_us=at_us,
            raw=raw,
            bus_stream=bus,
            bus_epoch=1 if bus else 0,
            bus_seq=pos if bus else 0,
            key_id=signature.key_id if signature else "",
            signature=signature.value if signature else b"",
        )
        (row,) = self._ledger.append([draft])
        return row


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
