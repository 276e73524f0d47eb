"""An order in hand: waiting in its lane, or being carried out."""

import asyncio
from dataclasses import dataclass

from kite.bus import Work
from kite.orders.task import Received
from kite.orders.verdict import deadline_us
from kite_schemas.envelope import Event, Header
from kite_schemas.why import Order


class NoOrder(ValueError):
    """The event is well formed and is not an order."""


@dataclass(slots=True)
class Flight:
    """One order. `work` is its newest delivery: None for one that comes from the journal and was not redelivered."""

    header: Header
    order: Order
    raw: bytes
    published_us: int
    work: Work | None = None
    expired: bool = False
    limit: asyncio.Timeout | None = None

    @property
    def id(self) -> str:
        """Id of the order."""
        return self.header.id

    @property
    def until_us(self) -> int:
        """Wall time by which it has to be over."""
        return deadline_us(self.published_us, self.order)

    def received(self, attempt: int) -> Received[Order]:
        """Return what the handler gets."""
        return Received(self.id, attempt, self.order, self.header, self.until_us)

    def expire(self) -> None:
        """The arbitrator gave it up: stop it where it is."""
        self.expired = True
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


def read(event: Event, raw: bytes, published_us: int, work: Work | None = None) -> Flight:
    """Return the order that an event is, with its bytes. Raises NoOrder."""
    if not isinstance(event.data, Order):
        raise NoOrder(f"{event.header.type} is no order that this version knows")
    return Flight(event.header, event.data, raw, published_us, work)
