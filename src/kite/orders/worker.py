"""The worker: one durable consumer, a lane per target, and a journal that makes effects happen once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeAlias

from kite.bus import DEC, Bus, dec_filters
from kite.events import Origin
from kite.orders.journal import Journal
from kite.orders.report import Reporter, SubjectOf
from kite.orders.shift import Shift
from kite.orders.task import Notices, Tasks
from kite_schemas.why import Fact

ACK_WAIT_S = 10.0  # a third of what a load has: one that a killed worker had not begun is delivered again in time
RENEW_S = 3.0  # how often an order in hand asks for another ACK_WAIT_S
ACK_PENDING_MSGS = 256  # orders in hand at most; the bus holds back the rest
NO_NOTICES: Notices = {}

Begin: TypeAlias = Callable[[], Awaitable[None]]
"""What a service does before its first order."""


class Worker:
    """Carries out the orders for `service` on `node`: each once, those of one target in sequence.

    `notices` are the decisions that it only passes on. `journal` is the path of the worker's SQLite file. `subject_of`
    names what an outcome is about; by default what its order is about. `ack_wait_s` and `renew_s` are the constants of
    this module but in tests. `redelivered` counts the deliveries of orders that the bus had delivered before.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        origin: Origin,
        service: str,
        node: str,
        journal: Path,
        handlers: Tasks,
        notices: Notices = NO_NOTICES,
        subject_of: SubjectOf | None = None,
        ack_wait_s: float = ACK_WAIT_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self.redelivered = 0
        self._bus = bus
        self._service = service
        self._node = node
        self._journal = journal
        self._handlers = handlers
        self._notices = notices
        self._reporter = Reporter(bus, origin, subject_of)
        self._ack_wait_s = ack_wait_s
        self._renew_s = renew_s

    async def publish(self, subject: str, fact: Fact, *, correlation: str | None = None) -> None:
        """Publish a fact that belongs to no order; returns when the bus has it, and waits while it is away or full."""
        await self._reporter.say(subject, fact, correlation)

    async def run(self, begin: Begin | None = None) -> None:
        """Work until cancelled. What is under way then is resumed by the next run, as the next attempt.

        `begin` is awaited once the journal is ours, and before an order is taken up. Raises the journal's errors, the
        bus's, those of `begin`, and whatever a handler raises that is no KiteError.
        """
        filters = dec_filters(self._service, self._node)
        with Journal.open(self._journal) as journal:
            if begin is not None:
                await begin()
            try:
                async with asyncio.TaskGroup() as group:
                    template = filters[0].removesuffix(".>")
                    shift = Shift(
                        journal,
                        self._reporter,
                        self._handlers,
                        group,
                        notices=self._notices,
                        node=self._node,
                        template=template,
                    )
                    shift.resume()
                    group.create_task(shift.renew(self._renew_s))
                    await self._receive(shift, filters, group)
            except BaseExceptionGroup as errors:
                raise _alone(errors) from errors

    async def _receive(self, shift: Shift, filters: Sequence[str], group: asyncio.TaskGroup) -> None:
        works = self._bus.work(
            DEC,
            f"{self._service}-{self._node}",
            filters,
            ack_wait_s=self._ack_wait_s,
            max_ack_pending=ACK_PENDING_MSGS,
        )
        async with aclosing(works) as deliveries:
            async for work in deliveries:
                self.redelivered += work.delivered > 1
                if not shift.take(work):
                    group.create_task(work.ack())  # a bus that came back with another store does not answer: no waiting


def _alone(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error of a group as itself, so that it is caught by its type."""
    return errors.exceptions[0] if len(errors.exceptions) == 1 else errors
