"""What the server says about itself on its monitoring port."""

import asyncio
import json
from typing import TypedDict, cast
from urllib.error import URLError
from urllib.request import urlopen

from kite.bus.errors import BusNotDurable, BusUnreachable

ANSWER_S = 5.0


class _Config(TypedDict, total=False):
    sync_always: bool


class _JetStream(TypedDict, total=False):
    config: _Config


class _Varz(TypedDict, total=False):
    jetstream: _JetStream


def _get(url: str) -> bytes:
    with urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - the address is KITE's own setting, http on loopback
        return cast("bytes", answer.read())


async def read(monitor_url: str, path: str) -> bytes:
    """Read `path` (such as `varz`) of the monitoring port. Raises BusUnreachable."""
    url = f"{monitor_url}/{path}"
    try:
        return await asyncio.to_thread(_get, url)
    except (URLError, OSError) as error:
        raise BusUnreachable(url, ANSWER_S) from error


async def sync_always(monitor_url: str) -> bool:
    """Tell whether the server syncs every write to disk before it acknowledges. Raises BusUnreachable."""
    varz = cast("_Varz", json.loads(await read(monitor_url, "varz")))
    return varz.get("jetstream", {}).get("config", {}).get("sync_always", False)


async def require_sync(monitor_url: str) -> None:
    """Refuse a server whose acknowledgements are no promise. Raises BusNotDurable, BusUnreachable."""
    if not await sync_always(monitor_url):
        raise BusNotDurable(monitor_url)
