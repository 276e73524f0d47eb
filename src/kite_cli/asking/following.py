"""Following the bus: what a request brings about, as it happens, and the whole of it from the ledger afterwards."""

import asyncio
import os
import pwd
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import structlog
from pydantic import ValidationError

from kite import __version__, tracing
from kite.bus import DEC, EVT, Bus
from kite.clock import US_PER_S
from kite.errors import Fault, KiteError, UsageError
from kite.events import Composed, Origin, compose, new_id
from kite.ledger import Row
from kite_cli.asking.sending import ArbitratorSilent, committed, line
from kite_cli.place import Address, reading
from kite_schemas.envelope import Event, MalformedEvent, decode
from kite_schemas.model import Data
from kite_schemas.why import Order, Request

ANSWER_S = 10.0
"""The first decision about a request takes milliseconds; an arbitrator that was killed is back within two seconds."""

Payload = TypeVar("Payload", bound=Data)
First = TypeVar("First")
Second = TypeVar("Second")

log: structlog.stdlib.BoundLogger = structlog.get_logger()

See = Callable[[Event], bool]
"""Is shown every event; True ends the watch."""

Told = Callable[[Event], None]
"""Is told every event of a request as it happens."""

Closes = Callable[[Event], bool]
"""Says whether an event of a request is its last one."""


class StillOpen(KiteError):
    """The request was taken up, and nothing more is heard of it."""

    code = "still_open"
    fault = Fault.OPERATOR

    def __init__(self, request: str, wait_s: float, last: str) -> None:
        super().__init__(
            f"nothing was heard of request {request} for {wait_s:g} s; the last was {last}",
            hint="it goes on in the fleet: `kite timeline --steps` shows how far it is",
        )
        self.request = request
        self.wait_s = wait_s
        self.last = last


@dataclass(frozen=True, slots=True)
class Fact:
    """One event of a request with its place in the ledger."""

    pos: int
    ledger_us: int
    event: Event


@dataclass(frozen=True, slots=True)
class Story:
    """A request from its own row to the one that closed it, as the ledger has it."""

    request: str
    trace_id: str
    facts: tuple[Fact, ...]

    def last(self, kind: type[Payload]) -> Payload | None:
        """Return the payload of the last event of a type, None without one."""
        return next((data for data in self._payloads() if isinstance(data, kind)), None)

    def at_us(self, kind: type[Data]) -> int | None:
        """Return the ledger time of the last event of a type, None without one."""
        found = (fact.ledger_us for fact in reversed(self.facts) if isinstance(fact.event.data, kind))
        return next(found, None)

    def _payloads(self) -> Iterator[Data | None]:
        return (fact.event.data for fact in reversed(self.facts))

    @property
    def took_us(self) -> int:
        """From the request to its end, in ledger time."""
        return self.facts[-1].ledger_us - self.facts[0].ledger_us


def actor() -> str:
    """Return who asks: the user of this process."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid-{os.getuid()}"


def make(kind: type[Request], reason: str, **fields: object) -> Request:
    """Return a request in the name of this user. Raises UsageError for a value that its field does not take."""
    try:
        return kind.model_validate({"actor": actor(), "reason": reason, **fields})
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in found["loc"])
        raise UsageError(f"{where} cannot be {found['input']!r}: {found['msg']}") from error


async def ask(
    fleet: Address,
    subject: str,
    request: Request,
    closes: Closes,
    *,
    limit_s: float,
    answer_s: float = ANSWER_S,
    on_event: Told | None = None,
) -> Story:
    """Publish a request under a trace of its own, follow it until `closes`, and return it as the ledger has it.

    `answer_s` is how long it may stay silent once the ledger has it, `limit_s` between two events; while an order is
    open, as long as that one lives.
    Raises what `line` and its `Line` raise, and StillOpen. Being cancelled ends the following only.
    """
    async with line(fleet) as sent:
        with tracing.span(f"request {request.TYPE}", kind="producer") as span:
            event = _compose(subject, request, span.traceparent or _fresh_trace())
            after = await ends(sent.bus)
            after_pos = await sent.send(event)
            row, last = await _both(
                sent.taken(event, after_pos),
                _followed(
                    sent.bus, after, event.header.id, closes, answer_s=answer_s, limit_s=limit_s, on_event=on_event
                ),
            )
    return await _story(fleet, event, row, last)


async def enter(fleet: Address, subject: str, request: Request) -> Story:
    """Publish a request that is taken as it is, and return it once the ledger has it.

    Raises what `line` and its `Line` raise.
    """
    async with line(fleet) as sent:
        with tracing.span(f"request {request.TYPE}", kind="producer") as span:
            event = _compose(subject, request, span.traceparent or _fresh_trace())
            row = await sent.taken(event, await sent.send(event))
    return await _story(fleet, event, row, event.header.id)


async def _both(first: Coroutine[None, None, First], second: Coroutine[None, None, Second]) -> tuple[First, Second]:
    """Run two coroutines side by side; the first error ends the other."""
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _story(fleet: Address, event: Composed, begin: Row, last: str) -> Story:
    """Return the rows of a request from its own up to its last event, once that is in the ledger."""
    traceparent, request = event.header.traceparent or "", event.header.id
    with reading(fleet) as reader:
        end = await committed(reader, last)
        facts = tuple(
            Fact(row.pos, row.ledger_us, found)
            for row in reader.rows(begin.pos, end.pos)
            if request in ((found := decode(row.raw)).header.correlationid, found.header.id)
        )
    return Story(request, traceparent[3:35], facts)


async def ends(bus: Bus) -> Mapping[str, int]:
    """Return the last sequence number of both streams: what comes after is what is new."""
    return {stream: (await bus.stream(stream)).last_seq for stream in (EVT, DEC)}


async def watch(bus: Bus, after: Mapping[str, int], see: See) -> None:
    """Show every event after `after` to `see`, each stream in its order, until it returns True."""
    tasks = [asyncio.create_task(_feed(bus, stream, seq, see)) for stream, seq in after.items()]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(bus: Bus, stream: str, after_seq: int, see: See) -> None:
    async with aclosing(bus.follow(stream, after_seq=after_seq)) as messages:
        async for message in messages:
            try:
                event = decode(message.payload)
            except MalformedEvent as error:  # the arbitrator records it as rejected; here it only must not disturb
                log.warning("event_malformed", stream=stream, seq=message.seq, reason=str(error))
                continue
            if see(event):
                return


async def _followed(
    bus: Bus,
    after: Mapping[str, int],
    request: str,
    closes: Closes,
    *,
    answer_s: float,
    limit_s: float,
    on_event: Told | None,
) -> str:
    """Return the id of the event that closed the request."""
    seen: list[Event] = []
    closing: list[Event] = []
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(answer_s)

    def see(event: Event) -> bool:
        if event.header.correlationid != request or closing:  # the other stream may go on for a moment
            return False
        limit.reschedule(max(limit.when() or 0.0, loop.time() + patience_s(event, limit_s)))
        seen.append(event)
        if on_event is not None:
            on_event(event)
        if closes(event):
            closing.append(event)
        return bool(closing)

    try:
        async with limit:
            await watch(bus, after, see)
    except TimeoutError:
        if not seen:
            raise ArbitratorSilent(request, answer_s) from None
        raise StillOpen(request, limit_s, seen[-1].header.type) from None
    return closing[0].header.id


def patience_s(event: Event, limit_s: float) -> float:
    """Return how long silence after an event is normal: a start may take as long as its order lives."""
    return limit_s if not isinstance(event.data, Order) else max(limit_s, event.data.ttl_us / US_PER_S + ANSWER_S)


def _compose(subject: str, request: Data, traceparent: str) -> Composed:
    origin = Origin(source=f"kite/cli/{actor()}", producer=f"cli@{__version__}")
    try:
        return compose(subject, request, origin, event_id=new_id(), traceparent=traceparent)
    except ValidationError as error:
        raise UsageError(f"{subject!r} cannot be the subject of a request") from error


def _fresh_trace() -> str:
    """Return the root of a new trace, for when no collector is told of it here: what it brings about has one id."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
