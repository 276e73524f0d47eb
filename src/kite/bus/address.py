"""Where the bus listens: the address of one server, or those of a cluster with commas between."""

import re
from urllib.parse import urlsplit

from kite.errors import UsageError

SCHEMES = frozenset({"nats", "tls"})
_SECRET = re.compile(r"//[^/@]*@")


def servers(url: str) -> list[str]:
    """Return the address of each server. Raises UsageError when one is none.

    >>> servers("nats://a:4222, nats://b:4222")
    ['nats://a:4222', 'nats://b:4222']
    """
    found = [part.strip() for part in url.split(",")]
    for one in found:
        if not _is_address(one):
            raise UsageError(
                f"{_SECRET.sub('//***@', one)!r} is no address of a NATS server",
                hint="KITE_NATS_URL is nats://HOST:PORT, or tls://HOST:PORT; of a cluster all, with commas between",
            )
    return found


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        return False
