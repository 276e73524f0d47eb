"""`python -m kite_yoco`: run yoco until SIGTERM or SIGINT."""

import sys

from kite.runtime import run
from kite_yoco.service import SERVICE, serve
from kite_yoco.settings import Settings


def main() -> int:
    """Return the exit code of the service."""
    settings = Settings()  # pyright: ignore[reportCallIssue] # the fields come from the environment
    return run(SERVICE, settings.log_level, serve(settings))


if __name__ == "__main__":
    sys.exit(main())
