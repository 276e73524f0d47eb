"""Memory bandwidth of the GPUs, from NVML's performance monitor (Hopper and later).

`utilization.memory` of NVML is the share of time in which memory was used at all, not of bandwidth: it is not read.
"""
# ruff: noqa: N802, N803, N815 - NVML's own names

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import structlog

from kite_schemas.model import PPM
from kite_schemas.telemetry import DeviceWindow
from kite_schemas.yoco import DEVICES_MAX
from kite_yoco.telemetry.memory import Fragmentation

PERCENT = 100

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Support(Protocol):
    """Whether a GPU has the monitor."""

    isSupportedDevice: int


class Metric(Protocol):
    """One metric between two samples."""

    metricId: int
    nvmlReturn: int
    value: float


class Query(Protocol):
    """Which metrics are wanted between which samples."""

    version: int
    numMetrics: int
    sample1: object
    sample2: object
    metrics: Sequence[Metric]


class Gpm(Protocol):
    """The part of `pynvml` that is used here: it ships no types."""

    NVMLError: type[Exception]
    NVML_SUCCESS: int
    NVML_GPM_METRIC_DRAM_BW_UTIL: int
    NVML_GPM_METRICS_GET_VERSION: int
    c_nvmlGpmMetricsGet_t: Callable[[], Query]

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...
    def nvmlDeviceGetUUID(self, handle: object) -> str: ...
    def nvmlGpmQueryDeviceSupport(self, device: object) -> Support: ...
    def nvmlGpmSampleAlloc(self) -> object: ...
    def nvmlGpmSampleGet(self, device: object, gpmSample: object) -> object: ...
    def nvmlGpmMetricsGet(self, metricsGet: Query) -> Query: ...


@dataclass(slots=True)
class Monitored:
    """A GPU that has the monitor, with two samples that take turns; `taken` counts them."""

    id: str
    handle: object
    samples: tuple[object, object]
    taken: int = 0


class Gpus:
    """Reads all GPUs of the node; without NVML, and where it fails, there is nothing to read. Calls may block.

    The samples are never freed: a call may still be under way in its thread when yoco ends, and the process ends then.
    """

    def __init__(self) -> None:
        self._nvml = cast("Gpm", import_module("pynvml"))
        self._monitored: list[Monitored] = []

    def open(self) -> None:
        """Find the GPUs that have the monitor."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._monitored = [self._begin(handle) for handle in handles if self._has_monitor(handle)]
        except nvml.NVMLError as error:
            log.info("bandwidth_unknown", reason=str(error))

    @property
    def present(self) -> bool:
        """Whether there is something to read."""
        return bool(self._monitored)

    def read(self) -> Mapping[str, int]:
        """Return the bandwidth in use since the call before, in ppm by UUID; what cannot be read is left out."""
        found: dict[str, int] = {}
        for gpu in self._monitored:
            try:
                bandwidth = self._bandwidth_ppm(gpu)
            except self._nvml.NVMLError:
                continue
            if bandwidth is not None:
                found[gpu.id] = bandwidth
        return found

    def _has_monitor(self, handle: object) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
        except self._nvml.NVMLError:  # a driver from before the monitor
            return False

    def _begin(self, handle: object) -> Monitored:
        nvml = self._nvml
        samples = (nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc())
        return Monitored(nvml.nvmlDeviceGetUUID(handle), handle, samples)

    def _bandwidth_ppm(self, gpu: Monitored) -> int | None:
        nvml = self._nvml
        after, before = gpu.samples if gpu.taken % 2 else gpu.samples[::-1]
        nvml.nvmlGpmSampleGet(gpu.handle, after)
        gpu.taken += 1
        if gpu.taken == 1:
            return None
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        query.sample1, query.sample2 = before, after
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_DRAM_BW_UTIL
        metric = nvml.nvmlGpmMetricsGet(query).metrics[0]
        return ppm(metric.value) if metric.nvmlReturn == nvml.NVML_SUCCESS else None


def ppm(percent: float) -> int | None:
    """Return a percentage in ppm, None for what is no number.

    >>> ppm(12.5)
    125000
    """
    return min(PPM, max(0, round(percent * PPM / PERCENT))) if math.isfinite(percent) else None


def device_windows(
    bandwidths: Mapping[str, int], fragmentations: Mapping[str, Fragmentation]
) -> tuple[DeviceWindow, ...]:
    """Return the devices of which something is known: bandwidths in ppm and fragmentation, by id."""
    return tuple(
        DeviceWindow(
            id=name,
            bandwidth_ppm=bandwidths.get(name),
            fragmentation_ppm=fragmentations[name].ppm if name in fragmentations else None,
            fragmentation_source=fragmentations[name].source if name in fragmentations else None,
        )
        for name in sorted({*bandwidths, *fragmentations})[:DEVICES_MAX]
    )
