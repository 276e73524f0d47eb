"""Recorded histories replay in every later version: same inputs, same decisions."""

import json
from collections import Counter
from pathlib import Path

import pytest

from kite.ledger import Reader
from kite_incident.history import lines, restore
from kite_incident.replay import verify
from kite_incident.timeline import timeline

HISTORIES = sorted((Path(__file__).parents[1] / "golden" / "histories").glob("*.jsonl"))

INCIDENT = {path.stem: path for path in HISTORIES if path.stem.startswith("incident-")}
"""The incident of stale state, as it happened and as the shipped policy has it; see tests/golden/record_incident.py."""


def test_there_are_recorded_histories():
    assert HISTORIES
    assert set(INCIDENT) >= {"incident-careless-1", "incident-shipped-1"}


def test_in_the_recorded_incident_one_order_was_repeated_without_end():
    starts = Counter(starts_of(INCIDENT["incident-careless-1"]))
    assert min(starts.values()) == 1  # the instance that was there before
    assert max(starts.values()) > 30


def test_in_the_same_incident_under_the_shipped_policy_each_was_ordered_once():
    assert set(Counter(starts_of(INCIDENT["incident-shipped-1"])).values()) == {1}


def starts_of(history: Path) -> list[str]:
    """Return the instances of a history that were ordered to start, in order."""
    rows = map(json.loads, history.read_text(encoding="utf-8").splitlines())
    return [row["event"]["data"]["instance"] for row in rows if row["type"] == "kite.yoco.start_ordered.v1"]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda path: path.stem)
def test_a_recorded_history_replays_identically(history: Path, tmp_path: Path):
    text = history.read_text(encoding="utf-8").splitlines()
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    restore(text, url)
    with Reader.open(url) as reader:
        verdict = verify(reader)
        assert list(lines(reader.rows())) == text
        assert timeline(reader.rows())
    assert verdict.identical
    assert verdict.decisions > 10  # the incident that is held decides little: that is the point of it
