"""Following the bus: what a request brings about, as it happens, and the whole of it from the ledger afterwards."""

import asyncio
import os
import pwd
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import structlog
from pydantic import ValidationError

from kite import __version__, clock, tracing
from kite.bus import DEC, EVT, Bus
from kite.errors import Fault, KiteError, Unreachable, UsageError
from kite.events import Composed, Origin, compose, new_id, publish
from kite.ledger import Reader, Row
from kite_cli.place import Address, bus_url, reading
from kite_schemas.envelope import Event, MalformedEvent, decode
from kite_schemas.model import Data
from kite_schemas.why import Request

CONNECT_S = 3.0
ANSWER_S = 10.0
"""The first decision about a request takes milliseconds; an arbitrator that was killed is back within two seconds."""

COMMIT_S = 10.0
"""A fact is on the bus a moment before it is in the ledger."""

POLL_S = 0.05

Payload = TypeVar("Payload", bound=Data)

log: structlog.stdlib.BoundLogger = structlog.get_logger()

See = Callable[[Event], bool]
"""Is shown every event; True ends the watch."""

Told = Callable[[Event], None]
"""Is told every event of a request as it happens."""

Closes = Callable[[Event], bool]
"""Says whether an event of a request is its last one."""


class ArbitratorSilent(Unreachable):
    """Nobody decided about the request."""

    code = "arbitrator_silent"

    def __init__(self, request: str, wait_s: float) -> None:
        super().__init__(
            f"no arbitrator answers request {request} within {wait_s:g} s",
            hint="it is kept on the bus and will be decided; `kite status` says whether the fleet runs",
        )
        self.request = request
        self.wait_s = wait_s


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
    fleet: Address, subject: str, request: Request, closes: Closes, *, limit_s: float, on_event: Told | None = None
) -> Story:
    """Publish a request under a trace of its own, follow it until `closes`, and return it as the ledger has it.

    `limit_s` is how long it may stay silent between two events. Raises NoFleet, BusUnreachable, ArbitratorSilent and
    StillOpen. Being cancelled ends the following only.
    """
    url = bus_url(fleet)
    async with await Bus.connect(url, "cli", wait_s=CONNECT_S) as bus:
        with tracing.span(f"request {request.TYPE}", kind="producer") as span:
            event = _compose(subject, request, span.traceparent or _fresh_trace())
            after = await ends(bus)
            await publish(bus, event)
            last = await _followed(bus, after, event.header.id, closes, limit_s=limit_s, on_event=on_event)
    return await _story(fleet, event, last)


async def enter(fleet: Address, subject: str, request: Request) -> Story:
    """Publish a request that is taken as it is, and return it once the ledger has it.

    Raises NoFleet, BusUnreachable, and ArbitratorSilent when the ledger does not get it.
    """
    url = bus_url(fleet)
    async with await Bus.connect(url, "cli", wait_s=CONNECT_S) as bus:
        with tracing.span(f"request {request.TYPE}", kind="producer") as span:
            event = _compose(subject, request, span.traceparent or _fresh_trace())
            await publish(bus, event)
    return await _story(fleet, event, event.header.id)


async def _story(fleet: Address, event: Composed, last: str) -> Story:
    traceparent = event.header.traceparent or ""
    return Story(event.header.id, traceparent[3:35], await _recorded(fleet, event.header.id, last))


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
    bus: Bus, after: Mapping[str, int], request: str, closes: Closes, *, limit_s: float, on_event: Told | None
) -> str:
    """Return the id of the event that closed the request."""
    seen: list[Event] = []
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(ANSWER_S)

    def see(event: Event) -> bool:
        if event.header.correlationid != request:
            return False
        limit.reschedule(loop.time() + limit_s)
        seen.append(event)
        if on_event is not None:
            on_event(event)
        return closes(event)

    try:
        async with limit:
            await watch(bus, after, see)
    except TimeoutError:
        if not seen:
            raise ArbitratorSilent(request, ANSWER_S) from None
        raise StillOpen(request, limit_s, seen[-1].header.type) from None
    return seen[-1].header.id


async def _recorded(fleet: Address, request: str, last: str) -> tuple[Fact, ...]:
    """Return the rows of a request up to its last event, once that is in the ledger."""
    with reading(fleet) as reader:
        end = await _row(reader, last)
        begin = await _row(reader, request)
        rows = ((row, decode(row.raw)) for row in reader.rows(begin.pos, end.pos))
        return tuple(
            Fact(row.pos, row.ledger_us, event)
            for row, event in rows
            if request in (event.header.correlationid, event.header.id)
        )


async def _row(reader: Reader, event_id: str) -> Row:
    until_us = clock.mono_us() + int(COMMIT_S * clock.US_PER_S)
    while (row := reader.by_event_id(event_id)) is None:
        if clock.mono_us() >= until_us:
            raise ArbitratorSilent(event_id, COMMIT_S)
        await asyncio.sleep(POLL_S)
    return row


def _compose(subject: str, request: Data, traceparent: str) -> Composed:
    origin = Origin(source=f"kite/cli/{actor()}", producer=f"cli@{__version__}")
    try:
        return compose(subject, request, origin, event_id=new_id(), traceparent=traceparent)
    except ValidationError as error:
        raise UsageError(f"{subject!r} cannot be the subject of a request") from error


def _fresh_trace() -> str:
    """Return the root of a new trace, for when no collector is told of it here: what it brings about has one id."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
