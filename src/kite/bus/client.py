"""`Bus`: what the rest of KITE sees of NATS JetStream."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Self

from kite.bus import consume, storage, streams
from kite.bus.consume import ACK_PENDING_MSGS, ACK_WAIT_S, IDLE_S, PULL_MSGS, Work
from kite.bus.link import CONNECT_S, Link
from kite.bus.login import Login
from kite.bus.mark import Mark, StreamState
from kite.bus.message import Message
from kite.bus.publish import ACK_S, WINDOW_MSGS, Outcome, Outgoing, PubAck, Publisher
from kite.bus.storage import Peer, Storage
from kite.trust import Signer


class Bus:
    """One connection to the bus; comes back by itself for ever. `async with await Bus.connect(url, name) as bus:`."""

    def __init__(self, link: Link, publisher: Publisher, trusted: bytes | None = None) -> None:
        """Use `connect`."""
        self._trusted = trusted
        self._link = link
        self._publisher = publisher

    @classmethod
    async def connect(
        cls,
        url: str,
        name: str,
        *,
        signer: Signer | None = None,
        login: Login | None = None,
        trusted: bytes | None = None,
        wait_s: float = CONNECT_S,
        window: int = WINDOW_MSGS,
        ack_s: float = ACK_S,
    ) -> Self:
        """Connect as `name`; with a `signer` everything published is signed. `login` says who this is to the server.
        `url` may name several servers of a cluster, with commas between.

        With `trusted`, a public key (32 bytes), only orders that it signed are handed out by `work`. Raises
        BusUnreachable after `wait_s`, and at once UsageError, BusRefused (wrong key) and BusUntrusted (TLS).
        """
        link = Link(url, login)
        await link.open(name, wait_s)
        publisher = Publisher(link, signer=signer, window=window, ack_s=ack_s)
        await publisher.open()
        return cls(link, publisher, trusted)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close for good. Readers that still run raise BusClosed."""
        await self._link.close()

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._link.url

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands right now."""
        return self._link.is_connected

    @property
    def sessions(self) -> int:
        """How often the connection was made: 1 at first, one more after every reconnect."""
        return self._link.sessions

    async def ready(self, wait_s: float | None = None) -> None:
        """Wait until connected, for ever by default. Raises BusUnreachable after `wait_s`, BusClosed."""
        await self._link.ready(wait_s)

    async def provision(self, *, facts_bytes: int | None = None, replicas: int | None = None) -> None:
        """Create the streams, or adjust their limits; safe to call again.

        `facts_bytes` bounds facts and decisions, each: None leaves a stream the bound it has, and gives a new one
        FACTS_BYTES. `replicas` is on how many servers of a cluster each stream is: None leaves it, and gives a new one
        one. Whoever may not change streams finds them as they are. Raises StreamRefused, BusUnreachable, and
        StreamMissing for one that this process may not make.
        """
        await streams.provision(self._link, facts_bytes, replicas)

    async def stream(self, stream: str) -> StreamState:
        """Ask what `stream` holds. Raises StreamMissing, BusUnreachable."""
        return await self._link.patiently(partial(streams.read_state, self._link, stream))

    async def storage(self, stream: str) -> Storage:
        """Ask how `stream` is kept. Raises StreamMissing, BusForbidden, BusUnreachable."""
        return await self._link.patiently(partial(storage.read_storage, self._link, stream))

    @property
    def peer(self) -> Peer:
        """The server that this is connected to."""
        return storage.peer(self._link)

    async def message(self, stream: str, seq: int) -> Message | None:
        """Read one message by direct get, None when it is not stored. Raises StreamRefused, BusUnreachable."""
        return await self._link.patiently(partial(streams.get_message, self._link, stream, seq))

    async def publish(
        self, subject: str, payload: bytes, event_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        """Publish and wait until the stream has it; sent again as it is while that can help, about 6 s.

        Raises BusFull and PublishUnanswered (try again with the same bytes), PublishFailed (do not).
        """
        return await self._publisher.publish(Outgoing(subject, payload, event_id, headers or {}))

    async def publish_many(self, items: Sequence[Outgoing]) -> list[Outcome]:
        """Publish pipelined, in order, and return one outcome per item; see `Publisher.publish_many`."""
        return await self._publisher.publish_many(items)

    def pull(
        self,
        stream: str,
        after: Mark | int,
        filter_subject: str | Sequence[str] | None = None,
        *,
        batch: int = PULL_MSGS,
        idle_s: float = IDLE_S,
    ) -> AsyncGenerator[list[Message]]:
        """Yield non-empty lists (at most `batch`) of messages after `after`, in stream order, for ever.

        Without a filter every sequence number comes exactly once: a hole is filled by direct get, and where nothing is
        stored any more BusGap is raised, after all messages before it. Survives restarts of the server. `idle_s` is
        the heartbeat of a quiet stream; a silence of 2.5 of them makes a new consumer.

        Whenever a consumer is made the stream is compared with what is known of it and of the last message read (at
        first, with what `after` tells): a stream that is another one, or was restored from an older copy, is
        StreamChanged, even when it was filled past that message.

        Raises BusGap, StreamChanged, StreamMissing, StreamRefused, BusClosed.
        """
        return consume.pull(self._link, stream, after, filter_subject, batch=batch, idle_s=idle_s)

    async def follow(
        self, stream: str, filter_subject: str | Sequence[str] | None = None, *, after_seq: int | None = None
    ) -> AsyncGenerator[Message]:
        """Yield messages one by one, after `after_seq`, or only those published from now on. Raises as `pull`.

        "Now" is when the first message is asked for: to miss none, read `stream()` first and pass its `last_seq`.
        """
        start = (await self.stream(stream)).last_seq if after_seq is None else after_seq
        async with aclosing(self.pull(stream, start, filter_subject)) as pulled:
            async for messages in pulled:
                for message in messages:
                    yield message

    def work(
        self,
        stream: str,
        durable: str,
        filter_subjects: Sequence[str],
        *,
        ack_wait_s: float = ACK_WAIT_S,
        max_ack_pending: int = ACK_PENDING_MSGS,
        idle_s: float = IDLE_S,
    ) -> AsyncGenerator[Work]:
        """Yield what the durable consumer `durable` still has to do, each until it is acknowledged, for ever.

        Delivered again when not acknowledged within `ack_wait_s` (`Work.in_progress` renews it); at most
        `max_ack_pending` are out at a time. Survives restarts of the server and of the caller. What `trusted` of
        `connect` did not sign is acknowledged, logged and not yielded.

        It waits for a stream that is not there yet. Raises StreamRefused, BusClosed.
        """
        return consume.work(
            self._link,
            stream,
            durable,
            filter_subjects,
            ack_wait_s=ack_wait_s,
            max_ack_pending=max_ack_pending,
            idle_s=idle_s,
            trusted=self._trusted,
        )
