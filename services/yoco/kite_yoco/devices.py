"""What a node can run instances on: its GPUs as NVML knows them, or the cores this process may use."""

import os

import psutil
import structlog

from kite.errors import Fault, KiteError
from kite_schemas.yoco import Device
from kite_yoco.core import cpu_devices

log = structlog.get_logger()


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
    import pynvml

    try:
        pynvml.nvmlInit()
        found = tuple(gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return ()
        raise broken(error) from error
    return found


def gpu(index: int) -> Device:
    """Return one GPU. Raises NVMLError."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(id=str(pynvml.nvmlDeviceGetUUID(handle)), kind="gpu", memory_bytes=int(memory.total))


def broken(error: Exception) -> NvmlBroken:
    """Return our error for NVML's."""
    return NvmlBroken(f"NVML does not work: {error}", hint="`nvidia-smi` should say the same; see the driver")
