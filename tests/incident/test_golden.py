"""Recorded histories replay in every later version: same inputs, same decisions."""

from pathlib import Path

import pytest

from kite.ledger import Reader
from kite_incident.history import lines, restore
from kite_incident.replay import verify
from kite_incident.timeline import timeline

HISTORIES = sorted((Path(__file__).parents[1] / "golden" / "histories").glob("*.jsonl"))


def test_there_are_recorded_histories():
    assert HISTORIES


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
    assert verdict.decisions > 20
