"""`python -m kite_yoco`: run yoco until SIGTERM or SIGINT."""

import sys

from kite.runtime import start
from kite_yoco.service import SERVICE, serve
from kite_yoco.settings import Settings


def main() -> int:
    """Return the exit code of the service."""
    return start(SERVICE, Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
