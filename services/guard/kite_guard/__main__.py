"""`python -m kite_guard`: compares what instances of one node answer, on order."""

import sys

from kite.runtime import start
from kite_guard.service import serve
from kite_guard.settings import Settings


def main() -> int:
    """Run the guard until it is told to stop."""
    return start("guard", Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
