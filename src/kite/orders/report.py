"""What a worker says: facts of an order under ids that do not change, and facts that nobody ordered."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID, uuid5

import structlog

from kite import tracing
from kite.bus import Bus, PublishFailed
from kite.events import Composed, Origin, compose, publish
from kite.orders.task import Received
from kite_schemas.envelope import decode
from kite_schemas.why import Fact, Order, Outcome

RETRY_S = 1.0  # the bus has tried for longer than that by itself
LAST_STEP = "done"

log: structlog.stdlib.BoundLogger = structlog.get_logger()

SubjectOf = Callable[[Outcome], str]


def fact_id(order_id: str, step: str, attempt: int) -> str:
    """Return the id of a fact of an order: the same step of the same attempt never gets another one.

    >>> fact_id("00000000-0000-4000-8000-000000000001", "done", 1)
    '0cd69d7b-f4fe-5ad2-9e88-5f189d2cbc8e'
    """
    return str(uuid5(UUID(order_id), f"{step}/{attempt}"))


@dataclass(frozen=True, slots=True)
class Reporter:
    """Composes and publishes in the name of one worker."""

    bus: Bus
    origin: Origin
    subject_of: SubjectOf | None = None

    def outcome(self, received: Received[Order], outcome: Outcome, step: str) -> Composed:
        """Return a fact of an order, about what the order is about unless `subject_of` says otherwise."""
        place = {"order": received.id, "attempt": received.attempt, "done": step == LAST_STEP}
        return compose(
            self.subject_of(outcome) if self.subject_of else received.header.subject,
            outcome.model_copy(update=place),
            self.origin,
            event_id=fact_id(received.id, step, received.attempt),
            correlation=received.header.correlationid,
            causation=received.id,
            traceparent=tracing.traceparent(),
        )

    async def say(self, subject: str, fact: Fact, correlation: str | None) -> None:
        """Publish a fact that belongs to no order."""
        event = compose(subject, fact, self.origin, correlation=correlation, traceparent=tracing.traceparent())
        await self.deliver(event)

    async def repeat(self, raw: bytes) -> None:
        """Publish an event again, byte for byte."""
        await self.deliver(Composed(header=decode(raw).header, raw=raw))

    async def deliver(self, event: Composed) -> None:
        """Publish until the bus has it, however long the bus is away or full. Raises PublishFailed for good."""
        while True:
            try:
                return await publish(self.bus, event)
            except PublishFailed as error:
                if not error.retryable:
                    raise
                log.warning("fact_waits", type=event.header.type, id=event.header.id, reason=str(error))
            await asyncio.sleep(RETRY_S)
