"""`python -m kite_upcycle`: carries out the adapter decisions for one node."""

import sys

from kite.runtime import start
from kite_upcycle.service import serve
from kite_upcycle.settings import Settings


def main() -> int:
    """Run upcycle until it is told to stop."""
    return start("upcycle", Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
