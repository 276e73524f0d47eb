"""Writes what `kite eval --json` found as the tables of docs/blends.md: `kite eval … --json | python table.py`.

Accuracy is the share of prompts whose likeliest next token is the right one, KL in nats.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

MILLION = 1_000_000
Record = dict[str, Any]  # JSON


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def accuracies(records: Sequence[Record]) -> str:
    """Return one row a model and one column a task."""
    found = {(one["model"], one["task"]): one["accuracy_ppm"] / MILLION for one in records}
    models, tasks = (list(dict.fromkeys(one[field] for one in records)) for field in ("model", "task"))
    return rows(["", *tasks], [[f"`{model}`", *(f"{found[model, task]:.3f}" for task in tasks)] for model in models])


def distances(records: Sequence[Record]) -> str:
    """Return one row a blend, with the mean KL and the agreement from the base and from each member."""
    found = {(one["blend"], one["from"]): one for one in records}
    blends, others = (list(dict.fromkeys(one[field] for one in records)) for field in ("blend", "from"))
    lines = [[f"`{blend}`", *(distance(found.get((blend, other))) for other in others)] for blend in blends]
    return rows(["", *(f"from {other}" for other in others)], lines)


def distance(one: Record | None) -> str:
    """Return mean and 99th percentile of the KL, and the share of probes with the same likeliest token."""
    if one is None:
        return ""
    return (
        f"{one['kl_micronats'] / MILLION:.2f} ({one['p99_micronats'] / MILLION:.2f}), {one['top1_ppm'] / MILLION:.2f}"
    )


def main() -> None:
    """Read records from standard input and print the tables."""
    records: list[Record] = [json.loads(line) for line in sys.stdin]
    (run,) = (one for one in records if one["record"] == "run")
    print(f"Base {run['base']}, {run['engine']}, {run['dtype']}, KITE {run['kite']}, {run['positions']} probes.\n")
    print(accuracies([one for one in records if one["record"] == "accuracy"]))
    print()
    print(distances([one for one in records if one["record"] == "distance"]))


if __name__ == "__main__":
    main()
