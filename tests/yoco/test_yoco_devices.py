"""What a node registers to run on, with a stand-in for the driver's library where a GPU is told of."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from kite_yoco.core import cpu_devices, pinned
from kite_yoco.devices import memory_bytes

CC = shutil.which("cc")
needs_compiler = pytest.mark.skipif(CC is None, reason="no C compiler")

NVML = """
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)1; return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) { strcpy(text, "GPU-7e57"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *sizes) { sizes[0] = 1ULL << 37; return 0; }
const char *nvmlErrorString(int code) { return "Driver Not Loaded"; }
"""
OK, DRIVER_NOT_LOADED = 0, 9

FIND = """
import json
from kite_yoco.devices import find_devices
print(json.dumps([device.model_dump() for device in find_devices()]))
"""


def find(libraries: Path) -> tuple[list[dict[str, object]], str]:
    """Return (devices, log) of a process that sees the driver's library in a folder."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run([sys.executable, "-c", FIND], env=env, capture_output=True, text=True, check=True)
    line = done.stdout.splitlines()[-1]
    return cast("list[dict[str, object]]", json.loads(line)), done.stdout


def stand_in(folder: Path, *, init: int, count: int) -> Path:
    """Build a driver's library that answers `init` and has `count` GPUs."""
    (folder / "nvml.c").write_text(NVML)
    options = ["-shared", "-fPIC", f"-DINIT={init}", f"-DCOUNT={count}"]
    subprocess.run([str(CC), *options, "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    return folder


@needs_compiler
def test_gpus_are_devices_by_their_uuid(tmp_path: Path) -> None:
    devices, _ = find(stand_in(tmp_path, init=OK, count=1))
    assert devices == [{"id": "GPU-7e57", "kind": "gpu", "memory_bytes": 2**37}]


@needs_compiler
def test_a_driver_without_gpus_leaves_the_cores(tmp_path: Path) -> None:
    devices, _ = find(stand_in(tmp_path, init=OK, count=0))
    assert {device["kind"] for device in devices} == {"cpu"}


@needs_compiler
def test_a_broken_driver_is_said_in_the_log_and_leaves_the_cores(tmp_path: Path) -> None:
    devices, log = find(stand_in(tmp_path, init=DRIVER_NOT_LOADED, count=1))
    assert len(devices) == len(os.sched_getaffinity(0))
    assert "nvml_broken" in log
    assert "Driver Not Loaded" in log


def test_cores_share_the_memory() -> None:
    devices = cpu_devices([3, 1], 4_097)
    assert [(device.id, device.memory_bytes) for device in devices] == [("cpu1", 2_048), ("cpu3", 2_048)]
    assert memory_bytes() > 0


def test_an_engine_sees_its_own_gpu_only() -> None:
    assert pinned("GPU-7e57") == {"CUDA_VISIBLE_DEVICES": "GPU-7e57"}
    assert pinned("cpu0") == {}
