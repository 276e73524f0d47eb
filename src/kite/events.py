"""Events on their way out: compose an envelope once, publish exactly those bytes."""

from dataclasses import dataclass

from uuid_utils import uuid7

from kite import clock
from kite.bus import Bus, evt_subject
from kite_schemas.envelope import Header, encode
from kite_schemas.model import Data


@dataclass(frozen=True, slots=True)
class Origin:
    """Who speaks: `source` is `kite/<service>/<instance>`, `producer` is `<service>@<version>`."""

    source: str
    producer: str


@dataclass(frozen=True, slots=True)
class Composed:
    """An event ready to be sent: its header, and the exact bytes that the ledger will hash."""

    header: Header
    raw: bytes


def new_id() -> str:
    """Return a fresh UUIDv7."""
    return str(uuid7())


def compose(
    subject: str,
    data: Data,
    origin: Origin,
    *,
    event_id: str | None = None,
    correlation: str | None = None,
    causation: str | None = None,
    traceparent: str | None = None,
) -> Composed:
    """Return the event that says `data` about `subject` (as in `instance/a`), occurring now."""
    header = Header(
        id=event_id or new_id(),
        source=origin.source,
        type=data.TYPE,
        subject=subject,
        time=clock.iso(clock.wall_us()),
        correlationid=correlation,
        causationid=causation,
        traceparent=traceparent,
        producer=origin.producer,
    )
    return Composed(header=header, raw=encode(header, data))


async def publish(bus: Bus, event: Composed) -> None:
    """Publish a fact or a request; returns when the bus has acknowledged it. Raises the bus's errors."""
    header = event.header
    headers = {"traceparent": header.traceparent} if header.traceparent else {}
    await bus.publish(evt_subject(header.type, header.subject), event.raw, event_id=header.id, headers=headers)
