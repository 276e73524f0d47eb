"""Replay: the same decisions come out of the same inputs; an altered one is named by its position."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_core import from_json, to_json

from kite.ledger import ChainBroken, Reader
from kite.testing.ledger import forge
from kite_arbitrator.records import Row
from kite_arbitrator.state import current
from kite_arbitrator.testing import BASE, NODE, Story
from kite_incident.explain import NoSuchDecision, explain
from kite_incident.refusals import NothingSkipped, why_not
from kite_incident.replay import NothingToReplay, verify
from kite_incident.testing import record
from kite_incident.timeline import timeline
from kite_schemas.upcycle import InjectionAdmitted
from kite_schemas.why import Reason
from kite_schemas.yoco import WakeOrdered


@pytest.fixture
def story() -> Story:
    fleet = Story().up()
    fleet.promote("credit", weight_ppm=600_000, anchors=("credit",))
    fleet.promote("laundering", weight_ppm=400_000)
    fleet.order()
    fleet.change(f"{NODE}-{BASE}-0", "ready", "failed", "engine_died")
    fleet.wait(current(fleet.state).yoco.start_backoff_us + 1)
    fleet.ready(f"{NODE}-{BASE}-0")
    assert fleet.kinds() == ["load_ordered"]  # a repair: it belongs to no request
    return fleet


@pytest.fixture
def url(story: Story, tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    record(story.rows, url)
    return url


def admitted(story: Story) -> Row:
    return next(row for row in story.decided if isinstance(row.data, InjectionAdmitted))


def test_a_recorded_history_replays_identically(story: Story, url: str):
    with Reader.open(url) as reader:
        verdict = verify(reader)
    assert verdict.identical
    assert verdict.decisions == len(story.decided) > 10


@pytest.mark.parametrize("rehashed", [False, True], ids=["chain broken", "chain made to fit again"])
def test_an_altered_decision_is_named_by_its_position(story: Story, url: str, *, rehashed: bool):
    row = admitted(story)
    with Reader.open(url) as reader:
        stored = reader.row(row.pos)
    assert stored is not None
    fields = from_json(stored.raw)
    fields["data"]["base_weight_ppm"] += 1
    forge(url, row.pos, to_json(fields), rehashed=rehashed)
    with Reader.open(url) as reader:
        if not rehashed:
            with pytest.raises(ChainBroken) as broken:
                verify(reader)
            assert broken.value.pos == row.pos
            return
        verdict = verify(reader)
    assert verdict.divergence is not None
    assert verdict.divergence.pos == row.pos
    assert [d.field for d in verdict.divergence.differences] == ["base_weight_ppm"]


def test_a_decision_that_was_left_out_is_missed_at_its_position(story: Story, tmp_path: Path):
    row = admitted(story)
    rest = [replace_pos(other, row.pos) for other in story.rows if other.pos != row.pos]
    url = f"sqlite:///{tmp_path / 'cut.db'}"
    record(rest, url)
    with Reader.open(url) as reader:
        divergence = verify(reader).divergence
    assert divergence is not None
    assert (divergence.pos, divergence.kind, divergence.type) == (row.pos, "missing", row.type)


def replace_pos(row: Row, removed: int) -> Row:
    from msgspec import structs

    return structs.replace(row, pos=row.pos - 1) if row.pos > removed else row


def test_a_range_without_decisions_is_a_failure(url: str):
    with Reader.open(url) as reader, pytest.raises(NothingToReplay):
        verify(reader, 1, 1)


def test_a_range_replays_from_its_first_input_on(story: Story, url: str):
    row = admitted(story)
    with Reader.open(url) as reader:
        verdict = verify(reader, row.pos - 1, row.pos)
    assert (verdict.identical, verdict.decisions) == (True, 1)


REPLAY = """
import sys
from kite.ledger import Reader
from kite_incident.replay import verify, state_at
with Reader.open(sys.argv[1]) as reader:
    verdict = verify(reader)
    print(verdict.identical, verdict.decisions, repr(state_at(reader.rows())))
"""


def test_the_hash_seed_of_the_process_changes_nothing(url: str):
    outputs = {
        subprocess.run(
            [sys.executable, "-c", REPLAY, url],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("True ")


def test_an_explanation_names_rules_inputs_causes_and_consequences(story: Story, url: str):
    row = admitted(story)
    with Reader.open(url) as reader:
        by_pos = explain(reader, str(row.pos))
        by_prefix = explain(reader, row.id[:13])
    assert by_pos == by_prefix
    assert by_pos.event.id == row.id
    assert [cause.pos for cause in by_pos.causes] == [row.pos - 1]
    assert {rule.id for rule in by_pos.decision.why.rules} >= {"upcycle.params_share_max_ppm"}
    assert by_pos.decisive is not None
    assert [event.type for event in by_pos.consequences] == ["kite.upcycle.blend_stored.v1"]


@pytest.mark.parametrize("name", ["1", "999999", "abc", "ffffffff"])
def test_what_is_no_decision_is_said(url: str, name: str):
    with Reader.open(url) as reader, pytest.raises(NoSuchDecision):
        explain(reader, name)


def test_the_timeline_tells_one_injection_as_one_entry(url: str):
    with Reader.open(url) as reader:
        entries = timeline(reader.rows())
    titles = [entry.title for entry in entries]
    assert titles.count("inject credit into risk") == 1


def test_why_not_names_the_skip_that_was_in_force_and_not_one_that_was_overtaken(story: Story, tmp_path: Path):
    story.order()  # the only standby is awake already
    held = story.last[0].pos
    url = f"sqlite:///{tmp_path / 'skips.db'}"
    record(story.rows, url)
    woken = next(row.pos for row in story.decided if isinstance(row.data, WakeOrdered))
    with Reader.open(url) as reader:
        assert why_not(reader, "wake") == held
        assert explain(reader, str(held)).decision.why.reason is Reason.NO_STANDBY
        for what, at in (("wake", held - 1), ("inject", None), ("compare", None)):
            with pytest.raises(NothingSkipped):
                why_not(reader, what, at)
        with pytest.raises(NothingSkipped, match=f"at position {woken}"):
            why_not(reader, "wake", woken)
