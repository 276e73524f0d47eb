"""What comes in: messages become events or refusals, and wait for the writer in two lines, so that facts go first."""

import asyncio
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from kite import clock
from kite.bus import TEL, Message, evt_subject, tel_subject
from kite.trust import Distrusted, Keyring, Signature
from kite_schemas.envelope import EVENT_MAX_BYTES, Event, MalformedEvent, decode
from kite_schemas.ledger import REJECTED_BYTES_MAX, BusEpochChanged, BusGap, Refusal, Rejected
from kite_schemas.telemetry import Window

REASON_MAX_CHARS = 500
PRODUCERS = frozenset({"request", "fact"})
"""Kinds that may come from outside; decisions and ledger rows are the arbitrator's own."""

WINDOWS = Window.TYPE.rpartition(".")[0]
"""The type of windows of every version."""

DISTRUST: Mapping[Distrusted, str] = {
    Distrusted.UNSIGNED: "it is not signed, and what {source} says has to be",
    Distrusted.KEY_UNKNOWN: "it is signed with a key that nobody has added for {source}",
    Distrusted.SIGNATURE_WRONG: "its signature does not fit what it says",
    Distrusted.NOT_OF_PRODUCER: "its signature is good, and its signer may not say this as {source}",
}

ARRIVALS_MAX = 8
"""How many pulled batches wait in each line; beyond it the pull stops, and the bus keeps the rest."""

FACTS_MAX = 256
WINDOWS_MAX = 64
"""How many messages of each line one transaction takes: a fact that has just missed one waits for so many windows."""

SUBJECTS_MAX = 4_096
"""For how many subjects it is remembered where their events belong."""


@dataclass(frozen=True, slots=True)
class Found:
    """An event, and who signed it where that was checked."""

    event: Event
    signature: Signature | None


@dataclass(frozen=True, slots=True)
class Doubted:
    """An event that is not believed, and the row that says so."""

    event: Event
    rejected: Rejected


@dataclass(frozen=True, slots=True)
class Arrival:
    """Messages as they came, and what each of them is; `at_us` is the monotonic clock at that moment."""

    messages: Sequence[Message]
    found: Sequence[Found | Doubted | Rejected]
    at_us: int


Incoming = Arrival | BusGap | BusEpochChanged
"""What the line of facts brings: messages, or what became of those that will not come."""

Waiting = TypeVar("Waiting", bound=Incoming)


@dataclass(frozen=True, slots=True)
class Load:
    """What one transaction takes in: whether a tick is due, facts and what became of others in their order, windows."""

    tick: bool
    facts: Sequence[Incoming]
    windows: Sequence[Arrival]


class Intake:
    """Two lines in front of the writer, and the tick, which never waits. Whoever puts into a full line waits."""

    def __init__(self) -> None:
        self._facts: asyncio.Queue[Incoming] = asyncio.Queue(ARRIVALS_MAX)
        self._windows: asyncio.Queue[Arrival] = asyncio.Queue(ARRIVALS_MAX)
        self._ticking = False
        self._wake = asyncio.Event()

    async def fact(self, item: Incoming) -> None:
        """Put facts, a gap among them, or another bus, into their line."""
        await self._facts.put(item)
        self._wake.set()

    async def window(self, item: Arrival) -> None:
        """Put windows into theirs."""
        await self._windows.put(item)
        self._wake.set()

    def tick(self) -> None:
        """Let time pass; a tick that has not been taken yet stands for this one too."""
        self._ticking = True
        self._wake.set()

    async def take(self) -> Load:
        """Wait until something is there and return it, bounded by FACTS_MAX and WINDOWS_MAX."""
        await self._wake.wait()
        load = Load(self._ticking, _first(self._facts, FACTS_MAX), _first(self._windows, WINDOWS_MAX))
        self._ticking = False
        if self._facts.empty() and self._windows.empty():
            self._wake.clear()
        return load


def arrive(messages: Sequence[Message], keyring: Keyring) -> Arrival:
    """Look at messages as they come in: the writer may be waiting for the disk meanwhile."""
    at_us = clock.mono_us()
    return Arrival(messages, [examine(message, keyring) for message in messages], at_us)


def ids(load: Load) -> list[str]:
    """Return the ids of the events in a load."""
    return [one.event.header.id for one in _found(load) if not isinstance(one, Rejected)]


def is_doubted(load: Load) -> bool:
    """Tell whether something in a load is not believed, and may be in the ledger all the same."""
    return any(isinstance(one, Doubted) for one in _found(load))


def _found(load: Load) -> Iterator[Found | Doubted | Rejected]:
    for arrival in (*(item for item in load.facts if isinstance(item, Arrival)), *load.windows):
        yield from arrival.found


def examine(message: Message, keyring: Keyring) -> Found | Doubted | Rejected:
    """Return the event in a message, or why there is none that this producer may send on this subject."""
    try:
        event = decode(message.payload)
    except MalformedEvent as error:
        too_large = len(message.payload) > EVENT_MAX_BYTES
        return _rejected(message, Refusal.TOO_LARGE if too_large else Refusal.MALFORMED, str(error))
    header = event.header
    if event.data is not None and event.data.KIND not in PRODUCERS:
        return _rejected(message, Refusal.NOT_FOR_PRODUCERS, f"{header.type} is written by the arbitrator only")
    if isinstance(event.data, Window) and header.subject != f"node/{event.data.node}":
        return _rejected(message, Refusal.SUBJECT_MISMATCH, f"a window of {event.data.node} about {header.subject}")
    expected = belongs(header.type, header.subject)
    if message.subject != expected:
        return _rejected(message, Refusal.SUBJECT_MISMATCH, f"the event belongs on {expected}")
    signature = keyring.check(message.payload, message.signature, event)
    if isinstance(signature, Distrusted):
        why = DISTRUST[signature].format(source=header.source)
        return Doubted(event, _rejected(message, Refusal(signature), why))
    return Found(event, signature)


@lru_cache(SUBJECTS_MAX)
def belongs(event_type: str, subject: str) -> str:
    """Return the bus subject of an event: windows have a stream of their own, for nothing else."""
    if event_type.rpartition(".")[0] == WINDOWS:
        return tel_subject(subject.partition("/")[2])
    return evt_subject(event_type, subject)


def repeatable(message: Message) -> bool:
    """Tell whether the message can come again after a restart; windows are read from the end of their stream."""
    return message.stream != TEL


def _first(line: "asyncio.Queue[Waiting]", most: int) -> list[Waiting]:
    """Take from a line until `most` messages are there, or it is empty; what was pulled together stays together."""
    taken: list[Waiting] = []
    count = 0
    while count < most and not line.empty():
        taken.append(item := line.get_nowait())
        count += len(item.messages) if isinstance(item, Arrival) else 1
    return taken


def _rejected(message: Message, code: Refusal, reason: str) -> Rejected:
    return Rejected(
        stream=message.stream,
        seq=message.seq,
        bus_subject=message.subject[:REASON_MAX_CHARS],
        code=code,
        message=reason[:REASON_MAX_CHARS],
        content=b64encode(message.payload[:REJECTED_BYTES_MAX]).decode(),
    )
