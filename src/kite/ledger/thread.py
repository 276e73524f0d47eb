"""The ledger for asynchronous code: one thread of its own, so that fsync never stops the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from kite.ledger.ledger import Ledger
from kite.ledger.rows import Cursor, Draft, Head, Lease, Outgoing, Route, Row, Send

T = TypeVar("T")


class AsyncLedger:
    """A `Ledger` that lives on one thread; calls run there one after the other, in the order they were made.

    A call that is cancelled after it began runs to its end: a cancelled append may be in the ledger; `head` knows.
    """

    def __init__(self, pool: ThreadPoolExecutor, ledger: Ledger) -> None:
        self._pool = pool
        self._ledger = ledger

    @classmethod
    async def open(cls, url: str, *, holder: str | None = None, seen: Lease | None = None) -> Self:
        """See `Ledger.open`."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="kite-ledger")
        opening = pool.submit(partial(Ledger.open, url, holder=holder, seen=seen))
        try:
            return cls(pool, await asyncio.wrap_future(opening))
        except BaseException:
            pool.submit(_discard, opening)
            pool.shutdown(wait=False)
            raise

    @property
    def head(self) -> Head:
        """The end of the ledger as of the last append that is done."""
        return self._ledger.head

    async def append(
        self,
        drafts: Sequence[Draft],
        *,
        sends: Sequence[Outgoing] = (),
        cursors: Sequence[Cursor] = (),
        routes: Sequence[Route] | None = None,
        sent_pos: int = 0,
    ) -> list[Row]:
        """See `Ledger.append`."""
        return await self.run(
            partial(Ledger.append, drafts=drafts, sends=sends, cursors=cursors, routes=routes, sent_pos=sent_pos)
        )

    async def known(self, event_ids: Sequence[str]) -> dict[str, bytes]:
        """See `Ledger.known`."""
        return await self.run(lambda ledger: ledger.known(event_ids))

    async def cursor(self, stream: str) -> Cursor | None:
        """See `Ledger.cursor`."""
        return await self.run(lambda ledger: ledger.cursor(stream))

    async def pending(self, limit: int, after_pos: int = 0) -> list[Send]:
        """See `Ledger.pending`."""
        return await self.run(lambda ledger: ledger.pending(limit, after_pos))

    async def sent(self, up_to_pos: int) -> None:
        """See `Ledger.sent`."""
        await self.run(lambda ledger: ledger.sent(up_to_pos))

    async def renew(self) -> None:
        """See `Ledger.renew`."""
        await self.run(Ledger.renew)

    async def run(self, work: Callable[[Ledger], T]) -> T:
        """Call `work` with the ledger on its thread, say to fold `ledger.rows()`; nothing else runs there meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, self._ledger)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what was begun, give the ledger to the next writer, and end the thread."""
        await self.run(Ledger.close)
        self._pool.shutdown(wait=True)


def _discard(opening: Future[Ledger]) -> None:
    """Close a ledger that was opened for a caller who has gone, so that its lease does not stay taken."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
