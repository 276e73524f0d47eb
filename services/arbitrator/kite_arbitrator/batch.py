"""One batch: inputs become rows, each directly followed by the decisions it caused. What is appended is built here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID, uuid5

from kite import clock, tracing
from kite.bus import Message
from kite.events import Composed, Origin, compose, new_id
from kite.ledger import Draft, Outgoing
from kite_arbitrator import core
from kite_arbitrator.routing import destination
from kite_arbitrator.state import Row, State
from kite_schemas.envelope import Event, Header, encode
from kite_schemas.ledger import EventIdConflict, Rejected
from kite_schemas.model import Data

Clock = Callable[[int], int]
"""Takes the last ledger time and returns the next, in microseconds."""

TRACE_ID = slice(3, 35)
"""Where a traceparent has its trace id."""

LEDGER_SUBJECT = "ledger/fleet"


@dataclass(slots=True)
class Batch:
    """Grows by inputs; `state` is the state after all of them, `drafts` and `sends` are what to append."""

    state: State
    now: Clock
    origin: Origin
    drafts: list[Draft] = field(default_factory=list[Draft])
    sends: list[Outgoing] = field(default_factory=list[Outgoing])
    decided: int = 0

    def take(self, message: Message, found: Event | Rejected, known: bytes | None, bus_epoch: int) -> None:
        """Take in one message: `known` are the bytes that the ledger has under the event's id, if it has any."""
        if isinstance(found, Rejected):
            self.write(found, message, bus_epoch, derived=True)
        elif known is None:
            self._input(found.header, message.payload, found.data, message, bus_epoch)
        elif known != message.payload:
            conflict = EventIdConflict(stream=message.stream, seq=message.seq, event_id=found.header.id)
            self.write(conflict, message, bus_epoch, derived=True)

    def write(self, data: Data, message: Message | None = None, bus_epoch: int = 0, *, derived: bool = False) -> None:
        """Take in a row that the arbitrator itself writes; a `derived` id depends on the message's place only."""
        place = f"{message.stream}/{bus_epoch}/{message.seq}" if message else ""
        event_id = str(uuid5(UUID(self.state.ledger), place)) if derived else new_id()
        event = compose(LEDGER_SUBJECT, data, self.origin, event_id=event_id)
        self.put(event, data, message, bus_epoch)

    def put(self, event: Composed, data: Data, message: Message | None = None, bus_epoch: int = 0) -> None:
        """Take in an event that the arbitrator composed itself."""
        self._input(event.header, event.raw, data, message, bus_epoch)

    def _input(self, header: Header, raw: bytes, data: Data | None, message: Message | None, bus_epoch: int) -> None:
        row = Row(
            pos=self.state.pos + 1,
            id=header.id,
            type=header.type,
            subject=header.subject,
            ledger_us=self.now(self.state.now_us),
            data=data,
        )
        self._append(header, raw, row, message, bus_epoch)
        self.state, decisions = core.step(self.state, row)
        for decision in decisions:
            self._decision(header, decision)

    def _decision(self, cause: Header, decision: Row) -> None:
        assert decision.data is not None  # noqa: S101 # rules make typed decisions
        name = f"decide {decision.type}"
        attributes = {"kite.decision.id": decision.id, "kite.pos": decision.pos, "kite.event.type": decision.type}
        with tracing.span(name, parent=cause.traceparent, attributes=attributes) as span:
            header = Header(
                id=decision.id,
                source=self.origin.source,
                type=decision.type,
                subject=decision.subject,
                time=clock.iso(decision.ledger_us),
                correlationid=getattr(decision.data, "request", None) or cause.correlationid or cause.id,
                causationid=cause.id,
                traceparent=span.traceparent or cause.traceparent,
                producer=self.origin.producer,
            )
        self._append(header, encode(header, decision.data), decision)
        self.sends.append(
            Outgoing(draft=len(self.drafts) - 1, subject=destination(decision), traceparent=header.traceparent or "")
        )
        self.decided += 1

    def _append(self, header: Header, raw: bytes, row: Row, message: Message | None = None, bus_epoch: int = 0) -> None:
        self.drafts.append(
            Draft(
                event_id=row.id,
                type=row.type,
                subject=row.subject,
                occurred_us=clock.parse_us(header.time),
                ledger_us=row.ledger_us,
                raw=raw,
                trace_id=(header.traceparent or "")[TRACE_ID],
                bus_stream=message.stream if message else "",
                bus_epoch=bus_epoch if message else 0,
                bus_seq=message.seq if message else 0,
            )
        )
