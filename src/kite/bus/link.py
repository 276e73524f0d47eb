"""One connection to the NATS server that comes back for ever, and tells whoever waits on it when it breaks."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TypeVar, cast

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kite.bus.address import servers
from kite.bus.errors import (
    BusClosed,
    BusForbidden,
    BusRefused,
    BusStalled,
    BusUnreachable,
    BusUntrusted,
    StreamMissing,
    StreamRefused,
)
from kite.bus.login import Login
from kite.bus.wire import Wire, forbidden, shut_out
from kite.errors import KiteError

CONNECT_S = 5.0
RECONNECT_WAIT_S = 0.2
RETRY_S = 0.2  # between two tries at something that the server cannot do yet
TRIES = 25  # RETRY_S apart: a server that has just started may not answer at once
PING_S = 5
PINGS_LOST = 2  # then the connection counts as dead
CLOSE_S = 2.0  # for the server to take what was sent last
CANCELS = 20  # CANCEL_S apart
CANCEL_S = 0.1
REQUEST_S = 5.0
API = "$JS.API"
NOT_FOUND = 404
UNAVAILABLE = 503

Answer = TypeVar("Answer")

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class NotNow(Exception):
    """The server did not answer, or cannot yet; the same request may work later. Never leaves kite.bus."""


class Link:
    """A NATS connection. Watchers are called with a reason each time it breaks, before it comes back.

    `url` names one server, or several of a cluster with commas between: one of those that answer is taken. Raises
    UsageError when it names none.
    """

    def __init__(self, url: str, login: Login | None = None) -> None:
        self.url = url
        self._servers = servers(url)
        self._login = login or Login()
        self.nc = Wire()
        self.sessions = 0
        self.is_closed = False
        self._up = asyncio.Event()
        self._watchers: list[Callable[[str], None]] = []
        self._guards: list[Callable[[str], None]] = []
        self._said = ""
        self._put_out: KiteError | None = None

    async def open(self, name: str, wait_s: float = CONNECT_S) -> None:
        """Connect as `name`. Raises BusUnreachable after `wait_s`, and at once BusRefused and BusUntrusted."""
        try:
            async with asyncio.timeout(wait_s):
                await self._connect(name)
        except (BusRefused, BusUntrusted):
            await self.close()
            raise
        except (TimeoutError, OSError, nats.errors.Error) as error:
            await self.close()
            raise BusUnreachable(self.url, wait_s) from error
        self._rise()

    async def _connect(self, name: str) -> None:
        nkey = self._login.nkey
        await self.nc.connect(
            self._servers,
            name=name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_put_out,
            reconnect_time_wait=cast("int", RECONNECT_WAIT_S),  # nats-py sleeps on it: a float is fine
            max_reconnect_attempts=-1,
            ping_interval=PING_S,
            max_outstanding_pings=PINGS_LOST,
            tls=self._login.tls,
            nkeys_seed_str=nkey.seed if nkey else None,
            inbox_prefix=self._login.inbox,
            pending_size=0,  # nothing is queued while disconnected: the publisher retries by itself, with the same id
        )

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands right now."""
        return self.nc.is_connected and not self.is_closed

    def _rise(self) -> None:
        self.sessions += 1
        self._up.set()

    async def _on_error(self, error: Exception) -> None:
        if (subject := forbidden(error)) is not None:
            self._forbid(subject)
        elif (closed := shut_out(error, self.url, self._login)) is None:
            self._tell(error)
        elif not self.sessions:  # in the middle of `open`: nats-py would try again for ever
            self.nc.give_up()
            raise closed
        elif self._said != str(closed):  # once: whoever runs the server may put it right, and the next try gets in
            self._said = str(closed)
            log.error("bus_shut", url=self.url, code=closed.code, error=str(closed), hint=closed.hint)

    def _forbid(self, subject: str) -> None:
        log.error("bus_forbidden", url=self.url, subject=subject)
        for guard in tuple(self._guards):
            guard(subject)

    def _tell(self, error: Exception) -> None:
        level = log.debug if isinstance(error, OSError) else log.warning  # a refused reconnect comes every 0.2 s
        level("bus_error", url=self.url, error=str(error))

    async def _on_disconnect(self) -> None:
        if self._up.is_set() and not self.is_closed:
            log.warning("bus_disconnected", url=self.url)
        if not self.is_closed:
            self._up.clear()
        self._alarm("disconnected")

    async def _on_reconnect(self) -> None:
        log.info("bus_reconnected", url=self.url)
        self._said = ""
        self._rise()

    async def _on_put_out(self) -> None:
        """Closed, and not by us: nats-py does that when the server says that it puts this process out."""
        if not self.is_closed and (error := self.nc.last_error) is not None:
            self._put_out = shut_out(error, self.url, self._login)
        await self._on_close()

    async def _on_close(self) -> None:
        self.is_closed = True
        self._up.set()  # wakes who waits for the connection, to find it closed
        self._alarm("closed")

    def _alarm(self, reason: str) -> None:
        for watcher in tuple(self._watchers):
            watcher(reason)

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Call `watcher(reason)` at every break."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[str], None]) -> None:
        """Stop calling `watcher`."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def guard(self, guard: Callable[[str], None]) -> None:
        """Call `guard(subject)`, in lower case, whenever the server forbids to publish or listen there."""
        self._guards.append(guard)

    async def ready(self, wait_s: float | None = None) -> None:
        """Wait until connected, for ever by default. Raises BusUnreachable after `wait_s`, BusClosed when closed."""
        try:
            async with asyncio.timeout(wait_s):
                await self._up.wait()
        except TimeoutError as error:
            raise BusUnreachable(self.url, wait_s or 0.0) from error
        self._demand_open()

    def _demand_open(self) -> None:
        if self.is_closed:
            raise self._put_out or BusClosed("the bus connection is closed")

    async def close(self) -> None:
        """Close for good, within a bounded time whatever the server does; safe to call twice.

        What was sent is given CLOSE_S to arrive; nothing is left running.
        """
        if self.is_closed:
            return
        await self._on_close()
        try:
            if self.nc.is_connected:
                with suppress(NotNow, OSError):
                    await self._unbroken(self.nc.flush(cast("int", CLOSE_S)))  # nats-py waits on it: a float is fine
        finally:  # also when cancelled
            self.nc.cut()
            await self.nc.close()
            await self._end()

    async def _end(self) -> None:
        """End what nats-py left running: a cancellation that its reconnect loop swallowed brings the client back."""
        for _ in range(CANCELS):
            if not (running := self.nc.running):
                return
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_S)
            self.nc.cut()
        log.error("bus_still_running", url=self.url, tasks=len(self.nc.running))

    async def listen(self, subject: str, on_message: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Call `on_message` for everything on `subject`, without a limit of pending messages: at a limit nats-py drops
        silently. Listen only to what is bounded by its own request.
        """
        return await self.nc.subscribe(  # pyright: ignore[reportUnknownMemberType] - nats-py leaves Future open
            subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish without waiting. Raises NotNow when disconnected; other nats errors are the caller's mistake."""
        self._demand_open()
        try:
            await self.nc.publish(subject, payload, reply=reply, headers=headers)
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError) as error:
            raise NotNow("disconnected") from error

    async def ask(self, subject: str, payload: bytes, wait_s: float = REQUEST_S) -> Msg:
        """Send a request and return the answer. Raises NotNow when none comes, at once when the connection breaks, and
        BusForbidden.
        """
        self._demand_open()
        return await self._unbroken(self.nc.request(subject, payload, timeout=wait_s), subject)

    async def _unbroken(self, call: Coroutine[object, None, Answer], subject: str = "") -> Answer:
        """Wait for what only this connection can bring. Raises NotNow when it does not, or the connection breaks."""
        broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_break(reason: str) -> None:
            if not broken.done():
                broken.set_result(reason)

        def on_forbidden(what: str) -> None:
            if what == subject.lower() and not broken.done():
                broken.set_exception(BusForbidden(self.url, subject))

        self.watch(on_break)
        self._guards.append(on_forbidden)
        request = asyncio.ensure_future(call)
        try:
            await asyncio.wait({request, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise NotNow(broken.result())
            return request.result()
        except nats.errors.Error as error:
            raise NotNow(str(error)) from error
        finally:
            self.unwatch(on_break)
            self._guards.remove(on_forbidden)
            request.cancel()

    async def patiently(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Try `call` again while it raises NotNow, at most TRIES times.

        Raises BusUnreachable then, BusStalled when the connection stands.
        """
        why = ""
        for _ in range(TRIES):
            try:
                return await call()
            except NotNow as error:
                why = str(error)
                await asyncio.sleep(RETRY_S)
        if self.is_connected:
            raise BusStalled(self.url, TRIES * RETRY_S, why)
        raise BusUnreachable(self.url, TRIES * RETRY_S)

    async def api(self, request: str, body: Mapping[str, object]) -> Mapping[str, object]:
        """Ask the JetStream API and return its answer.

        Raises StreamMissing for 404, StreamRefused for any other refusal, NotNow when it cannot answer yet.
        """
        answer = await self.ask(f"{API}.{request}", json.dumps(body).encode())
        reply = cast("dict[str, object]", json.loads(answer.data))
        if "error" not in reply:
            return reply
        refusal = cast("dict[str, object]", reply["error"])
        if refusal["code"] == UNAVAILABLE:
            raise NotNow(str(refusal.get("description")))
        if refusal["code"] == NOT_FOUND:
            raise StreamMissing(request.split(".")[2])
        raise StreamRefused(request, str(refusal.get("description")))
