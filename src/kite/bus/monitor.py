"""What the server says about itself on its monitoring port."""

import asyncio
import json
from typing import TypedDict, cast
from urllib.error import URLError
from urllib.request import urlopen

import structlog

from kite.bus.errors import BusNotDurable, BusUnreachable

ANSWER_S = 5.0

log: structlog.stdlib.BoundLogger = structlog.get_logger()


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


async def sync_always(monitor_urls: str) -> bool:
    """Tell whether the server syncs every write to disk before it acknowledges: each of a cluster that answers.

    Addresses have commas between. Raises BusUnreachable when none answers.
    """
    return not await _lax(monitor_urls)


async def require_sync(monitor_urls: str) -> None:
    """Refuse servers whose acknowledgements are no promise. Raises BusNotDurable, BusUnreachable when none answers."""
    if lax := await _lax(monitor_urls):
        raise BusNotDurable(", ".join(lax))


async def _lax(monitor_urls: str) -> list[str]:
    """Return the addresses of the servers that acknowledge before they sync. Raises BusUnreachable."""
    urls = [url.strip() for url in monitor_urls.split(",")]
    found = await asyncio.gather(*(_syncs(url) for url in urls), return_exceptions=True)
    silent = [answer for answer in found if isinstance(answer, BusUnreachable)]
    if len(silent) == len(urls):
        raise silent[0]
    for answer in found:
        if isinstance(answer, BusUnreachable):  # a cluster goes on without one, and so does whoever starts meanwhile
            log.warning("bus_server_silent", error=str(answer))
        elif isinstance(answer, BaseException):
            raise answer
    return [url for url, answer in zip(urls, found, strict=True) if answer is False]


async def _syncs(monitor_url: str) -> bool:
    varz = cast("_Varz", json.loads(await read(monitor_url, "varz")))
    return varz.get("jetstream", {}).get("config", {}).get("sync_always", False)
