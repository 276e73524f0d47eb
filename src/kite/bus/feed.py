"""The inbox of one pull consumer: asks for batches, buffers them, and notices when the server has gone quiet.

At most one request is open, for one batch, and it is renewed only while the buffer holds less than a batch: memory is
bounded by two batches. An idle heartbeat that stays away, a deleted consumer or a broken connection loses the feed; its
owner then makes a new consumer.
"""

import asyncio
import json
from collections import deque

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kite.bus.link import API, Link, NotNow
from kite.bus.message import DESCRIPTION, STATUS, is_delivery

PULL_BYTES = 8 * 1024**2  # of one request; one message has at most 1 MiB
EXPIRES_S = 30.0
BEATS_LOST = 2.5  # heartbeats missed before the feed counts as dead
NS_PER_S = 1_000_000_000

_HEARTBEAT = "100"
_ENDED = frozenset({"404", "408"})  # nothing there, time is over: the request ended as agreed
_CONFLICT = "409"
_ENDED_TEXT = ("MaxBytes", "Batch Completed")  # 409 is these ends too, and every kind of broken consumer


class FeedLost(Exception):
    """The consumer or the connection is gone. Never leaves kite.bus."""


def pull_request(batch: int, idle_s: float) -> bytes:
    """Body of a pull request for `batch` messages with a heartbeat every `idle_s`."""
    expires_s = max(EXPIRES_S, 4 * idle_s)  # the server wants at least two heartbeats
    body = {
        "batch": batch,
        "max_bytes": PULL_BYTES,
        "expires": int(expires_s * NS_PER_S),
        "idle_heartbeat": int(idle_s * NS_PER_S),
    }
    return json.dumps(body).encode()


def ends_request(status: str, text: str) -> bool:
    """Tell the ordinary end of a request from a lost consumer."""
    return status in _ENDED or (status == _CONFLICT and any(end in text for end in _ENDED_TEXT))


class Feed:
    """Deliveries of `consumer` on `stream`, in the order the server sent them."""

    def __init__(self, link: Link, stream: str, consumer: str, *, batch: int, idle_s: float) -> None:
        self._link = link
        self._next = f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._batch = batch
        self._idle_s = idle_s
        self._inbox = link.nc.new_inbox()
        self._sub: Subscription | None = None
        self._buffer: deque[Msg] = deque()
        self._wake = asyncio.Event()
        self._owed = 0  # messages that the open request may still bring
        self._heard_s = 0.0
        self._lost: str | None = None

    async def open(self) -> None:
        """Listen and ask for the first batch."""
        self._link.watch(self.fail)
        self._sub = await self._link.listen(self._inbox, self._on_message)
        await self._request()

    async def close(self) -> None:
        """Stop listening; the consumer stays."""
        self._link.unwatch(self.fail)
        if self._sub is not None and not self._link.nc.is_closed:
            await self._sub.unsubscribe()

    def fail(self, reason: str) -> None:
        """Mark the feed as lost; what is buffered can still be taken."""
        self._lost = self._lost or reason
        self._wake.set()

    def drain(self) -> list[Msg]:
        """Take what is buffered, without waiting, at most one batch."""
        return [self._buffer.popleft() for _ in range(min(len(self._buffer), self._batch))]

    async def take(self) -> list[Msg]:
        """Wait for messages and return at least one, at most a batch. Raises FeedLost."""
        while not self._buffer:
            if self._lost is not None:
                raise FeedLost(self._lost)
            await self._renew()
            await self._listen()
        taken = self.drain()
        await self._renew()
        return taken

    async def _listen(self) -> None:
        self._wake.clear()
        silence_s = BEATS_LOST * self._idle_s
        quiet_s = asyncio.get_running_loop().time() - self._heard_s
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the wake-up.
            async with asyncio.timeout(max(silence_s - quiet_s, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            self.fail("no heartbeat")

    async def _renew(self) -> None:
        if self._owed == 0 and len(self._buffer) < self._batch and self._lost is None:
            await self._request()

    async def _request(self) -> None:
        self._owed = self._batch
        self._heard_s = asyncio.get_running_loop().time()
        try:
            await self._link.send(self._next, pull_request(self._batch, self._idle_s), reply=self._inbox)
        except NotNow as error:
            self.fail(str(error))

    async def _on_message(self, msg: Msg) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        if is_delivery(msg.reply):
            self._buffer.append(msg)
            self._owed = max(self._owed - 1, 0)
        else:
            headers = msg.headers or {}
            self._on_status(headers.get(STATUS, ""), headers.get(DESCRIPTION, ""))
        await self._renew()
        self._wake.set()

    def _on_status(self, status: str, text: str) -> None:
        if status == _HEARTBEAT:
            return
        if ends_request(status, text):
            self._owed = 0
        else:
            self.fail(f"{status} {text}".strip())
