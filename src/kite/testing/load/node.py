"""One node of a synthetic fleet: its instances with their queues, its devices, and its windows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from uuid import UUID, uuid5

from kite.testing.load.profiles import SLOT_US
from kite.testing.load.serving import RUNNING_MAX, Serving
from kite_schemas.model import PPM
from kite_schemas.telemetry import DeviceWindow, FragmentationSource, InstanceWindow, Window
from kite_schemas.yoco import Device, NodeRegistered, SleepMode
from kite_schemas.yoco import State as Life

BOOTS = UUID("00000000-0000-4000-8000-00000000b007")
DEVICE_BYTES = 80 * 1024**3
NODE_BYTES = 512 * 1024**3

HELD_US = 30_000
"""How long a window waits for stragglers, as yoco's do."""

FRAGMENTATION_FLOOR_PPM = 120_000
FRAGMENTATION_LOAD_PPM = 90_000
"""What each load adds on its device; a sixty-fourth of what is above the floor goes with every window."""

FRAGMENTATION_MAX_PPM = 900_000
FRAGMENTATION_HALVING = 6


@dataclass(slots=True)
class Place:
    """What a node knows of one of its instances."""

    serving: Serving
    device: str
    standby: bool
    state: Life = Life.ABSENT
    versions: tuple[str, ...] = ()


@dataclass(slots=True)
class Node:
    """One node. It counts its windows under `boot`; `turned_away` are the requests that found no queue with room."""

    id: str
    base: str
    rng: Random
    counts: Iterator[int]
    repeats: Iterator[int]
    devices: tuple[str, ...]
    boot: str = field(init=False)
    windows: int = 0
    turned_away: int = 0
    places: dict[str, Place] = field(default_factory=dict[str, Place])
    fragmentation_ppm: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.boot = str(uuid5(BOOTS, self.id))

    def registration(self) -> NodeRegistered:
        """Return what its yoco says when it starts."""
        devices = tuple(Device(id=device, kind="gpu", memory_bytes=DEVICE_BYTES) for device in self.devices)
        return NodeRegistered(
            node=self.id, boot=self.boot, devices=devices, memory_bytes=NODE_BYTES, sleep_modes=(SleepMode.PAUSED,)
        )

    def ready(self) -> list[str]:
        """Return the instances that answer requests, by name."""
        return sorted(name for name, place in self.places.items() if place.state is Life.READY)

    def asleep(self) -> list[str]:
        """Return the standbys that sleep, by name."""
        return sorted(name for name, place in self.places.items() if place.state is Life.ASLEEP)

    def add(self, instance: str, device: str, *, standby: bool) -> None:
        """Make room for an instance that was ordered."""
        serving = Serving(instance, self.rng)
        self.places[instance] = Place(serving, device, standby)

    def moved(self, instance: str, state: Life) -> None:
        """An instance says that it is in a state."""
        self.places[instance].state = state

    def loaded(self, instance: str, version: str, at_us: int) -> None:
        """An instance says that it has loaded a version: its cache is cold for that, its memory in more pieces."""
        place = self.places[instance]
        place.versions = (*place.versions, version)
        place.serving.chill(at_us)
        former_ppm = self.fragmentation_ppm.get(place.device, FRAGMENTATION_FLOOR_PPM)
        self.fragmentation_ppm[place.device] = min(FRAGMENTATION_MAX_PPM, former_ppm + FRAGMENTATION_LOAD_PPM)

    def window(self, emitted_us: int) -> Window:
        """Let the requests of one slot come, and return the window over it."""
        self.windows += 1
        sampled_us = emitted_us - HELD_US
        self._serve(sampled_us)
        age_us = self.rng.randrange(HELD_US)
        named = sorted(self.places)
        return Window(
            node=self.id,
            boot=self.boot,
            seq=self.windows,
            interval_us=SLOT_US,
            sampled_us=sampled_us,
            emitted_us=emitted_us,
            instances=tuple(self._instance(name, sampled_us, age_us) for name in named),
            devices=tuple(self._device(device) for device in self.devices),
        )

    def _serve(self, until_us: int) -> None:
        """Give each request of the slot to the ready instance with the fewest inside."""
        ready = [self.places[name].serving for name in self.ready()]
        offsets = sorted(self.rng.randrange(SLOT_US) for _ in range(next(self.counts)))
        shared_ppm = next(self.repeats)
        for offset_us in offsets:
            taken = bool(ready) and min(ready, key=_inside).offer(until_us - SLOT_US + offset_us, shared_ppm)
            self.turned_away += not taken

    def _instance(self, name: str, until_us: int, age_us: int) -> InstanceWindow:
        place = self.places[name]
        if place.state in ANSWERING:
            return place.serving.window(until_us, age_us)
        return InstanceWindow(id=name)

    def _device(self, device: str) -> DeviceWindow:
        known_ppm = self.fragmentation_ppm.get(device, FRAGMENTATION_FLOOR_PPM)
        self.fragmentation_ppm[device] = known_ppm - ((known_ppm - FRAGMENTATION_FLOOR_PPM) >> FRAGMENTATION_HALVING)
        running = sum(len(place.serving.running) for place in self.places.values() if place.device == device)
        return DeviceWindow(
            id=device,
            bandwidth_ppm=min(PPM, running * PPM // (2 * RUNNING_MAX)),
            fragmentation_ppm=self.fragmentation_ppm[device],
            fragmentation_source=FragmentationSource.TORCH,
        )


ANSWERING = frozenset({Life.READY, Life.DRAINING, Life.ASLEEP})
"""States in which a process tells its numbers."""


def _inside(serving: Serving) -> tuple[int, str]:
    return serving.in_flight, serving.id
