"""The pipelined publisher: a window of messages in flight, each acknowledged, or resolved by its own deadline.

A message is sent again with the same id, so the server stores it once (within its duplicate window). After a failure
nothing more is sent until the first message without an acknowledgement has one, so that order is kept; only what was in
flight behind a refused message may come before it. A full stream is waited for like an absent server: that blocks the
caller, and nothing is dropped.
"""

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import nats.errors
import structlog
from nats.aio.msg import Msg

from kite.bus.errors import FORBIDDEN_HINT, BusClosed, BusFull, BusUnreachable, PublishFailed, PublishUnanswered
from kite.bus.link import UNAVAILABLE, Link, NotNow
from kite.bus.message import EXPECTED_STREAM, MSG_ID, msg_id
from kite.bus.subjects import stream_of
from kite.trust import SIGNATURE, Signer

WINDOW_MSGS = 256
ACK_S = 5.0
ATTEMPTS = 6  # in a row without one acknowledgement
BACKOFF_S = 0.1  # doubled at every attempt
RECONNECT_S = 10.0  # how long one attempt waits for the connection

# err_code of the JetStream API
_OUT_OF_STORE = frozenset({10023, 10028, 10047})  # resources, memory, storage
NO_STREAM_HINT = "the arbitrator makes them; of a cluster most servers have to run"
_IN_PROCESS = 10158  # the same message came before, and a cluster has not stored it yet
_STORE_FAILED = 10077  # any failed write; the text says when it is the bound of the stream

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PubAck:
    """The stream took the message at `seq`; `duplicate` when it had it already, which is success too."""

    stream: str
    seq: int
    duplicate: bool


Outcome = PubAck | PublishFailed


def _no_headers() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish. `headers` may carry `traceparent` and `tracestate`; it is read, never changed."""

    subject: str
    payload: bytes
    event_id: str
    headers: Mapping[str, str] = field(default_factory=_no_headers)


def wire_headers(item: Outgoing, signer: Signer | None = None) -> dict[str, str]:
    """Return the headers as sent: the caller's, the id, the stream that must store it, and the signature."""
    place = {MSG_ID: msg_id(item.event_id, item.payload), EXPECTED_STREAM: stream_of(item.subject)}
    signed = {SIGNATURE: signer.sign(item.payload).header} if signer else {}
    return {**item.headers, **place, **signed}


def parse_ack(item: Outgoing, payload: bytes) -> Outcome:
    """Read the server's answer to a publish; no answer body means that no stream listens."""
    if not payload:
        return PublishUnanswered(item.subject, item.event_id, "no stream takes it", hint=NO_STREAM_HINT)
    reply = cast("dict[str, object]", json.loads(payload))
    if "error" in reply:
        return _refusal(item, cast("dict[str, object]", reply["error"]))
    return PubAck(str(reply["stream"]), cast("int", reply["seq"]), reply.get("duplicate") is True)


def _refusal(item: Outgoing, error: Mapping[str, object]) -> PublishFailed:
    code, why = error.get("err_code"), str(error.get("description"))
    if code in _OUT_OF_STORE or (code == _STORE_FAILED and "maximum" in why):
        return BusFull(item.subject, item.event_id, why, hint="the stream is at its bound; wait until it drains")
    if code in {_STORE_FAILED, _IN_PROCESS} or error.get("code") == UNAVAILABLE:
        return PublishUnanswered(item.subject, item.event_id, why)
    return PublishFailed(item.subject, item.event_id, why)


def acked_prefix(outcomes: Sequence[Outcome]) -> list[PubAck]:
    """Return the acknowledgements before the first failure."""
    acks: list[PubAck] = []
    for outcome in outcomes:
        if not isinstance(outcome, PubAck):
            break
        acks.append(outcome)
    return acks


class _Flight:
    """One message under way: resolved exactly once, by its answer, its deadline, or the end of the connection."""

    def __init__(self, item: Outgoing, ack_s: float, failures: list[Outcome]) -> None:
        loop = asyncio.get_running_loop()
        self.item = item
        self._failures = failures  # of the burst, which stops at the first
        self.done: asyncio.Future[Outcome] = loop.create_future()
        self._timer = loop.call_later(ack_s, self.unanswered, f"no acknowledgement within {ack_s:g} s")

    def resolve(self, outcome: Outcome) -> None:
        self._timer.cancel()
        if self.done.done():
            return
        self.done.set_result(outcome)
        if isinstance(outcome, PublishFailed):
            self._failures.append(outcome)

    def unanswered(self, why: str) -> None:
        self.resolve(PublishUnanswered(self.item.subject, self.item.event_id, why))

    def failed(self, why: str, *, hint: str = "") -> None:
        self.resolve(PublishFailed(self.item.subject, self.item.event_id, why, hint=hint))


class Publisher:
    """Publishes over one link. Calls may overlap; they share one window of `window` messages in flight."""

    def __init__(
        self, link: Link, *, signer: Signer | None = None, window: int = WINDOW_MSGS, ack_s: float = ACK_S
    ) -> None:
        self._link = link
        self._signer = signer
        self._ack_s = ack_s
        self._window = asyncio.Semaphore(window)
        self._flights: dict[str, _Flight] = {}
        self._tokens = itertools.count()
        self._inbox = link.nc.new_inbox()

    async def open(self) -> None:
        """Listen for acknowledgements."""
        await self._link.listen(f"{self._inbox}.*", self._on_ack)
        self._link.watch(self._on_break)
        self._link.guard(self._on_forbidden)

    async def publish_many(self, items: Sequence[Outgoing]) -> list[Outcome]:
        """Publish in order and return the outcome of each item, in order: a PubAck or a PublishFailed.

        What was not answered, or found the stream full, is sent again as it is, at most ATTEMPTS times without progress
        (about 6 s). After the first item that fails then, or for good, nothing more is sent: later items hold their own
        outcome when they were in flight already, else PublishUnanswered.
        """
        acks: list[PubAck] = []
        attempt = 0
        while len(acks) < len(items):
            burst = await self._burst(items[len(acks) :])
            fresh = acked_prefix(burst)
            acks += fresh
            attempt = 0 if fresh else attempt + 1
            failures = burst[len(fresh) :]
            if failures and (attempt >= ATTEMPTS or not _heals(failures[0])):
                return [*acks, *failures, *map(_unsent, items[len(acks) + len(failures) :])]
            if failures:
                await self._recover(attempt, cast("PublishFailed", failures[0]))
        return list(acks)

    async def publish(self, item: Outgoing) -> PubAck:
        """Publish one message and wait for its acknowledgement. Raises PublishFailed, BusFull, PublishUnanswered."""
        (outcome,) = await self.publish_many([item])
        if isinstance(outcome, PublishFailed):
            raise outcome
        return outcome

    async def _burst(self, items: Sequence[Outgoing]) -> list[Outcome]:
        """Send in order until one is known to have failed; return the outcomes of what was sent (at least one)."""
        flights: list[_Flight] = []
        failures: list[Outcome] = []
        for item in items:
            await self._window.acquire()
            if failures:
                self._window.release()
                break
            flights.append(await self._send(item, failures))
        return [await flight.done for flight in flights]

    async def _send(self, item: Outgoing, failures: list[Outcome]) -> _Flight:
        token = str(next(self._tokens))
        flight = self._flights[token] = _Flight(item, self._ack_s, failures)
        flight.done.add_done_callback(lambda _: self._land(token))
        try:
            reply, headers = f"{self._inbox}.{token}", wire_headers(item, self._signer)
            await self._link.send(item.subject, item.payload, reply=reply, headers=headers)
        except (NotNow, BusClosed) as error:
            flight.unanswered(str(error))
        except (nats.errors.Error, ValueError) as error:  # too large, or no such subject or header
            flight.failed(str(error))
        return flight

    def _land(self, token: str) -> None:
        del self._flights[token]
        self._window.release()

    async def _on_ack(self, msg: Msg) -> None:
        flight = self._flights.get(msg.subject.rpartition(".")[2])
        if flight is not None:
            flight.resolve(parse_ack(flight.item, msg.data))

    def _on_break(self, reason: str) -> None:
        for flight in tuple(self._flights.values()):
            flight.unanswered(reason)

    def _on_forbidden(self, subject: str) -> None:
        for flight in tuple(self._flights.values()):
            if flight.item.subject.lower() == subject:
                flight.failed("the server forbids this process to publish there", hint=FORBIDDEN_HINT)

    async def _recover(self, attempt: int, failure: PublishFailed) -> None:
        log.warning("publish_retried", attempt=attempt, code=failure.code, error=str(failure))
        await asyncio.sleep(BACKOFF_S * 2**attempt)
        try:
            await self._link.ready(RECONNECT_S)
        except BusUnreachable:
            log.warning("publish_waits", url=self._link.url)


def _heals(outcome: Outcome) -> bool:
    return isinstance(outcome, PublishFailed) and outcome.retryable


def _unsent(item: Outgoing) -> PublishFailed:
    return PublishUnanswered(item.subject, item.event_id, "not sent: a message before it failed")
