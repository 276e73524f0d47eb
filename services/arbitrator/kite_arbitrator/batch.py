"""One batch: inputs become rows, each directly followed by the decisions it caused. What is appended is built here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID, uuid5

from kite import clock, tracing
from kite.bus import Message
from kite.events import Composed, Origin, compose
from kite.ledger import Draft, Outgoing
from kite.trust import Keyring, Signature
from kite_arbitrator import core, routing
from kite_arbitrator.intake import Arrival, Doubted, Found, examine, repeatable
from kite_arbitrator.records import Row
from kite_arbitrator.state import State
from kite_schemas.envelope import Header, encode
from kite_schemas.ledger import DeadlineMissed, EventIdConflict, ProducerKeyAdded, Rejected
from kite_schemas.model import Data
from kite_schemas.why import Request

Clock = Callable[[int], int]
"""Takes the last ledger time and returns the next, in microseconds."""

TRACE_ID = slice(3, 35)
"""Where a traceparent has its trace id."""

LEDGER_SUBJECT = "ledger/fleet"


TRACES_MAX = 1_024
"""How many requests are remembered by their trace; the oldest leave."""


class Traces(dict[str, str]):
    """The traces of the last requests by id: what was put off and is decided at a tick belongs to its request's trace.

    They are not in the state, since no decision reads them; a new leader knows none, and decides the same.
    """

    def keep(self, header: Header) -> None:
        """Remember a request, and forget the oldest when there are too many."""
        if header.traceparent:
            self[header.id] = header.traceparent
        while len(self) > TRACES_MAX:
            del self[next(iter(self))]


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision at `pos`, and the monotonic clock when what it answers came in."""

    pos: int
    came_us: int


@dataclass(slots=True)
class Batch:
    """Grows by inputs; `state` is the state after all of them, `drafts` and `sends` are what to append.

    `known` are the bytes that the ledger has under the ids of the events to come; `keyring` takes in the
    keys among them.
    """

    state: State
    now: Clock
    origin: Origin
    bus_epoch: int
    keyring: Keyring
    known: dict[str, bytes] = field(default_factory=dict[str, bytes])
    traces: Traces = field(default_factory=Traces)
    came_us: int = field(default_factory=clock.mono_us)
    drafts: list[Draft] = field(default_factory=list[Draft])
    sends: list[Outgoing] = field(default_factory=list[Outgoing])
    decided: list[Decided] = field(default_factory=list[Decided])

    def take(self, arrival: Arrival) -> None:
        """Take in messages of the bus, in their order."""
        self.came_us = arrival.at_us
        for message, found in zip(arrival.messages, arrival.found, strict=True):
            self._take(message, found)

    def write(self, data: Data, message: Message | None = None) -> None:
        """Take in a row that the arbitrator itself writes, about a message or about nothing."""
        event = compose(LEDGER_SUBJECT, data, self.origin, event_id=self._place_id(message) if message else None)
        self.put(event, data, message)

    def announce(self, data: Data) -> None:
        """Take in a row that the arbitrator itself writes and tells the bus as well."""
        self.sends.append(Outgoing(draft=len(self.drafts), subject=routing.announced(data.TYPE, LEDGER_SUBJECT)))
        self.write(data)

    def missed(self, now_us: int) -> DeadlineMissed | None:
        """Return what to record of the decisions that are durable only at `now_us` of the monotonic clock: too late."""
        deadline_us = self.state.policy.arbitration.decision_deadline_us if self.state.policy else None
        late = [] if deadline_us is None else [one for one in self.decided if now_us - one.came_us > deadline_us]
        if deadline_us is None or not late:
            return None
        took_us = max(now_us - one.came_us for one in late)
        return DeadlineMissed(first=late[0].pos, last=late[-1].pos, took_us=took_us, deadline_us=deadline_us)

    def _take(self, message: Message, found: Found | Doubted | Rejected) -> None:
        if isinstance(found, Doubted):
            if self.known.get(found.event.header.id) == message.payload:
                return  # it was believed once, and the bus is read again
            found = examine(message, self.keyring)  # its key may have come before it, and is let in only here, in order
        if isinstance(found, Doubted):
            found = found.rejected
        if isinstance(found, Rejected):
            self.write(found, message)
            return
        header = found.event.header
        known = self.known.setdefault(header.id, message.payload)
        if known is message.payload:
            if isinstance(found.event.data, ProducerKeyAdded):
                self._admit(found.event.data)
            self._input(header, message.payload, found.event.data, message, found.signature)
        elif known != message.payload:
            self.write(EventIdConflict(stream=message.stream, seq=message.seq, event_id=header.id), message)

    def _admit(self, added: ProducerKeyAdded) -> None:
        """Let a key in from here on; for good once the batch is committed."""
        self.keyring = self.keyring.copy()
        self.keyring.admit(added)

    def _place_id(self, message: Message) -> str | None:
        """Return an id that depends on the message's place only: read again, it is the same row."""
        place = f"{message.stream}/{self.bus_epoch}/{message.seq}"
        return str(uuid5(UUID(self.state.ledger), place)) if repeatable(message) else None

    def put(self, event: Composed, data: Data, message: Message | None = None) -> None:
        """Take in an event that the arbitrator composed itself."""
        self._input(event.header, event.raw, data, message)

    def _input(
        self,
        header: Header,
        raw: bytes,
        data: Data | None,
        message: Message | None,
        signature: Signature | None = None,
    ) -> None:
        row = Row(
            pos=self.state.pos + 1,
            id=header.id,
            type=header.type,
            subject=header.subject,
            ledger_us=self.now(self.state.now_us),
            data=data,
        )
        if isinstance(data, Request):
            self.traces.keep(header)
        self._append(header, raw, row, message, signature)
        self.state, decisions = core.step(self.state, row)
        for decision in decisions:
            self._decision(header, decision)

    def _decision(self, cause: Header, decision: Row) -> None:
        assert decision.data is not None  # noqa: S101 # rules make typed decisions
        request: str | None = getattr(decision.data, "request", None)
        parent = cause.traceparent or self.traces.get(request or "")
        name = f"decide {decision.type}"
        attributes = {"kite.decision.id": decision.id, "kite.pos": decision.pos, "kite.event.type": decision.type}
        with tracing.span(name, parent=parent, attributes=attributes) as span:
            header = Header(
                id=decision.id,
                source=self.origin.source,
                type=decision.type,
                subject=decision.subject,
                time=clock.iso(decision.ledger_us),
                correlationid=request or cause.correlationid or cause.id,
                causationid=cause.id,
                traceparent=span.traceparent or parent,
                producer=self.origin.producer,
            )
        self._append(header, encode(header, decision.data), decision)
        subject = routing.destination(decision)
        self.sends.append(Outgoing(draft=len(self.drafts) - 1, subject=subject, traceparent=header.traceparent or ""))
        self.decided.append(Decided(decision.pos, self.came_us))

    def _append(
        self,
        header: Header,
        raw: bytes,
        row: Row,
        message: Message | None = None,
        signature: Signature | None = None,
    ) -> None:
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
                bus_epoch=self.bus_epoch if message else 0,
                bus_seq=message.seq if message else 0,
                key_id=signature.key_id if signature else "",
                signature=signature.value if signature else b"",
            )
        )
