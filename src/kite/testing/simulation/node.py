"""One simulated node: its three workers, and windows of 100 ms by its own clock."""

from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from uuid import UUID, uuid5

from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.drift import Watcher
from kite.testing.simulation.engine import Memory
from kite.testing.simulation.lines import Event, Line, Outlet, Taker
from kite.testing.simulation.upcycle import Guard, Upcycle
from kite.testing.simulation.worker import Trouble, Worker
from kite.testing.simulation.yoco import LIVING, Instance, Yoco
from kite_schemas.arbitration import TransportChanged
from kite_schemas.model import Data
from kite_schemas.telemetry import DeviceWindow, FragmentationSource, InstanceWindow, Window
from kite_schemas.upcycle import ResidentsSet
from kite_schemas.yoco import ChannelSampled, Device, Found, NodeRegistered

SPACE = UUID("00000000-0000-4000-8000-0000000051a1")
"""Ids of a simulation are derived in it."""

INTERVAL_US, JITTER_US, HELD_US = 100_000, 2_000, 4_000
"""Distance of windows, how unevenly they come, and how long one takes from its sample to the bus."""

CHANNEL_US = 5_000_000
"""Distance of two reports about the channel."""

KEPT_US = 6_000_000
"""So long after the death of their yoco processes wait for the next one; then they are ended."""


@dataclass(slots=True)
class Node:
    """One node. `offset_us` is what its clock is ahead of true time."""

    id: str
    agenda: Agenda
    rng: Random
    line: Line
    take: Taker
    outlet: Outlet
    yoco: Yoco
    upcycle: Upcycle
    guard: Guard
    memories: tuple[Memory, ...]
    offset_us: int = 0
    interval_us: int = INTERVAL_US
    up: bool = False
    silent: bool = False
    boots: int = 0
    seq: int = 0
    workers: dict[str, Worker] = field(default_factory=dict[str, Worker])
    _said: "count[int]" = field(default_factory=count)
    _closed_us: int = 0
    watcher: Watcher = field(init=False)

    def __post_init__(self) -> None:
        tasks = {"yoco": self.yoco.tasks(), "upcycle": self.upcycle.tasks(), "guard": self.guard.tasks()}
        for service, table in tasks.items():
            self.workers[service] = Worker(self.agenda, partial(self._publish, service), table)
            self.workers[service].up = False
        upcycle, say = self.upcycle, partial(self.say, "upcycle")
        self.watcher = Watcher(upcycle.agenda, upcycle.engines, upcycle.store, say, lambda: self.workers["upcycle"].up)

    @property
    def boot(self) -> str:
        """Id of its present start."""
        return str(uuid5(SPACE, f"{self.id}/boot/{self.boots}"))

    def begin(self) -> None:
        """Start: find what runs, take up the orders of the life before, register, and send windows from 1 on."""
        self.up = True
        self.boots += 1
        self.seq = 0
        self.outlet.begin()
        found = self.yoco.adopt()
        for worker in self.workers.values():
            if not worker.up:
                worker.start()
        self.say("yoco", f"node/{self.id}", self._registration(found))
        self._closed_us = self.agenda.now_us
        self.agenda.after(self.interval_us, partial(self._beat, self.boots))
        self.agenda.after(CHANNEL_US, partial(self._report, self.boots))

    def end(self, *, farewell: bool) -> None:
        """Stop, as told to or all of a sudden."""
        self.up = False
        for worker in self.workers.values():
            worker.stop()
        for fact in self.yoco.close() if farewell else ():
            self.say("yoco", f"instance/{fact.instance}", fact)
        self.yoco.forget()

    def fall(self) -> None:
        """Let the yoco end by itself; its processes go on, as do upcycle and guard."""
        self.up = False
        self.workers["yoco"].stop()
        self.agenda.after(KEPT_US, partial(self._give_up, self.boots))

    def _give_up(self, boots: int) -> None:
        """End the processes of which nobody took care in time."""
        if not self.up and boots == self.boots:
            self.yoco.forget()

    def kill(self, instance: Instance) -> None:
        """Let a process end by itself; an order in hand notices for itself, and says so as its outcome."""
        if instance.engine is None or instance.state not in LIVING:
            return
        instance.engine.end()
        died = Trouble("engine", "engine_died")
        if not self.workers["yoco"].interrupt(f"instance/{instance.id}", died):
            self.say("yoco", f"instance/{instance.id}", self.yoco.die(instance))

    def deliver(self, service: str, event: Event) -> None:
        """Take what the bus has for one of its workers."""
        if isinstance(event.data, TransportChanged):
            if self.up:
                self.outlet.switch(event.data, self.boot)
        elif isinstance(event.data, ResidentsSet):
            self.watcher.tell(event.id, event.data)
        else:
            self.workers[service].take(event)

    def say(self, service: str, subject: str, fact: Data) -> None:
        """Publish a fact that nobody ordered."""
        name = str(uuid5(SPACE, f"{self.id}/{service}/{next(self._said)}"))
        self._publish(service, Event(name, subject, fact, self.agenda.now_us))

    def window(self) -> Window:
        """Close the window that ends now."""
        self.seq += 1
        emitted_us = self.agenda.now_us + self.offset_us
        interval_us, self._closed_us = self.agenda.now_us - self._closed_us, self.agenda.now_us
        for memory in self.memories:
            memory.settle()
        return Window(
            node=self.id,
            boot=self.boot,
            seq=self.seq,
            interval_us=interval_us,
            sampled_us=emitted_us - HELD_US,
            emitted_us=emitted_us,
            instances=tuple(self._told(instance) for instance in self.yoco.living()),
            devices=tuple(map(_device, self.memories)),
        )

    def _publish(self, service: str, event: Event) -> None:
        """What one service says about one subject stays in order; everything else overtakes."""
        self.line.send(f"{service}/{self.id}/{event.subject}", event, self.take)

    def _beat(self, boots: int) -> None:
        if not self.up or boots != self.boots:
            return
        self.agenda.after(self.interval_us - JITTER_US + self.rng.randrange(2 * JITTER_US), partial(self._beat, boots))
        window = self.window()
        if not self.silent:
            name = str(uuid5(SPACE, f"{self.boot}/window/{window.seq}"))
            self.outlet.put(Event(name, f"node/{self.id}", window, self.agenda.now_us))

    def _report(self, boots: int) -> None:
        if self.up and boots == self.boots:
            self.agenda.after(CHANNEL_US, partial(self._report, boots))
            worst_ppm = max(memory.fragmentation_ppm for memory in self.memories)
            sampled = ChannelSampled(node=self.id, instances=len(self.yoco.living()), fragmentation_ppm=worst_ppm)
            self.say("yoco", f"node/{self.id}", sampled)

    def _told(self, instance: Instance) -> InstanceWindow:
        engine = instance.engine
        if engine is None or instance.state not in LIVING:
            return InstanceWindow(id=instance.id)
        return engine.window(self.rng.randrange(self.interval_us))

    def _registration(self, found: tuple[Found, ...]) -> NodeRegistered:
        devices = tuple(Device(id=memory.id, kind="gpu", memory_bytes=memory.total_bytes) for memory in self.memories)
        return NodeRegistered(
            node=self.id,
            boot=self.boot,
            devices=devices,
            memory_bytes=sum(memory.total_bytes for memory in self.memories),
            sleep_modes=self.yoco.modes,
            instances=found,
            engines=(self.yoco.offer(),),
        )


def _device(memory: Memory) -> DeviceWindow:
    return DeviceWindow(
        id=memory.id, fragmentation_ppm=memory.fragmentation_ppm, fragmentation_source=FragmentationSource.ESTIMATE
    )
