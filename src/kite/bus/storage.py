"""How a stream is kept, and by which server: for whoever asks whether it would survive a crash."""

from dataclasses import dataclass
from typing import TypedDict, cast

from kite.bus.link import Link
from kite.bus.streams import read_info
from kite.clock import parse_us, wall_us

FILE = "file"
LATER = "async"


class _Config(TypedDict, total=False):
    storage: str
    num_replicas: int
    persist_mode: str


class _Info(TypedDict):
    config: _Config
    ts: str


@dataclass(frozen=True, slots=True)
class Storage:
    """How the server keeps a stream: in files or in memory, how often, and whether it acknowledges before it syncs.

    `ahead_us` is by how much the server's clock was ahead of this one's, `within_us` how exactly that is known.
    """

    stream: str
    in_files: bool
    replicas: int
    synced_later: bool
    ahead_us: int
    within_us: int


@dataclass(frozen=True, slots=True)
class Peer:
    """The server at the other end of a connection: its version, and whether it knows of others beside it."""

    version: str
    clustered: bool


async def read_storage(link: Link, stream: str) -> Storage:
    """Ask how `stream` is kept. Raises StreamMissing, BusForbidden, NotNow."""
    began_us = wall_us()
    info = cast("_Info", await read_info(link, stream))
    ended_us = wall_us()
    config, within_us = info["config"], (ended_us - began_us + 1) // 2
    return Storage(
        stream,
        in_files=config.get("storage", FILE) == FILE,
        replicas=config.get("num_replicas", 1),
        synced_later=config.get("persist_mode") == LATER,
        ahead_us=parse_us(info["ts"]) - (began_us + within_us),
        within_us=within_us,
    )


def peer(link: Link) -> Peer:
    """Return what the server said of itself when the connection was made."""
    found = link.nc.connected_server_version
    return Peer(f"{found.major}.{found.minor}.{found.patch}", clustered=len(link.nc.discovered_servers) > 0)
