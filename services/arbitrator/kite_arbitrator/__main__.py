"""`python -m kite_arbitrator`: the only decider and the only writer of the ledger."""

import gc
import sys

from kite.runtime import start
from kite_arbitrator.service import serve
from kite_arbitrator.settings import Settings

GARBAGE_OBJECTS = 50_000
"""How many more containers there have to be before cycles are looked for. The state is frozen records, which have none:
looking at all of them again and again took a quarter of the processor time, and up to 250 ms at once."""


def main() -> int:
    """Run the arbitrator until it is told to stop."""
    gc.freeze()  # what was imported stays: nobody need look at it again
    gc.set_threshold(GARBAGE_OBJECTS)
    return start("arbitrator", Settings, serve)


if __name__ == "__main__":
    sys.exit(main())
