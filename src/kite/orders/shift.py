"""One run of a worker: the orders in hand, and what becomes of each when its turn comes."""

import asyncio
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import structlog

from kite import clock, tracing
from kite.bus import Message, Work
from kite.clock import US_PER_S
from kite.errors import KiteError
from kite.events import Composed
from kite.orders.flight import Flight, NoOrder, read
from kite.orders.journal import Entry, Journal, Notice
from kite.orders.lanes import Lanes
from kite.orders.report import LAST_STEP, Reporter
from kite.orders.task import FIRST_STAGE, Emit, Notices, Received, Task, Tasks, current_stage, stage
from kite.orders.verdict import EXPIRED, LATE, TIMEOUT, Step, decide
from kite_schemas.arbitration import OrderExpired
from kite_schemas.envelope import EVENT_MAX_BYTES, Event, MalformedEvent, decode
from kite_schemas.model import TEXT_MAX_CHARS
from kite_schemas.why import Decision, Order, Outcome

TOO_LARGE = "outcome_too_large"

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Shift:
    """Takes deliveries and drives lanes, as tasks of `group`. `template` is the subject that spans are named after.

    What names another node than `node` is not taken, however it came here: its signature is no less genuine.
    """

    def __init__(
        self,
        journal: Journal,
        reporter: Reporter,
        tasks: Tasks,
        group: asyncio.TaskGroup,
        *,
        notices: Notices,
        node: str,
        template: str,
    ) -> None:
        self._node = node
        self._journal = journal
        self._reporter = reporter
        self._tasks = tasks
        self._notices = notices
        self._noticed: dict[str, int] = {}  # by the bus's clock: sequence numbers begin anew with a stream
        self._group = group
        self._template = template
        self._lanes = Lanes[Flight]()
        self._held: dict[str, Flight] = {}

    def resume(self) -> None:
        """Take up what the run before this one left: at once, not when the bus delivers it again."""
        for notice in self._journal.notices():
            self._recall(notice)
        for entry in self._journal.unfinished():
            try:
                flight = read(decode(entry.raw), entry.raw, entry.published_us)
                self._task(flight.order)
            except (MalformedEvent, NoOrder) as error:  # written by another version of KITE
                log.error("order_unreadable", order=entry.id, reason=str(error))
                self._journal.abandon(entry.id)
            else:
                self._queue(flight)

    async def renew(self, every_s: float) -> None:
        """Keep what is in hand from being delivered again, for ever."""
        while True:
            await asyncio.sleep(every_s)
            for flight in list(self._held.values()):
                if flight.work is not None:
                    await flight.work.in_progress()

    def take(self, work: Work) -> bool:
        """Take a delivery into hand; False when nothing is left to do about it: it can be acknowledged."""
        message = work.message
        try:
            event = decode(message.payload)
            if (node := getattr(event.data, "node", self._node)) != self._node:
                raise NoOrder(f"it is for node {node}")
            if isinstance(event.data, OrderExpired):
                self._expire(event.data)
            elif isinstance(event.data, Decision) and type(event.data) in self._notices:
                self._notify(event.data, event.header.id, message)
            else:
                self._accept(event, work)
                return True
        except (MalformedEvent, NoOrder) as error:
            log.warning("order_unknown", subject=message.subject, seq=message.seq, reason=str(error))
        return False

    def _recall(self, notice: Notice) -> None:
        """Pass on what the run before this one knew."""
        try:
            event = decode(notice.raw)
        except MalformedEvent as error:  # written by another version of KITE
            log.error("notice_unreadable", subject=notice.subject, reason=str(error))
            return
        if isinstance(event.data, Decision) and type(event.data) in self._notices:
            self._noticed[notice.subject] = notice.published_us
            self._hear(event.data, event.header.id)

    def _notify(self, notice: Decision, event_id: str, message: Message) -> None:
        """Pass a notice on, unless a newer one on its subject has been: then it says what no longer holds."""
        if message.published_us < self._noticed.get(message.subject, 0):
            log.info("notice_overtaken", subject=message.subject, seq=message.seq)
            return
        self._noticed[message.subject] = message.published_us
        self._journal.notice(message.subject, message.payload, message.published_us)
        log.info("notice_heard", type=notice.TYPE, subject=message.subject, seq=message.seq)
        self._hear(notice, event_id)

    def _hear(self, notice: Decision, event_id: str) -> None:
        hear = cast("Callable[[Decision, str], None]", self._notices[type(notice)])
        hear(notice, event_id)

    def _accept(self, event: Event, work: Work) -> None:
        """Queue an order; one that is in hand already only takes over the newer delivery. Raises NoOrder."""
        held = self._held.get(event.header.id)
        if held is not None:
            held.work = work
            return
        flight = read(event, work.message.payload, work.message.published_us, work)
        self._task(flight.order)
        self._queue(flight)

    def _expire(self, expired: OrderExpired) -> None:
        """Keep an order from being begun, and stop it if it was."""
        log.info("order_expired", order=expired.order, target=expired.target)
        self._journal.drop(expired.order, expired.target)
        flight = self._held.get(expired.order)
        if flight is not None:
            flight.expire()

    def _queue(self, flight: Flight) -> None:
        self._held[flight.id] = flight
        if self._lanes.push(flight.order.target, flight):
            self._group.create_task(self._drive(flight.order.target))

    async def _drive(self, target: str) -> None:
        while (flight := self._lanes.pop(target)) is not None:
            await self._serve(flight)
            del self._held[flight.id]
            if flight.work is not None:
                await flight.work.ack()

    async def _serve(self, flight: Flight) -> None:
        """Do what the journal and the time ask for; afterwards the order can be acknowledged."""
        entry = self._journal.find(flight.id)
        step, code = decide(entry, expired=flight.expired, now_us=clock.wall_us(), until_us=flight.until_us)
        log.info("order_taken", order=flight.id, type=flight.header.type, target=flight.order.target, step=step)
        match step:
            case Step.BEGIN | Step.RESUME:
                await self._carry_out(flight)
            case Step.GIVE_UP if entry is not None:
                await self._give_up(flight, entry, code)
            case Step.REPUBLISH if entry is not None:
                await self._reporter.repeat(entry.outcome)
                self._journal.sent(flight.id)
            case _:
                log.warning("order_refused", order=flight.id, type=flight.header.type, code=code)
                if code == LATE:  # what the arbitrator gave up itself it need not be told
                    await self._refuse(flight, code)

    async def _carry_out(self, flight: Flight) -> None:
        """Begun is on disk before the effect, the outcome before it is published."""
        received = flight.received(self._journal.begin(flight.id, flight.order.target, flight.raw, flight.published_us))
        with self._span(flight, received.attempt) as span:
            outcome, code = await self._attempt(flight, received)
            event = self._reporter.outcome(received, outcome, LAST_STEP)
            if len(event.raw) > EVENT_MAX_BYTES:
                code = TOO_LARGE
                outcome = self._failed(received, code, f"{outcome.TYPE} of {len(event.raw)} bytes")
                event = self._reporter.outcome(received, outcome, LAST_STEP)
            if code:
                span.fail(code)
            self._journal.done(flight.id, event.raw)
            await self._tell(flight, event, code)

    async def _refuse(self, flight: Flight, code: str) -> None:
        """Tell the failure of an order that came too late; attempt 0: nothing was begun, and nothing will be."""
        received = flight.received(0)
        with self._span(flight, received.attempt) as span:
            event = self._failure(received, span, code, "its time was over before it was begun")
            self._journal.refuse(flight.id, flight.order.target, flight.raw, flight.published_us, event.raw)
            await self._tell(flight, event, code)

    async def _give_up(self, flight: Flight, entry: Entry, code: str) -> None:
        """Tell the failure of an order that was begun, cut off, and is not to be tried again."""
        received = flight.received(entry.attempt)
        with self._span(flight, entry.attempt) as span:
            event = self._failure(received, span, code, f"cut off in attempt {entry.attempt} and not tried again")
            self._journal.done(flight.id, event.raw)
            await self._tell(flight, event, code)

    def _failure(self, received: Received[Order], span: tracing.Span, code: str, message: str) -> Composed:
        span.fail(code)
        stage(FIRST_STAGE)
        return self._reporter.outcome(received, self._failed(received, code, message), LAST_STEP)

    async def _tell(self, flight: Flight, event: Composed, code: str) -> None:
        """Publish an outcome that is fixed in the journal."""
        await self._reporter.deliver(event)
        self._journal.sent(flight.id)
        log.info("order_done", order=flight.id, outcome=event.header.type, code=code or "ok")

    async def _attempt(self, flight: Flight, received: Received[Order]) -> tuple[Outcome, str]:
        """Run the handler and return its outcome, or the failure's outcome and code."""
        stage(FIRST_STAGE)
        limit = asyncio.timeout((flight.until_us - clock.wall_us()) / US_PER_S)
        try:
            async with limit:
                flight.limit = limit
                return await self._task(received.data).handler(received, self._emit(received)), ""
        except KiteError as error:
            return self._failed(received, error.code, _said(error)), error.code
        except TimeoutError:
            if not limit.expired():
                raise  # the handler's own, which it should have dealt with
            code = EXPIRED if flight.expired else TIMEOUT
            return self._failed(received, code, f"stopped in stage {current_stage()}"), code
        finally:
            flight.limit = None

    def _failed(self, received: Received[Order], code: str, message: str) -> Outcome:
        log.warning("order_failed", order=received.id, stage=current_stage(), code=code, message=message)
        return self._task(received.data).failed(received, current_stage(), code, message[:TEXT_MAX_CHARS])

    def _emit(self, received: Received[Order]) -> Emit:
        steps = itertools.count(1)

        async def emit(outcome: Outcome) -> None:
            await self._reporter.deliver(self._reporter.outcome(received, outcome, str(next(steps))))

        return emit

    def _task(self, order: Order) -> Task[Order]:
        """Return what carries out this order, and only this type of order. Raises NoOrder."""
        task = self._tasks.get(type(order))
        if task is None:
            raise NoOrder(f"no handler for {order.TYPE}")
        return cast("Task[Order]", task)

    @contextmanager
    def _span(self, flight: Flight, attempt: int) -> Generator[tracing.Span]:
        above = flight.header.traceparent
        attributes: dict[str, tracing.Value] = {
            **tracing.messaging("process", self._template),
            tracing.ORDER_ID: flight.id,
            tracing.EVENT_TYPE: flight.header.type,
            tracing.ATTEMPT: attempt,
        }
        if flight.work is not None:
            attributes |= {tracing.STREAM: flight.work.message.stream, tracing.SEQ: flight.work.message.seq}
        with tracing.span(
            f"process {self._template}",
            parent=above,
            links=[above] if above else [],
            kind="consumer",
            attributes=attributes,
        ) as span:
            yield span


def _said(error: KiteError) -> str:
    """Return what went wrong and what to do about it, as the failure's message."""
    return f"{error} ({error.hint})" if error.hint else str(error)
