"""The clients of a node's engines, shared by what works on them."""

from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

from kite.engine import Engine, EngineUnreachable

ENGINES_MAX = 64  # clients of a node's endpoints that are kept open


class Engines:
    """One client an endpoint, open from one order to the next; beyond ENGINES_MAX the idle ones are closed."""

    def __init__(self) -> None:
        self._open: dict[str, Engine] = {}  # the one lent last at the end
        self._lent: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(list(self._open))

    def busy(self, endpoint: str) -> bool:
        """Say whether the client of an endpoint is lent out."""
        return self._lent[endpoint] > 0

    @asynccontextmanager
    async def lend(self, endpoint: str) -> AsyncGenerator[Engine]:
        """Give the client of an endpoint."""
        engine = self._open.pop(endpoint, None) or Engine(endpoint)
        self._open[endpoint] = engine
        self._lent[endpoint] += 1
        try:
            yield engine
        finally:
            self._lent[endpoint] -= 1
            idle = [name for name in self._open if not self._lent[name]]
            await self._close(idle[: max(0, len(self._open) - ENGINES_MAX)])

    async def holding(self, version: str, others: Collection[str]) -> str | None:
        """Return an endpoint whose engine lists or uses a version, None when none does of those known and the others.

        One that does not answer holds nothing that a request could reach.
        """
        for endpoint in dict.fromkeys((*self._open, *others)):
            async with self.lend(endpoint) as engine:
                with suppress(EngineUnreachable):
                    if version in await engine.models() or await engine.in_use(version):
                        return endpoint
        return None

    async def _close(self, endpoints: list[str]) -> None:
        for endpoint in endpoints:
            del self._lent[endpoint]
            await self._open.pop(endpoint).close()
