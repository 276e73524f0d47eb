"""Run one seed and print what happened, and the hash of the history: the same in every process, on every machine.

python -m kite_arbitrator.simulation SEED [SECONDS]
"""

import sys

from kite.testing.simulation import plan_of
from kite_arbitrator.simulation.run import simulate


def main() -> int:
    """Run one seed and print what happened."""
    seed, *rest = map(int, sys.argv[1:])
    history = simulate(plan_of(seed, *rest), seed)
    for kind, number in sorted(history.counts().items()):
        sys.stdout.write(f"{number:7} {kind}\n")
    answered = sum(agent.answered for agent in history.world.agents)
    failed = sum(agent.failed for agent in history.world.agents)
    sys.stdout.write(f"{answered:7} requests answered\n{failed:7} requests failed\n{history.digest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
