"""What upcycle says of its channel: the decay in force, what injections did to the caches, how far they moved blends.

All of it only looks on: orders go on without it.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import structlog

from kite.bus import TEL, Bus, tel_subject
from kite.errors import KiteError
from kite.orders import Received
from kite_schemas.envelope import MalformedEvent, decode
from kite_schemas.telemetry import Window
from kite_schemas.upcycle import ChannelSampled, DecaySet, LoadOrdered, Shift
from kite_upcycle import cache, core
from kite_upcycle.cache import Load, Seen
from kite_upcycle.shifts import Move, Shifts

BASES_MAX = 64  # bases whose decay is remembered
PULL_WINDOWS = 16  # in one request: a window of many instances is large
RETRY_S = 1.0  # before windows are followed again

log: structlog.stdlib.BoundLogger = structlog.get_logger()


def report(node: str, base: str | None, decays: dict[str, int], seen: Seen, shifts: Sequence[Shift]) -> ChannelSampled:
    """Return the report of a node that serves `base`; `decays` are in force, by base, the newest last."""
    return ChannelSampled(
        node=node,
        decay_ppm=in_force(decays, base),
        kv_pollution_ppm=cache.pollution_ppm(seen),
        shifts=tuple(shifts),
    )


def in_force(decays: dict[str, int], base: str | None) -> int | None:
    """Return the decay of a base, None before its first one; while the base is not known, the newest of any.

    >>> in_force({"tiny": 930_000, "large": 710_000}, "tiny"), in_force({"tiny": 930_000, "large": 710_000}, None)
    (930000, 710000)
    """
    return decays.get(base) if base is not None else next(reversed(decays.values()), None)


class Channel:
    """What is known of the channel of one node, put together from notices, windows and loads."""

    def __init__(self, node: str, shifts: Shifts) -> None:
        self.shifts = shifts
        self._node = node
        self._base: str | None = None
        self._decays: dict[str, int] = {}
        self._seen = Seen()

    def sample(self) -> ChannelSampled:
        """Return the report as of now."""
        return report(self._node, self._base, self._decays, self._seen, self.shifts.known)

    def hear_decay(self, notice: DecaySet, _id: str = "") -> None:
        """Remember the decay of a base."""
        self._decays.pop(notice.base, None)
        self._decays[notice.base] = notice.decay_ppm
        while len(self._decays) > BASES_MAX:
            del self._decays[next(iter(self._decays))]

    def hear(self, window: Window) -> None:
        """Count a window."""
        self._seen = cache.heard(self._seen, cache.record(window))

    def taken(self, order: LoadOrdered) -> None:
        """Learn the base of the node from a load, and leave the engine to it."""
        self._base = order.base
        self.shifts.make_way(order.endpoint)

    def loaded(self, order: LoadOrdered, began_us: int, ended_us: int) -> None:
        """Hold the caches before and after a load against each other once the time has come; no repair is one."""
        if order.request is not None:
            load = Load(order.resident.version, order.instance, began_us, ended_us)
            self._seen = cache.loaded(self._seen, load)

    def proven(self, received: Received[LoadOrdered], listed: Sequence[str]) -> None:
        """Have the shift of an injection measured; `listed` are the names that the engine had before the load."""
        order = received.data
        former = core.former(order.resident, listed)
        if order.request is not None and former is not None:
            trace = received.header.traceparent or ""
            self.shifts.ask(Move(order.endpoint, former, order.resident.version, trace))


async def follow(bus: Bus, node: str, hear: Callable[[Window], None]) -> None:
    """Pass on the windows of a node from now on, for ever; what is lost is lost."""
    while True:
        try:
            await _follow(bus, node, hear)
        except KiteError as error:
            log.warning("windows_unheard", node=node, code=error.code, reason=str(error))
        await asyncio.sleep(RETRY_S)


async def _follow(bus: Bus, node: str, hear: Callable[[Window], None]) -> None:
    after_seq = (await bus.stream(TEL)).last_seq
    async with aclosing(bus.pull(TEL, after_seq, tel_subject(node), batch=PULL_WINDOWS)) as pulled:
        async for messages in pulled:
            for message in messages:
                window = read(message.payload)
                if window is not None:
                    hear(window)


def read(raw: bytes) -> Window | None:
    """Return the window that a message is, None for anything else."""
    try:
        data = decode(raw).data
    except MalformedEvent as error:
        log.debug("window_unreadable", reason=str(error))
        return None
    return data if isinstance(data, Window) else None
