"""`python -m kite.alive [METRIC]`: the health check of a container, by the page of metrics of the service in it.

Exit 0 when the page answers (and has METRIC at 1), else 1. A container whose network is gone, because that of another
which it shared ended, hears nothing for ever, and Docker starts again only what ends: so it is ended here.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.request import urlopen

PORT = "KITE_METRICS_PORT"
LIMIT_S = 4.0
INTERFACES = Path("/sys/class/net")
LOOPBACK = "lo"
FIRST = 1
"""The first process of a container, which ends it."""


def answers(port: int, metric: str = "") -> bool:
    """Return whether the page at the loopback port is there, with the metric at 1 if one is named."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return False
    return not metric or f"{metric} 1.0" in lines


def cut_off(interfaces: Path = INTERFACES) -> bool:
    """Return whether this network has nothing but its loopback."""
    return {found.name for found in interfaces.iterdir()} <= {LOOPBACK}


def main(
    arguments: Sequence[str], *, interfaces: Path = INTERFACES, end: Callable[[int, int], object] = os.kill
) -> int:
    """Return the exit code, after ending the container when it is cut off."""
    if cut_off(interfaces):
        end(FIRST, signal.SIGTERM)
        return 1
    return 0 if answers(int(os.environ[PORT]), *arguments[:1]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
