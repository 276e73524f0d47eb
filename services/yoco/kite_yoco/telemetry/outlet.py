"""Windows on their way to the bus: sent without waiting, and dropped where they would have to wait."""

import asyncio

import structlog

from kite.bus import Bus, tel_subject
from kite.errors import KiteError
from kite.events import Composed

IN_FLIGHT_MAX = 8  # 0.8 s of windows; the publisher that orders share has room for 256
ACK_S = 1.0  # then a window is old news

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Outlet:
    """Publishes the windows of one node. `sent` were acknowledged; `dropped` were not sent, or not acknowledged."""

    def __init__(self, bus: Bus, node: str) -> None:
        self.sent = 0
        self.dropped = 0
        self._bus = bus
        self._subject = tel_subject(node)
        self._flights: set[asyncio.Task[None]] = set()
        self._dropping = 0

    @property
    def open(self) -> bool:
        """Whether the bus is there and keeps up."""
        return self._bus.is_connected and len(self._flights) < IN_FLIGHT_MAX

    def put(self, window: Composed) -> None:
        """Send a window, or drop it. Returns at once."""
        if not self.open:
            self._drop("full" if self._bus.is_connected else "disconnected")
            return
        flight = asyncio.create_task(self._send(window))
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)

    async def close(self) -> None:
        """Give up what is still on its way."""
        flights = tuple(self._flights)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def _send(self, window: Composed) -> None:
        try:
            async with asyncio.timeout(ACK_S):
                await self._bus.publish(self._subject, window.raw, window.header.id)
        except (KiteError, TimeoutError) as error:
            self._drop(str(error) or "unacknowledged")
        else:
            self._arrived()

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        self._dropping += 1
        if self._dropping == 1:  # once a stretch: windows come ten times a second
            log.warning("telemetry_dropping", reason=reason)

    def _arrived(self) -> None:
        self.sent += 1
        if self._dropping:
            log.info("telemetry_resumed", dropped=self._dropping)
            self._dropping = 0
