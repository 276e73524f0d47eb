"""`python -m kite_upcycle`: carries out the adapter decisions for one node."""

import sys

from kite.runtime import run
from kite_upcycle.service import serve
from kite_upcycle.settings import Settings


def main() -> int:
    """Run upcycle until it is told to stop."""
    settings = Settings()  # pyright: ignore[reportCallIssue] # the fields come from the environment
    return run("upcycle", settings.log_level, serve(settings))


if __name__ == "__main__":
    sys.exit(main())
