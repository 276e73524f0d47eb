"""`python -m kite_arbitrator`: the only decider and the only writer of the ledger."""

import sys

from kite.runtime import run
from kite_arbitrator.service import serve
from kite_arbitrator.settings import Settings


def main() -> int:
    """Run the arbitrator until it is told to stop."""
    settings = Settings()  # pyright: ignore[reportCallIssue] # the fields come from the environment
    return run("arbitrator", settings.log_level, serve(settings))


if __name__ == "__main__":
    sys.exit(main())
