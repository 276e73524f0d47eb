"""How much of a device's memory is held by what does not serve: as torch's allocator has it on a GPU, else estimated.

The estimate is (retained adapters + sleeping residue) / (capacity - resident weights), from what is on the disk and
what the engines list. It is read at a slow pace, beside the beat of the windows.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kite.clock import US_PER_S, mono_us
from kite.engine import EngineError, EngineSpec
from kite.engine.reading import Allocation
from kite_schemas.model import PPM
from kite_schemas.telemetry import FragmentationSource
from kite_schemas.yoco import Device, SleepMode, State
from kite_yoco.instances import Instance, Instances

READ_US = 5 * US_PER_S  # between two readings: adapters come and go in seconds, and each costs a request an instance
FRESH_US = 5 * READ_US // 2
LIST_S = 2.0  # for one engine to say what it has loaded
INDEX_NAME = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""What an engine loads of a base: the files of the first pattern that has any, those of the index when there is one."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one instance holds of its device, in bytes; None is not known."""

    device: str
    weights_bytes: int | None
    adapters_bytes: int | None
    residue_bytes: int
    allocations: Sequence[Allocation] | None = None  # of a GPU's workers


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How fragmented a device is, and who says so."""

    ppm: int
    source: FragmentationSource


def fragmentations(devices: Iterable[Device], holdings: Sequence[Holding]) -> dict[str, Fragmentation]:
    """Return the fragmentation of the devices by id; one of which something is not known is left out."""
    found = {device.id: fragmentation(device, [h for h in holdings if h.device == device.id]) for device in devices}
    return {device: value for device, value in found.items() if value is not None}


def fragmentation(device: Device, holdings: Sequence[Holding]) -> Fragmentation | None:
    """Return the fragmentation of one device: as its allocators have it on a GPU, else estimated."""
    if device.kind == "gpu":
        value, source = allocated(holdings), FragmentationSource.TORCH
    else:
        value, source = estimate(device.memory_bytes, holdings), FragmentationSource.ESTIMATE
    return None if value is None else Fragmentation(value, source)


def allocated(holdings: Sequence[Holding]) -> int | None:
    """Return the share of what torch has reserved that is split off and idle, in ppm; None when it is not known.

    >>> allocated([Holding("GPU-1", 1, 1, 0, [Allocation(800, 100), Allocation(200, 150)])])
    250000
    """
    told = [allocation for held in holdings for allocation in held.allocations or ()]
    reserved_bytes = sum(allocation.reserved_bytes for allocation in told)
    if any(held.allocations is None for held in holdings) or not reserved_bytes:
        return None
    return min(PPM, sum(allocation.inactive_bytes for allocation in told) * PPM // reserved_bytes)


def estimate(capacity_bytes: int, holdings: Sequence[Holding]) -> int | None:
    """Return the fragmentation of one device in ppm, None when it is not known or weights leave no room to divide by.

    >>> estimate(1_000, [Holding("cpu0", 200, 100, 0), Holding("cpu0", 200, 0, 50)])
    250000
    """
    held, room = 0, capacity_bytes
    for holding in holdings:
        if holding.weights_bytes is None or holding.adapters_bytes is None:
            return None
        held += holding.adapters_bytes + holding.residue_bytes
        room -= holding.weights_bytes
    return min(PPM, held * PPM // room) if room > 0 else None


def weights_bytes(base: Path) -> int | None:
    """Return the size of the files of a base that an engine loads, None when there are none or they cannot be read."""
    try:
        files = indexed(base) or next((found for pattern in WEIGHTS if (found := sorted(base.glob(pattern)))), ())
        return sum(file.stat().st_size for file in files) or None
    except (OSError, ValueError):
        return None


def indexed(base: Path) -> Sequence[Path]:
    """Return the files that the index of a base names, none without one. Raises OSError, ValueError."""
    try:
        index = cast("object", json.loads((base / INDEX_NAME).read_bytes()))
    except FileNotFoundError:
        return ()
    files = cast("dict[str, object]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise ValueError(INDEX_NAME)
    return [base / name for name in sorted({str(name) for name in cast("dict[str, object]", files).values()})]


def folders_bytes(folders: Iterable[str]) -> int | None:
    """Return the size of all files in the folders of some adapters, None when one cannot be read."""
    try:
        return sum(file.stat().st_size for folder in folders for file in Path(folder).iterdir() if file.is_file())
    except OSError:
        return None


def residue_bytes(state: State, mode: SleepMode | None, spec: EngineSpec) -> int:
    """Return what an instance holds of its cache while it sleeps: a pause frees nothing, and all else frees it."""
    pauses = mode in (None, SleepMode.PAUSED)
    return spec.kv_cache_bytes if state is State.ASLEEP and pauses else 0


def holds_weights(state: State, mode: SleepMode | None) -> bool:
    """Say whether the weights of an instance are on its device: not before they are read, nor in a deep sleep."""
    return state is not State.PREWARMED and not (state is State.ASLEEP and mode in (SleepMode.L1, SleepMode.L2))


class Memory:
    """Reads what the instances of one node hold of its devices."""

    def __init__(self, devices: Sequence[Device], instances: Instances) -> None:
        self._devices = devices
        self._instances = instances
        self._weights: dict[str, int] = {}  # by path of the base: its files never change
        self._known: Mapping[str, Fragmentation] = {}
        self._known_us = 0

    def fragmentation(self, now_us: int) -> Mapping[str, Fragmentation]:
        """Return what is known at a monotonic time, by device."""
        return self._known if now_us - self._known_us <= FRESH_US else {}

    def worst(self, now_us: int) -> int | None:
        """Return the fragmentation of the worst device in ppm, None unless that of all is known."""
        known = self.fragmentation(now_us)
        return max(found.ppm for found in known.values()) if len(known) == len(self._devices) else None

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(READ_US / US_PER_S)

    async def read(self) -> None:
        """Read once."""
        living = [instance for instance in self._instances if instance.lives]
        specs = [instance.running.spec for instance in living]  # now: an instance may end meanwhile
        holdings = await asyncio.gather(*map(self._holding, living, specs))
        self._known, self._known_us = fragmentations(self._devices, holdings), mono_us()

    async def _holding(self, instance: Instance, spec: EngineSpec) -> Holding:
        state, mode, device = instance.state, instance.mode, instance.device
        folders = await listed(instance)
        weights, adapters = await asyncio.to_thread(self._sizes, spec.base_path, folders)
        allocations = None if spec.cpus else await allocations_of(instance)
        here = weights if holds_weights(state, mode) else 0
        return Holding(device, here, adapters, residue_bytes(state, mode, spec), allocations)

    def _sizes(self, base: str, folders: Sequence[str] | None) -> tuple[int | None, int | None]:
        if base not in self._weights and (found := weights_bytes(Path(base))) is not None:
            self._weights[base] = found
        return self._weights.get(base), None if folders is None else folders_bytes(folders)


async def listed(instance: Instance) -> Sequence[str] | None:
    """Return the folders of the adapters that an instance has loaded, None when it does not say."""
    if instance.state in (State.STARTING, State.PREWARMED):
        return ()  # it does not answer yet, and nothing has been loaded into it
    try:
        async with asyncio.timeout(LIST_S):
            return tuple((await instance.engine.adapters()).values())
    except (EngineError, TimeoutError):
        return None


async def allocations_of(instance: Instance) -> Sequence[Allocation] | None:
    """Return what the allocators of an instance hold, None when it does not say."""
    if instance.state is State.PREWARMED:
        return ()  # a rehearsal of 1 MB
    try:
        async with asyncio.timeout(LIST_S):
            return await instance.engine.allocations()
    except (EngineError, TimeoutError):
        return None
