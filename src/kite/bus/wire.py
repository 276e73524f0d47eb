"""The client of nats-py as KITE uses it, and what its errors mean."""

import asyncio
import re
import ssl

from nats.aio.client import Client

from kite.bus.errors import BusRefused, BusUntrusted
from kite.bus.login import Login

_TASKS = ("_reconnection_task", "_reading_task", "_flusher_task", "_ping_interval_task")  # of nats-py's client

_NOT_LET_IN = ("authorization violation", "authentication expired")
_FORBIDDEN = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"')


class Plain(OSError):
    """The server offers no TLS, and it has to be shown who it is."""


class Wire(Client):
    """The client of nats-py, for four things that it does: it goes without TLS when whoever answers says so; it closes
    a connection politely and so waits for a peer that may never read again; it sends after a reconnect what it had
    still not sent before, ahead of what is tried again; and its reconnect loop goes on when it swallows a cancellation.
    """

    async def _process_info(self, info: dict[str, object], initial_connection: bool = False) -> None:
        if initial_connection and "tls" in self.options and not info.get("tls_required"):
            raise Plain("the server offers no TLS")
        await super()._process_info(info, initial_connection)  # pyright: ignore[reportUnknownMemberType] - nats-py's dict

    async def _process_op_err(self, e: Exception) -> None:
        if self.is_connected:
            self.cut()
        await super()._process_op_err(e)

    def cut(self) -> None:
        """Drop the connection, and what is not sent yet."""
        self._pending, self._pending_data_size = [], 0
        writer = getattr(self._transport, "_io_writer", None)
        if isinstance(writer, asyncio.StreamWriter):
            writer.transport.abort()

    def give_up(self) -> None:
        """Drop a connection that never stood: after a failed handshake nobody is told that it is closed."""
        self.cut()
        self._transport = None

    @property
    def running(self) -> set[asyncio.Task[None]]:
        """The tasks of the connection that have not ended."""
        found = (getattr(self, name) for name in _TASKS)
        return {task for task in found if isinstance(task, asyncio.Task) and not task.done()}


def forbidden(error: Exception) -> str | None:
    """Return the subject, in lower case, that the server does not let this process use; None for any other error."""
    found = _FORBIDDEN.search(str(error))
    return found[1] if found else None


def shut_out(error: Exception, url: str, login: Login) -> BusRefused | BusUntrusted | None:
    """Return what keeps a process out however often it tries, None for an error that may heal by itself."""
    if isinstance(error, ssl.SSLError | Plain):
        return BusUntrusted(url, str(error))
    if any(text in str(error).lower() for text in _NOT_LET_IN):
        return BusRefused(url, str(error), login.public)
    return None
