"""The history of the policy: who changed what, what was refused, and every policy by the names people give it."""

from collections.abc import Iterable

import pytest

from kite.clock import iso
from kite.ledger import Row as LedgerRow
from kite_arbitrator import shipped
from kite_arbitrator.records import Row
from kite_arbitrator.testing import Story
from kite_incident.policies import Difference, NoPolicy, NoSuchPolicy, choose, current, differences, history
from kite_schemas.envelope import Header, encode
from kite_schemas.policy import Change, ChangeRequested, Policy, amend, digest
from kite_schemas.why import Decision

KEY = "upcycle.weight_min_ppm"


def stored(rows: Iterable[Row]) -> list[LedgerRow]:
    """What a ledger would return for the rows of a story; the chain plays no part here."""
    return [_stored(row) for row in rows]


def _stored(row: Row) -> LedgerRow:
    assert row.data is not None
    header = Header(
        id=row.id, source="kite/test/1", type=row.type, subject=row.subject, time=iso(row.ledger_us), producer="test@0"
    )
    return LedgerRow(
        pos=row.pos,
        epoch=1,
        bus_stream="",
        bus_epoch=0,
        bus_seq=0,
        event_id=row.id,
        type=row.type,
        subject=row.subject,
        occurred_us=row.ledger_us,
        ledger_us=row.ledger_us,
        trace_id="",
        key_id="",
        signature=b"",
        raw=encode(header, row.data),
        hash=b"",
    )


def ask(story: Story, key: str, value: int, reason: str = "") -> None:
    story.tell(ChangeRequested(actor="ana", reason=reason, changes=(Change(key=key, value=value),)), "policy/fleet")


@pytest.fixture
def story() -> Story:
    told = Story().begin()
    ask(told, KEY, 20_000, "a trial")
    ask(told, KEY, 2_000_000, "too much")
    ask(told, "nope", 1)
    ask(told, KEY, 10_000)
    return told


def set_to(value: int) -> Policy:
    return amend(shipped.policy(), [Change(key=KEY, value=value)])


def test_every_request_is_told_with_who_why_and_what(story: Story):
    first, pools, trial, much, unknown, back = history(stored(story.rows))
    assert all(change.before is None for change in first.changes)
    assert first.policy == shipped.policy()
    assert [change.key for change in pools.changes] == ["upcycle.drift_interval_us", "fleet.pools[0]"]
    assert (trial.actor, trial.reason, trial.changes) == ("ana", "a trial", (Difference(KEY, 10_000, 20_000),))
    assert trial.policy is not None
    assert trial.digest == digest(trial.policy)
    assert (much.policy, much.digest, much.changes) == (None, "", (Difference(KEY, 20_000, 2_000_000),))
    assert KEY in much.detail
    assert (unknown.changes, unknown.detail) == ((Difference("nope", None, 1),), "unknown setting 'nope'")
    assert (back.changes, back.digest) == ((Difference(KEY, 20_000, 10_000),), pools.digest)


def test_the_other_rows_of_the_ledger_play_no_part(story: Story):
    rows = stored(story.rows)
    assert history(rows) == history(row for row in rows if row.type.startswith("kite.policy."))
    assert history([]) == []


def test_each_decision_names_the_policy_that_it_followed():
    story = Story().up()
    for wanted, asked in ((20_000, "one"), (30_000, "two")):
        ask(story, KEY, wanted)
        story.promote(asked)
    decided = history(stored(story.rows))
    for row in story.decided:
        before = [one for one in decided if one.pos < row.pos and one.policy]
        assert isinstance(row.data, Decision)
        assert row.data.why.policy == (before[-1].digest if before else None)


def test_policies_have_names(story: Story):
    decided = history(stored(story.rows))
    end = story.state.pos
    trial = decided[2]
    assert choose(decided, "shipped", end) == shipped.policy()
    assert choose(decided, "now", end) == current(decided) == story.state.policy
    for name in (str(trial.pos), str(trial.pos + 1), trial.digest, trial.digest[:6]):
        assert choose(decided, name, end) == trial.policy
    assert choose(decided, str(trial.pos - 1), end) != trial.policy
    again = decided[-1].digest  # set twice: still one policy
    assert choose(decided, again, end) == current(decided)


@pytest.mark.parametrize(
    ("name", "said"),
    [("1", "none was in force"), ("abc", "6 characters"), ("g" * 8, "0 policies"), ("9" * 5_000, "0 policies")],
)
def test_what_is_no_policy_is_said(story: Story, name: str, said: str):
    with pytest.raises(NoSuchPolicy, match=said):
        choose(history(stored(story.rows)), name, story.state.pos)


def test_a_ledger_without_a_policy_has_none():
    with pytest.raises(NoPolicy):
        current([])
    with pytest.raises(NoPolicy):
        choose([], "now", 1)
    assert choose([], "shipped", 1) == shipped.policy()


def test_differences_are_told_inside_of_pools(story: Story):
    policy = story.state.policy
    assert policy is not None
    (pool,) = policy.fleet.pools
    grown = pool.model_copy(update={"ready": 3})
    wider = policy.model_copy(update={"fleet": policy.fleet.model_copy(update={"pools": (grown,)})})
    assert list(differences(policy, wider)) == [Difference("fleet.pools[0].ready", 1, 3)]
    assert list(differences(policy, policy)) == []
    assert [found.key for found in differences(shipped.policy(), set_to(1))] == [KEY]
