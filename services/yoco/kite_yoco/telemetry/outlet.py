"""Windows on their way to the bus: fast, dropped where they would have to wait; or reliable, kept until it has them."""

import asyncio
from collections import deque
from collections.abc import Sequence

import structlog

from kite.bus import Bus, BusClosed, Outcome, Outgoing, PublishFailed, tel_subject
from kite.bus.publish import acked_prefix
from kite.errors import KiteError
from kite.events import Composed
from kite_schemas.arbitration import Transport, TransportChanged

IN_FLIGHT_MAX = 8  # 0.8 s of windows; the publisher that orders share has room for 256
ACK_S = 1.0  # then a window is old news, unless it travels reliably
WAITING_MAX = 600  # windows: a minute, well inside the two minutes in which the bus knows an id again
IN_HAND_MAX = 64  # windows in one burst: the publisher is shared with orders here as well
RETRY_S = 0.5  # the bus has tried for longer than that by itself

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Outlet:
    """Publishes the windows of one node. `sent` were acknowledged; `dropped` were not sent, or not acknowledged.

    It begins fast. Whatever the transport, no window overtakes one that still waits.
    """

    def __init__(self, bus: Bus, node: str) -> None:
        self.sent = 0
        self.dropped = 0
        self.transport = Transport.FAST
        self._bus = bus
        self._subject = tel_subject(node)
        self._flights: set[asyncio.Task[None]] = set()
        self._waiting: deque[Composed] = deque()
        self._delivery: asyncio.Task[None] | None = None
        self._dropping = 0

    @property
    def open(self) -> bool:
        """Whether the bus is there and keeps up."""
        return self._bus.is_connected and len(self._flights) < IN_FLIGHT_MAX

    @property
    def delivering(self) -> bool:
        """Whether windows wait for the bus to have them."""
        return self._delivery is not None and not self._delivery.done()

    def put(self, window: Composed) -> None:
        """Send a window, keep it, or drop one. Returns at once."""
        if self.transport is Transport.RELIABLE or self.delivering:
            self._keep(window)
        elif self.open:
            flight = asyncio.create_task(self._send(window))
            self._flights.add(flight)
            flight.add_done_callback(self._flights.discard)
        else:
            self._drop("full" if self._bus.is_connected else "disconnected")

    def switch(self, boot: str, changed: TransportChanged, _id: str = "") -> None:
        """Let windows travel as decided, if it was decided for this start (`boot`) of yoco."""
        if changed.boot != boot:
            log.info("transport_ignored", boot=changed.boot, own=boot)
            return
        log.info("transport_changed", transport=changed.transport, reason=changed.why.reason)
        self.transport = changed.transport

    async def close(self) -> None:
        """Give up what is still on its way."""
        tasks = [*self._flights, *([self._delivery] if self._delivery else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, window: Composed) -> None:
        try:
            async with asyncio.timeout(ACK_S):
                await self._bus.publish(self._subject, window.raw, window.header.id)
        except (KiteError, TimeoutError) as error:
            self._drop(str(error) or "unacknowledged")
        else:
            self._arrived()

    def _keep(self, window: Composed) -> None:
        """Queue a window; the oldest that waits gives way."""
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self._drop("full")
        self._waiting.append(window)
        if not self.delivering:
            self._delivery = asyncio.create_task(self._deliver())

    async def _deliver(self) -> None:
        """Send what waits, in order, until nothing does; first what went fast has to be over."""
        if self._flights:
            await asyncio.wait(self._flights)
        while self._waiting:
            burst = [self._waiting.popleft() for _ in range(min(IN_HAND_MAX, len(self._waiting)))]
            await self._hand_over(burst)

    async def _hand_over(self, burst: list[Composed]) -> None:
        """Publish until each was acknowledged, again under the same id, or cannot be. Closed, the bus takes no more."""
        while burst:
            items = [Outgoing(self._subject, window.raw, window.header.id) for window in burst]
            try:
                outcomes = await self._bus.publish_many(items)
            except BusClosed as error:
                self._drop(str(error), len(burst))
                return
            burst = burst[self._settled(outcomes) :]
            if burst:
                await asyncio.sleep(RETRY_S)

    def _settled(self, outcomes: Sequence[Outcome]) -> int:
        """Count the windows at the head of a burst that need nothing more."""
        acked = len(acked_prefix(outcomes))
        if acked:
            self._arrived(acked)
        failed = outcomes[acked] if acked < len(outcomes) else None
        if isinstance(failed, PublishFailed) and not failed.retryable:
            self._drop(str(failed))
            return acked + 1
        return acked

    def _drop(self, reason: str, windows: int = 1) -> None:
        if not self._dropping:  # once a stretch: windows come ten times a second
            log.warning("telemetry_dropping", reason=reason)
        self.dropped += windows
        self._dropping += windows

    def _arrived(self, windows: int = 1) -> None:
        self.sent += windows
        if self._dropping:
            log.info("telemetry_resumed", dropped=self._dropping)
            self._dropping = 0
