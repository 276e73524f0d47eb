"""Record the incident of stale state twice: as it happened, and under the policy that it led to.

    .venv/bin/python tests/golden/record_incident.py

A recorded history is never edited, and one that is there is left alone: rules that decide otherwise are a new version
of the rules, and get histories of their own.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from kite.ledger import Ledger, Reader
from kite_arbitrator import shipped
from kite_arbitrator.simulation.incident import careless, incident
from kite_arbitrator.simulation.run import History
from kite_arbitrator.simulation.text import drafts
from kite_incident.history import lines

HISTORIES = Path(__file__).parent / "histories"
SECONDS, FREED_S = 12, 8


def main() -> int:
    """Record what is missing."""
    _keep("incident-careless-1", incident(careless(), SECONDS))
    _keep("incident-shipped-1", incident(shipped.policy(), SECONDS, freed_s=FREED_S))
    return 0


def _keep(name: str, history: History) -> None:
    place = HISTORIES / f"{name}.jsonl"
    if not place.exists():
        place.write_text("\n".join(_lines(history)) + "\n", encoding="utf-8")


def _lines(history: History) -> list[str]:
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/ledger.db"
        with Ledger.open(url) as ledger:
            ledger.append(list(drafts(history)))
        with Reader.open(url) as reader:
            return list(lines(reader.rows()))


if __name__ == "__main__":
    sys.exit(main())
