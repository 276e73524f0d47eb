"""A network that can be cut: a TCP proxy before what a service talks to. `async with Proxy(port) as network:`."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 64 * 1024


class Proxy:
    """Forwards connections to a loopback port. While it is cut, everything waits and nobody is told.

    That is how a partition looks from inside: no reset, no refusal, only silence. What waited arrives after `mend`.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Break every connection; nothing is left running."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Let nothing pass any more."""
        self._whole.clear()

    def mend(self) -> None:
        """Let everything pass again, what has waited first."""
        self._whole.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            with suppress(OSError):  # nobody listens: the end of this connection tells
                far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self._target_port)
                await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))
        finally:
            writer.transport.abort()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Pass on what comes, and at last its end; an end at one side is one at both."""
        try:
            with suppress(ConnectionError):
                while chunk := await source.read(CHUNK_BYTES):
                    await self._whole.wait()
                    sink.write(chunk)
                    await sink.drain()
            await self._whole.wait()
        except asyncio.CancelledError:
            sink.transport.abort()
            raise
        sink.close()
