"""What is known of a machine and of a fleet: plain values, and why one is not known."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kite.bus import Peer, Storage, StreamState

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A fact that could not be had, and why; `silent`: what was asked did not answer at all."""

    why: str
    hint: str = ""
    silent: bool = False
    wrong: bool = False  # what was found instead is a fault by itself


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket of an engine that takes connections. `dev_mode` is None where its environment cannot be read."""

    address: str
    port: int
    pid: int
    dev_mode: bool | None = None


@dataclass(frozen=True, slots=True)
class Engines:
    """The sockets of engines on this machine; `hidden` counts exposed ones whose process this user cannot see."""

    listeners: tuple[Listener, ...] = ()
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that the fleet writes to, by one of its folders there."""

    path: Path
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Secret:
    """A file or folder that is its owner's alone, and the mode that it has."""

    path: Path
    mode: int


@dataclass(frozen=True, slots=True)
class Bus:
    """What the bus said. `sync_always` is what its monitoring port said."""

    url: str
    peer: Peer
    storages: tuple[Storage, ...]
    states: tuple[StreamState, ...]
    sync_always: bool | Unknown


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the ledger said; `facts_seq` is the last message of the facts that it took in."""

    place: str
    schema: str
    pos: int
    ledger_us: int
    facts_seq: int | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is known without a fleet; `vllm` and `nats_server` are versions, empty where there is none."""

    kite: str
    python: str
    vllm: str
    nats_server: str
    hugepages: int | Unknown
    engines: Engines | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is known of a fleet at `now_us` of this machine's wall clock."""

    name: str
    now_us: int
    bus: Bus | Unknown
    ledger: Ledger | Unknown
    disks: tuple[Disk, ...] = ()
    secrets: tuple[Secret, ...] = ()
    vllm: Mapping[str, str] = field(default_factory=dict[str, str])
    """The version of vLLM by node, as the nodes registered it."""
