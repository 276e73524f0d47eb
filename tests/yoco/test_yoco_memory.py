"""Fragmentation by estimate: the arithmetic, the sizes on the disk, and all of it on engines with real adapters."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kite.clock import mono_us
from kite.engine import EngineAnswer
from kite.engine.reading import Allocation, read_folders
from kite.events import Origin, new_id
from kite.testing import adapters
from kite.testing.engine import tiny_spec
from kite.testing.eventually import eventually
from kite_schemas.telemetry import DeviceWindow, FragmentationSource
from kite_schemas.yoco import Device, InstanceChanged, State
from kite_yoco.instances import Instance, Instances
from kite_yoco.lifecycle import Event
from kite_yoco.telemetry.gpu import device_windows
from kite_yoco.telemetry.listener import Listener
from kite_yoco.telemetry.memory import (
    FRESH_US,
    Fragmentation,
    Holding,
    Memory,
    estimate,
    folders_bytes,
    fragmentation,
    fragmentations,
    weights_bytes,
)
from kite_yoco.telemetry.sampler import Sampler

ANSWER_S = 60.0
GIB = 1024**3
CAPACITY_BYTES = 4 * GIB
GPU = Device(id="GPU-1", kind="gpu", memory_bytes=1_000)
DEVICES = tuple(Device(id=name, kind="cpu", memory_bytes=CAPACITY_BYTES) for name in ("cpu0", "cpu1"))


@pytest.mark.parametrize(
    ("holdings", "expected"),
    [
        ([], 0),
        ([Holding("cpu0", 100, 0, 0)], 0),
        ([Holding("cpu0", 200, 40, 240)], 350_000),
        ([Holding("cpu0", 200, 40, 241)], 351_250),
        ([Holding("cpu0", 100, 40, 0), Holding("cpu0", 100, 0, 240)], 350_000),
        ([Holding("cpu0", 200, 900, 0)], 1_000_000),
        ([Holding("cpu0", 1_000, 0, 0)], None),
        ([Holding("cpu0", None, 40, 0)], None),
        ([Holding("cpu0", 200, None, 0), Holding("cpu0", 200, 40, 0)], None),
    ],
)
def test_the_estimate_is_what_is_held_over_what_the_weights_leave(
    holdings: list[Holding], expected: int | None
) -> None:
    assert estimate(1_000, holdings) == expected


def test_a_device_of_which_something_is_not_known_is_left_out() -> None:
    holdings = [Holding("cpu0", 1, None, 0), Holding("cpu1", 1, 0, 0), Holding("GPU-1", 1, 0, 0)]
    assert fragmentations([*DEVICES, GPU], holdings) == estimated({"cpu1": 0})


@pytest.mark.parametrize(
    ("allocations", "expected"),
    [
        ([(1_000, 350)], 350_000),
        ([(1_000, 351)], 351_000),
        ([(800, 100), (200, 150)], 250_000),
        ([(0, 0)], None),
        ([], None),
    ],
)
def test_on_a_gpu_it_is_what_torch_has_reserved_and_cannot_use(
    allocations: list[tuple[int, int]], expected: int | None
) -> None:
    held = Holding("GPU-1", 1, 0, 0, [Allocation(*one) for one in allocations])
    found = None if expected is None else Fragmentation(expected, FragmentationSource.TORCH)
    assert fragmentation(GPU, [held]) == found


def test_one_worker_without_an_answer_makes_a_gpu_unknown() -> None:
    held = [Holding("GPU-1", 1, 0, 0, [Allocation(1_000, 350)]), Holding("GPU-1", 1, 0, 0, None)]
    assert fragmentation(GPU, held) is None


def test_what_is_known_of_a_device_names_its_source() -> None:
    assert device_windows({"GPU-1": 5}, estimated({"cpu0": 7})) == (
        DeviceWindow(id="GPU-1", bandwidth_ppm=5),
        DeviceWindow(id="cpu0", fragmentation_ppm=7, fragmentation_source=FragmentationSource.ESTIMATE),
    )


def estimated(ppm: dict[str, int]) -> dict[str, Fragmentation]:
    return {name: Fragmentation(value, FragmentationSource.ESTIMATE) for name, value in ppm.items()}


def write(file: Path, size_bytes: int) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(bytes(size_bytes))


def test_the_weights_of_a_base_are_the_files_that_an_engine_loads(tmp_path: Path) -> None:
    assert weights_bytes(tmp_path) is None
    write(tmp_path / "model.pt", 1)
    assert weights_bytes(tmp_path) == 1
    write(tmp_path / "pytorch_model.bin", 20)
    assert weights_bytes(tmp_path) == 20
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        write(tmp_path / name, 300)
    assert weights_bytes(tmp_path) == 900
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}})
    )
    assert weights_bytes(tmp_path) == 600
    (tmp_path / "model-2.safetensors").unlink()
    assert weights_bytes(tmp_path) is None, "one that is named and not there is not nothing"
    for broken in ("[]", "{", "{}"):
        index.write_text(broken)
        assert weights_bytes(tmp_path) is None


def test_the_size_of_adapters_is_that_of_their_files(tmp_path: Path) -> None:
    write(tmp_path / "a" / "adapter_model.safetensors", 100)
    write(tmp_path / "a" / "adapter_config.json", 10)
    write(tmp_path / "b" / "adapter_model.safetensors", 1)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert (folders_bytes([]), folders_bytes(folders)) == (0, 111)
    assert folders_bytes([*folders, str(tmp_path / "gone")]) is None


def test_a_list_of_models_in_another_form_is_no_list_without_adapters() -> None:
    answers: list[object] = [{"data": []}, {"data": [{"id": "tiny"}, {"id": "risk"}]}, {"data": None}, []]
    for answer in answers:
        with pytest.raises(EngineAnswer):
            read_folders(answer)


async def no_report(fact: InstanceChanged) -> None:
    raise AssertionError(fact)


@pytest.fixture
async def instances(tmp_path: Path, tiny_base: Path) -> AsyncGenerator[Instances]:
    """Two ready fake engines, `a` on cpu0 and `b` on cpu1."""
    node = Instances("n1", no_report)
    pair = [node.get("a"), node.get("b")]
    try:
        for instance, device in zip(pair, ("cpu0", "cpu1"), strict=True):
            instance.device = device
            await instance.spawn(tiny_spec("fake", tiny_base), tmp_path / f"{instance.id}.log", {})
            instance.move(Event.START)
        await asyncio.gather(*(instance.running.wait_healthy(ANSWER_S) for instance in pair))
        yield node
    finally:
        await asyncio.gather(*(instance.end() for instance in pair))


def go(instance: Instance, *events: Event) -> None:
    for event in events:
        instance.move(event)


async def known(memory: Memory) -> dict[str, int]:
    await memory.read()
    return {name: found.ppm for name, found in memory.fragmentation(mono_us()).items()}


async def test_loaded_adapters_and_sleeping_caches_are_measured(
    tmp_path: Path, tiny_base: Path, instances: Instances
) -> None:
    a, b = instances
    weights = (tiny_base / "model.safetensors").stat().st_size
    folder = adapters.adapter(tmp_path / "risk", tiny_base)
    adapter = sum(file.stat().st_size for file in folder.iterdir())
    room = CAPACITY_BYTES - weights
    memory = Memory(DEVICES, instances)
    assert (memory.fragmentation(mono_us()), memory.worst(mono_us())) == ({}, None), "nothing has been read yet"

    assert await known(memory) == {"cpu0": 0, "cpu1": 0}
    go(a, Event.ANSWERED, Event.WARMED)
    go(b, Event.ANSWERED, Event.WARMED)
    await a.engine.load("risk@0123456789ab", str(folder))
    await a.engine.load("risk@ba9876543210", str(folder))
    loaded = 2 * adapter * 1_000_000 // room
    assert loaded > 0
    assert await known(memory) == {"cpu0": loaded, "cpu1": 0}

    go(b, Event.DRAIN, Event.DRAINED, Event.PAUSED)
    assert b.state is State.ASLEEP
    await b.engine.pause()
    asleep = GIB * 1_000_000 // room
    assert await known(memory) == {"cpu0": loaded, "cpu1": asleep}
    assert memory.worst(mono_us()) == asleep

    await a.engine.unload("risk@0123456789ab")
    go(b, Event.WAKE)
    assert await known(memory) == {"cpu0": adapter * 1_000_000 // room, "cpu1": 0}
    assert memory.worst(mono_us() + FRESH_US + 1_000_000) is None, "what is old is not known"


async def test_an_engine_that_does_not_answer_makes_its_device_unknown(instances: Instances) -> None:
    a, _ = instances
    go(a, Event.ANSWERED, Event.WARMED)
    read = Memory(DEVICES, instances)
    os.kill(a.running.pid, signal.SIGSTOP)
    assert await known(read) == {"cpu1": 0}
    assert read.worst(mono_us()) is None
    os.kill(a.running.pid, signal.SIGCONT)
    assert await known(read) == {"cpu0": 0, "cpu1": 0}


async def test_adapters_that_are_gone_from_the_disk_make_their_device_unknown(
    tmp_path: Path, tiny_base: Path, instances: Instances
) -> None:
    a, _ = instances
    go(a, Event.ANSWERED, Event.WARMED)
    folder = adapters.adapter(tmp_path / "risk", tiny_base)
    await a.engine.load("risk@0123456789ab", str(folder))
    folder.rename(tmp_path / "elsewhere")
    assert await known(Memory(DEVICES, instances)) == {"cpu1": 0}


async def test_every_window_tells_of_the_devices(instances: Instances) -> None:
    read = Memory(DEVICES, instances)
    with Listener() as listener:
        origin = Origin("kite/yoco/n1", "yoco@test")
        sampler = Sampler("n1", new_id(), origin, instances=instances, listener=listener, memory=read)
        assert sampler.window(mono_us()).devices == ()
        reading = asyncio.create_task(read.run())
        await eventually(lambda: read.fragmentation(mono_us()))
        reading.cancel()
        for _ in range(2):
            assert sampler.window(mono_us()).devices == device_windows({}, estimated({"cpu0": 0, "cpu1": 0}))
