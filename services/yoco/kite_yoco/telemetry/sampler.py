"""The loop that makes a window of the node every 100 ms, idle or not, and reads pages of metrics where it must."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from kite.clock import US_PER_S, mono_us, wall_us
from kite.engine import EngineError
from kite.events import Composed, Origin, compose
from kite.telemetry import INTERVAL_US, Reading
from kite_schemas.telemetry import INSTANCES_MAX, Source, Window
from kite_schemas.yoco import State
from kite_yoco.instances import Instance, Instances
from kite_yoco.telemetry.fold import SCRAPE_US, Track, hear, silent, take
from kite_yoco.telemetry.gpu import Gpus, device_windows
from kite_yoco.telemetry.listener import Listener
from kite_yoco.telemetry.memory import Memory
from kite_yoco.telemetry.outlet import Outlet
from kite_yoco.telemetry.page import read_page

PHASE_US = 30_000  # after the engines' own beat: what they send at it is in the window that follows
PAGE_S = 0.8  # for one page: it has to be there before the next is due
GPU_FRESH_US = 5 * INTERVAL_US  # a read takes a while itself
SPEECHLESS = (State.ABSENT, State.STARTING, State.PREWARMED, State.FAILED)  # no page to read


@dataclass(slots=True)
class Board:
    """What is known of the instances that have a process, by id. One that has none any more is forgotten."""

    instances: Instances
    tracks: dict[str, Track] = field(default_factory=dict[str, Track])
    strays: int = 0  # readings of instances that are not here

    def hear(self, source: Source, reading: Reading) -> None:
        """Add a reading."""
        if any(instance.id == reading.instance and instance.lives for instance in self.instances):
            self.tracks[reading.instance] = hear(self.track(reading.instance), source, reading)
        else:
            self.strays += 1

    def track(self, name: str) -> Track:
        """Return what is known of an instance."""
        return self.tracks.get(name, Track())

    def living(self) -> list[Instance]:
        """Return the instances that have a process, by id."""
        found = [instance for instance in self.instances if instance.lives]
        return sorted(found, key=lambda instance: instance.id)[:INSTANCES_MAX]

    def silent(self, now_us: int) -> list[Instance]:
        """Return the instances that answer and of which no stat logger speaks."""
        return [
            instance
            for instance in self.living()
            if instance.state not in SPEECHLESS and silent(self.track(instance.id), now_us)
        ]


class Sampler:
    """Samples one node, and puts its windows into an outlet."""

    def __init__(
        self, node: str, boot: str, origin: Origin, *, instances: Instances, listener: Listener, memory: Memory
    ) -> None:
        self.board = Board(instances)
        self._node = node
        self._boot = boot
        self._origin = origin
        self._listener = listener
        self._memory = memory
        self._seq = count(1)
        self._closed_us = mono_us()
        self._gpus = Gpus()
        self._bandwidths: Mapping[str, int] = {}
        self._bandwidths_us = 0
        self._pages = count(1)

    async def run(self, outlet: Outlet) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._gpus.open)
        loop.add_reader(self._listener, self.listen)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(outlet))
                tasks.create_task(self._read_pages())
                tasks.create_task(self._memory.run())
                if self._gpus.present:
                    tasks.create_task(self._read_gpus())
        finally:
            loop.remove_reader(self._listener)
            await outlet.close()

    def listen(self) -> None:
        """Take in the datagrams that have come."""
        for reading in self._listener.receive():
            self.board.hear(Source.STAT_LOGGER, reading)

    def window(self, now_us: int) -> Window:
        """Close the window that ends at a monotonic time. What was late is in the next one: nothing is lost."""
        sampled_us, board = wall_us(), self.board
        living = board.living()
        told = [take(instance.id, board.track(instance.id), now_us) for instance in living]
        board.tracks = {window.id: track for window, track in told}
        interval_us, self._closed_us = now_us - self._closed_us, now_us
        return Window(
            node=self._node,
            boot=self._boot,
            seq=next(self._seq),
            interval_us=interval_us,
            sampled_us=sampled_us,
            emitted_us=wall_us(),
            instances=tuple(window for window, _ in told),
            devices=device_windows(
                self._bandwidths if now_us - self._bandwidths_us <= GPU_FRESH_US else {},
                self._memory.fragmentation(now_us),
            ),
        )

    async def _beat(self, outlet: Outlet) -> None:
        self._closed_us = mono_us()
        while True:
            await asyncio.sleep(until_us(mono_us()) / US_PER_S)
            outlet.put(self._composed(self.window(mono_us())))

    def _composed(self, window: Window) -> Composed:
        return compose(f"node/{self._node}", window, self._origin)

    async def _read_pages(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_US / US_PER_S)
            await asyncio.gather(*map(self._read_page, self.board.silent(mono_us())))

    async def _read_page(self, instance: Instance) -> None:
        began_us = mono_us()
        try:
            async with asyncio.timeout(PAGE_S):
                page = await instance.engine.metrics()
        except (EngineError, TimeoutError):
            return  # an instance that does not answer makes absent values
        reading = Reading(
            instance=instance.id, started_us=0, seq=next(self._pages), sent_us=began_us, totals=read_page(page)
        )
        if silent(self.board.track(instance.id), mono_us()):  # its stat logger may have spoken meanwhile
            self.board.hear(Source.METRICS, reading)

    async def _read_gpus(self) -> None:
        while True:
            self._bandwidths, self._bandwidths_us = await asyncio.to_thread(self._gpus.read), mono_us()
            await asyncio.sleep(INTERVAL_US / US_PER_S)


def until_us(now_us: int) -> int:
    """Return the time until the next window is due.

    >>> until_us(1_000_000), until_us(1_030_000)
    (30000, 100000)
    """
    return INTERVAL_US - (now_us - PHASE_US) % INTERVAL_US
