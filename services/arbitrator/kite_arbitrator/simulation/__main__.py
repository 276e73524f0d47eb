"""Run one seed and print what happened, and the hash of the history: the same in every process, on every machine."""

import argparse
import sys
from typing import cast

from kite.testing.simulation import plan_of
from kite_arbitrator.simulation.run import simulate

SECONDS = 80


def main() -> int:
    """Run one seed and print what happened."""
    parser = argparse.ArgumentParser(prog="python -m kite_arbitrator.simulation", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=int, nargs="?", default=SECONDS, help="of trouble; rest follows")
    parsed = parser.parse_args()
    seed = cast("int", parsed.seed)
    history = simulate(plan_of(seed, cast("int", parsed.seconds)), seed)
    for kind, number in sorted(history.counts().items()):
        sys.stdout.write(f"{number:7} {kind}\n")
    answered = sum(agent.answered for agent in history.world.agents)
    failed = sum(agent.failed for agent in history.world.agents)
    sys.stdout.write(f"{answered:7} requests answered\n{failed:7} requests failed\n{history.digest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
