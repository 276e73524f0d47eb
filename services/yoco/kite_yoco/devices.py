"""What a node can run instances on: its GPUs as NVML knows them, or the cores this process may use."""
# ruff: noqa: N802 - NVML's own names

import os
from importlib import import_module
from typing import Protocol, cast

import psutil
import structlog

from kite.errors import Fault, KiteError
from kite_schemas.yoco import Device
from kite_yoco.core import cpu_devices

log = structlog.get_logger()


class Memory(Protocol):
    """NVML's memory sizes, in bytes."""

    total: int


class Nvml(Protocol):
    """The part of `pynvml` that is used here: it ships no types."""

    NVMLError: type[Exception]
    NVMLError_LibraryNotFound: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object) -> Memory: ...
    def nvmlDeviceGetUUID(self, handle: object) -> str: ...


class NvmlBroken(KiteError):
    """NVML is installed and does not work."""

    code = "nvml_broken"
    fault = Fault.OPERATOR


def find_devices() -> tuple[Device, ...]:
    """Return the GPUs, or one device per usable core when there is none.

    An NVML that is there and does not work is said in the log: a node that should have GPUs must not turn into a CPU
    node in silence.
    """
    try:
        gpus = gpu_devices()
    except NvmlBroken as error:
        log.warning("nvml_broken", error=str(error), hint=error.hint, fallback="cpu")
        gpus = ()
    return gpus or cpu_devices(sorted(os.sched_getaffinity(0)), memory_bytes())


def memory_bytes() -> int:
    """Return the main memory of the node."""
    return psutil.virtual_memory().total


def gpu_devices() -> tuple[Device, ...]:
    """Return the GPUs by UUID (indices change with the order of the bus), none without NVML. Raises NvmlBroken."""
    nvml = cast("Nvml", import_module("pynvml"))
    try:
        nvml.nvmlInit()
        found = tuple(gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        nvml.nvmlShutdown()
    except nvml.NVMLError_LibraryNotFound:
        return ()
    except nvml.NVMLError as error:
        raise NvmlBroken(
            f"NVML does not work: {error}", hint="`nvidia-smi` should say the same: see to the driver"
        ) from error
    return found


def gpu(nvml: Nvml, index: int) -> Device:
    """Return one GPU. Raises NVMLError."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(id=nvml.nvmlDeviceGetUUID(handle), kind="gpu", memory_bytes=int(memory.total))
