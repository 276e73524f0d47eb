"""The life of a version, told: rollback, retirement, deletion, drift and its repair, each in words of a person."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from kite.clock import US_PER_S, iso
from kite.ledger import Reader, Row
from kite_arbitrator.records import Row as CoreRow
from kite_incident.refusals import NothingSkipped, why_not
from kite_incident.testing import record
from kite_incident.timeline import Entry, detail, timeline, title
from kite_schemas.envelope import Event, Header, decode, encode
from kite_schemas.model import Data
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import (
    BlendDeleted,
    BlendLoaded,
    BlendUnloaded,
    DeleteFailed,
    DriftObserved,
    EffectPrint,
    Ending,
    InjectionClosed,
    LoadOrdered,
    Resident,
    ResidentsSet,
    RetireFailed,
    RetireOrdered,
    Return,
    RollbackClosed,
    RollbackRequested,
    RolledBack,
)
from kite_schemas.why import Reason, Why

REQUEST, ORDER = (f"018f0000-0000-7000-8000-00000000000{n}" for n in range(2))
OLD, NEW = "risk@0123456789ab", "risk@ba9876543210"
ENDPOINT = "http://127.0.0.1:9000"
GOLDEN = Path(__file__).parents[1] / "golden" / "events"
RESIDENT = Resident(blend="risk", version=OLD, path="store/sha256/0")
ORDERED: dict[str, object] = {"node": "n1", "target": "x", "expires_us": 1, "ttl_us": 1}


def because(reason: Reason) -> Why:
    return Why(reason=reason)


def retire(instance: str, reason: Reason = Reason.RETENTION_OVER) -> RetireOrdered:
    return RetireOrdered.model_validate(
        {**ORDERED, "why": because(reason), "blend": "risk", "instance": instance, "endpoint": ENDPOINT, "version": OLD}
    )


def unloaded(instance: str, version: str = OLD) -> BlendUnloaded:
    return BlendUnloaded(done=True, instance=instance, version=version, duration_us=40_000)


def closed(outcome: Return, reason: Reason, detail: str = "") -> RollbackClosed:
    return RollbackClosed(
        why=because(reason), request=REQUEST, blend="risk", outcome=outcome, version=OLD, former=NEW, detail=detail
    )


def drift(expected: Iterable[str], found: Iterable[str], missing: Iterable[str] = ()) -> DriftObserved:
    return DriftObserved(
        node="n1", instance="a", told=ORDER, expected=tuple(expected), found=tuple(found), missing=tuple(missing)
    )


PROVEN = EffectProven(
    instance="a",
    version=OLD,
    base_micronats=150_000,
    base_min_micronats=1_000,
    effect_print=EffectPrint(path="prints/a.json", digest="0" * 64, distance_micronats=150_000),
)
LOAD = LoadOrdered.model_validate(
    {
        **ORDERED,
        "why": because(Reason.RESIDENT_MISSING),
        "instance": "a",
        "endpoint": ENDPOINT,
        "base": "tiny",
        "resident": RESIDENT,
        "noise_micronats": 0,
    }
)
PARTIAL = InjectionClosed(
    why=because(Reason.PARTIAL),
    request=REQUEST,
    blend="risk",
    outcome=Ending.PROMOTED,
    instances=("a", "b"),
    missing=("c",),
)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (closed(Return.DONE, Reason.EFFECT_PROVEN), f"done: risk means {OLD} again, not {NEW}"),
        (closed(Return.DRY_RUN, Reason.DRY_RUN), f"dry run: risk would mean {OLD} again"),
        (closed(Return.REJECTED, Reason.SLOTS_FULL, "a: 4 of 4 slots taken"), "rejected: a: 4 of 4 slots taken"),
        (closed(Return.FAILED, Reason.LOAD_FAILED), "failed: load_failed"),
        (PARTIAL, "promoted: partial, on a, b, not on c"),
        (retire("a"), f"{OLD} to leave a: its retention is over"),
        (unloaded("a"), f"{OLD} left a after 40 ms"),
        (
            RetireFailed(done=True, instance="a", version=OLD, code="still_used", message="2 requests run"),
            f"{OLD} did not leave a: still_used: 2 requests run",
        ),
        (
            BlendDeleted(done=True, version=OLD, digest="0" * 64, freed_bytes=81_000_000),
            f"{OLD} deleted from the store, 81.0 MB freed",
        ),
        (
            DeleteFailed(done=True, version=OLD, digest="0" * 64, code="unwritable", message="read-only"),
            f"{OLD} is in the store still: unwritable: read-only",
        ),
        (drift([OLD], [NEW], [OLD]), f"a lacks {OLD}; should not hold {NEW}; has no sound files of {OLD}"),
        (drift([OLD], [OLD]), "a holds what it should"),
        (RolledBack(done=True, request=REQUEST, instance="a", version=OLD), f"{OLD} taken out of a"),
        (
            RolledBack(done=True, request=REQUEST, instance="a", version=OLD, healed=False),
            f"{OLD} taken out of a; its base still does not answer with finite numbers",
        ),
    ],
)
def test_each_says_what_it_adds(data: Data, said: str):
    assert detail(data) == said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (RollbackRequested(actor="me", blend="risk"), "roll risk back to the version before"),
        (RollbackRequested(actor="me", blend="risk", version=OLD, dry_run=True), f"dry run: roll risk back to {OLD}"),
        (retire("a", Reason.UNWANTED), f"retire {OLD}: it was never promoted"),
        (retire("a", Reason.SILENT), f"retire {OLD}: silent"),
        (drift([OLD], []), "drift on a"),
        (LOAD, f"load {OLD}: the instance lacks it"),
    ],
)
def test_an_entry_is_called_what_a_person_would_call_it(data: Data, said: str):
    (entry,) = told(data)
    assert entry.title == said


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("kite.upcycle.*.json")), ids=lambda path: path.stem)
def test_every_type_of_upcycle_is_told_without_its_name(path: Path):
    event: Event = decode(path.read_bytes().rstrip(b"\n"))
    assert title(event.header, event.data)
    assert "None" not in detail(event.data)


# --- entries of several rows


def told(*chain: Data) -> list[Entry]:
    """Return the entries of some rows that the first of them brought about, a second apart."""
    return timeline(_row(pos, data) for pos, data in enumerate(chain, 1))


def _row(pos: int, data: Data) -> Row:
    header = Header(
        id=f"018f0000-0000-7000-8000-{pos:012d}",
        source="kite/test/1",
        type=data.TYPE,
        subject="instance/a",
        time=iso(pos * US_PER_S),
        correlationid=REQUEST,
        producer="test@0",
    )
    at_us, raw = pos * US_PER_S, encode(header, data)
    return Row(pos, 1, "", 0, 0, header.id, header.type, header.subject, at_us, at_us, "", "", b"", raw, b"")


def test_a_drift_says_what_was_repaired():
    loaded = BlendLoaded(done=True, instance="a", version=OLD, duration_us=9_000)
    (entry,) = told(drift([OLD], [NEW]), LOAD, retire("a", Reason.DRIFT), loaded, PROVEN, unloaded("a", NEW))
    assert entry.title == "drift on a"
    assert entry.outcome == f"repaired: {OLD} proven on a; {NEW} left a after 40 ms"
    assert entry.steps[0].detail == f"a lacks {OLD}; should not hold {NEW}"
    assert [step.decision for step in entry.steps] == [False, True, True, False, False, False]


def test_a_drift_that_nothing_repairs_says_what_it_is():
    failed = RetireFailed(done=True, instance="a", version=NEW, code="unreachable", message="no answer")
    (entry,) = told(drift([OLD], [NEW, OLD]), retire("a", Reason.DRIFT), failed)
    assert entry.outcome == f"{NEW} did not leave a: unreachable: no answer"


def test_a_rollback_is_over_when_it_is_closed_whatever_follows():
    asked = RollbackRequested(actor="me", blend="risk")
    (entry,) = told(asked, LOAD, PROVEN, closed(Return.DONE, Reason.EFFECT_PROVEN), retire("a"), unloaded("a"))
    assert (entry.title, entry.outcome) == (
        "roll risk back to the version before",
        f"done: risk means {OLD} again, not {NEW}",
    )


def test_a_retirement_ends_in_what_was_deleted():
    gone = BlendDeleted(done=True, version=OLD, digest="0" * 64, freed_bytes=1_000)
    (entry,) = told(retire("a"), retire("b"), unloaded("a"), unloaded("b"), gone)
    assert entry.title == f"retire {OLD}: its retention is over"
    assert entry.outcome == f"{OLD} deleted from the store, 1.0 kB freed"


def test_what_an_instance_should_hold_is_an_entry_of_its_own():
    should = ResidentsSet(
        why=because(Reason.RESIDENTS_CHANGED),
        node="n1",
        instance="a",
        endpoint=ENDPOINT,
        base="tiny",
        residents=(RESIDENT,),
        interval_us=10_000_000,
    )
    nothing = should.model_copy(update={"residents": ()})
    asked, own = told(RollbackRequested(actor="me", blend="risk"), should, nothing)
    assert (asked.outcome, own.title) == ("", "what a should hold")
    assert [step.detail for step in own.steps] == [f"a should hold {OLD}", "a should hold nothing beside its base"]


def test_why_a_blend_was_not_rolled_back(tmp_path: Path):
    chain = (closed(Return.REJECTED, Reason.NO_FORMER), closed(Return.DONE, Reason.EFFECT_PROVEN))
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    record([told_row(pos, data) for pos, data in enumerate(chain, 1)], url)
    with Reader.open(url) as reader:
        assert why_not(reader, "rollback", at=1) == 1
        with pytest.raises(NothingSkipped, match="the last rollback was done, at position 2"):
            why_not(reader, "rollback")


def told_row(pos: int, data: Data) -> CoreRow:
    name = f"018f0000-0000-7000-8000-{pos:012d}"
    return CoreRow(pos=pos, id=name, type=data.TYPE, subject="blend/risk", ledger_us=pos * US_PER_S, data=data)
