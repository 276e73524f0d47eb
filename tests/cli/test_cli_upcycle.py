"""What a person sees of Upcycle: blends and versions as they are, how weights moved, how a rollback ends."""

import doctest
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kite.clock import iso
from kite.errors import UsageError
from kite_arbitrator.folds.accounts import WEEK_S
from kite_arbitrator.records import Account, Row, Standing, Stored
from kite_arbitrator.state import State, put
from kite_arbitrator.testing import BASE, NODE, Story
from kite_cli import blends, place, upcycle, weights
from kite_cli.asking.following import Fact
from kite_cli.asking.following import Story as Followed
from kite_cli.asking.phases import PHASES, Phases
from kite_cli.asking.rollback import ended
from kite_cli.blends import NoSuchBlend, NoSuchVersion
from kite_cli.place import FleetFile
from kite_cli.testing import Ended
from kite_incident.testing import record
from kite_schemas.envelope import Event, Header
from kite_schemas.model import Data
from kite_schemas.upcycle import (
    BlendPromoted,
    LoadFailed,
    LoadOrdered,
    Resident,
    Return,
    RollbackClosed,
    RollbackRequested,
)
from kite_schemas.why import Reason, Why

Kite = Callable[..., Ended]
SECOND_US = 1_000_000
HOUR_US = 3_600 * SECOND_US
ID = "018f0000-0000-7000-8000-000000000000"


def stored(state: State, number: int, standing: Standing, **fields: Any) -> Stored:
    """Return version `number` of the blend, made like the one that is promoted."""
    blend, digest = state.blends["risk"], f"{number:064x}"[::-1]
    return Stored(
        resident=Resident(blend="risk", version=f"risk@{digest[:12]}", path=f"store/sha256/{digest}"),
        digest=digest,
        base=BASE,
        request=ID,
        members=blend.members,
        base_weight_ppm=blend.base_weight_ppm,
        standing=standing,
        since_us=state.now_us,
        pos=number,
        **fields,
    )


@pytest.fixture
def story() -> Story:
    """A fleet of two ready instances and a standby, whose blend had one version, then another."""
    story = Story().up(ready=2)
    story.promote("credit", weight_ppm=600_000, anchors=("credit",))
    story.wait(SECOND_US)
    story.promote("mood", weight_ppm=300_000)
    return story


@pytest.fixture
def state(story: Story) -> State:
    """The same with four versions in the store beside the promoted one: each of another standing."""
    state = structs.replace(story.state, versions={})
    for number, standing in enumerate((Standing.RELEASED, Standing.UNWANTED, Standing.RETAINED), 1):
        state = put(state, stored(state, number, standing, size_bytes=number * 1_000_000, quarantined=number == 2))
    return structs.replace(state, now_us=state.now_us + 30 * SECOND_US)


RELEASED, UNWANTED, RETAINED = (f"risk@{number}00000000000" for number in (1, 2, 3))


def cells(parts: list[blends.Part]) -> list[tuple[str, ...]]:
    return [cells for _, cells in parts]


def test_a_blend_is_listed_with_who_holds_it_and_what_it_meant_before(state: State):
    ((name, base, version, members, held, channel, before),) = cells(blends.blends(state))
    assert (name, base, members) == ("risk", BASE, "credit 60 %*, mood 30 %, base 10 %")
    assert version == state.blends["risk"].resident.version
    assert held == "2/2"
    assert channel.startswith("upcycle for ")
    assert before == f"{RETAINED}, 1 min 30 s left"
    ((found, _),) = blends.blends(state)
    assert (found["retained"], found["left_us"]) == (RETAINED, 90 * SECOND_US)
    assert (len(found["serving"]), found["serving_total"]) == (2, 2)  # pyright: ignore[reportArgumentType] # JSON


def test_without_a_retention_the_version_before_is_kept(state: State):
    assert state.policy is not None
    upcycle_policy = state.policy.upcycle.model_copy(update={"retention_us": None})
    kept = structs.replace(state, policy=state.policy.model_copy(update={"upcycle": upcycle_policy}))
    assert cells(blends.blends(kept))[0][-1] == f"{RETAINED}, kept"
    over = structs.replace(state, now_us=state.now_us + HOUR_US)
    assert cells(blends.blends(over))[0][-1] == f"{RETAINED}, 0 ms left"


def test_every_version_is_listed_with_its_standing_the_newest_first(state: State):
    found = cells(blends.versions(state))
    assert [(version, standing) for version, standing, *_ in found] == [
        (RETAINED, "retained, 1 min 30 s left"),
        (UNWANTED, "unwanted"),
        (RELEASED, "released"),
    ]
    assert [row[2:4] for row in found] == [("30.0 s", f"{number}.0 MB") for number in (3, 2, 1)]
    assert [row[-1] for row in found] == ["", "effect was missing", ""]
    assert list(blends.notes(state)) == ["* the member's weight is locked", "the store holds 3 versions, 6.0 MB"]


def test_who_holds_a_version_is_said_of_sleeping_instances_too(state: State):
    asleep = state.instances[f"{NODE}-{BASE}-2"]
    with_it = put(state, structs.replace(asleep, versions=(RELEASED,)))
    assert blends.names_of(with_it, RELEASED) == [asleep.id]
    assert cells(blends.versions(with_it))[-1][-2] == asleep.id


def test_what_old_versions_take_is_a_mean_of_seven_days_against_its_limit(state: State):
    hour = state.now_us // HOUR_US
    hours = ((hour - 168, 999 * WEEK_S), (hour, 2 * 1_000_000 * WEEK_S))
    account = Account(node=NODE, retained_bytes=7 * 24 * 3_600, since_us=state.now_us - 10 * SECOND_US, hours=hours)
    ((found, row),) = blends.accounts(put(state, account))
    assert found["mean_bytes"] == 2_000_010
    limit = found["limit_bytes"]
    assert limit == sum(device.memory_bytes for device in state.nodes[NODE].devices) * 180_000 // 1_000_000
    assert row[:3] == (NODE, "604.8 kB", "2.0 MB")


@pytest.mark.parametrize("name", ["3", "30000000", RETAINED, "risk@3"])
def test_a_version_may_be_named_by_how_it_begins(state: State, name: str):
    assert blends.version_of(state, "risk", name) == RETAINED


def test_a_version_that_is_not_there_or_not_the_blends(state: State):
    with pytest.raises(NoSuchVersion, match="risk has no version 'f00'") as unknown:
        blends.version_of(state, "risk", "f00")
    assert RETAINED in unknown.value.hint
    for name in ("", "risk@"):
        with pytest.raises(NoSuchVersion):
            blends.version_of(state, "risk", name)
    with pytest.raises(UsageError, match="no version of risk"):
        blends.version_of(state, "risk", "fraud@300000000000")
    with pytest.raises(NoSuchBlend, match="no blend 'fraud'") as other:
        blends.blend_of(state, "fraud")
    assert other.value.hint == "there is risk"


def test_a_live_list_is_drawn_again_for_what_changed_only(state: State):
    later = structs.replace(state, now_us=state.now_us + SECOND_US)
    released = put(state, structs.replace(state.versions[RETAINED], standing=Standing.RELEASED))

    def drawn(of: State) -> list[object]:
        return blends.signature([*blends.blends(of), *blends.versions(of)])

    assert drawn(later) == drawn(state)
    assert drawn(released) != drawn(state)


# --- on a ledger


@pytest.fixture
def run(kite: Kite, tmp_path: Path, story: Story) -> Kite:
    """Run a command on the ledger of a fleet that does not run: of the story, and a rollback to its first version."""
    first, second = (row for row in story.decided if isinstance(row.data, BlendPromoted))
    assert isinstance(first.data, BlendPromoted)
    asked = RollbackRequested(actor="operator", reason="odd answers", blend="risk")
    pos, at_us = story.rows[-1].pos, story.now_us
    back = first.data.model_copy(update={"request": ID, "why": Why(reason=Reason.ROLLED_BACK)})
    rows = [
        Row(pos=pos + 1, id=ID, type=asked.TYPE, subject="blend/risk", ledger_us=at_us + SECOND_US, data=asked),
        replace_row(second, pos + 2, at_us + 2 * SECOND_US, back),
    ]
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    record([*story.rows, *rows], url)
    place.write(tmp_path, FleetFile(node=NODE, nats_url="", ledger_url=url, adapter_root=str(tmp_path), pid=1))
    return lambda *arguments: kite("upcycle", *arguments, "--dir", tmp_path)


def replace_row(row: Row, pos: int, at_us: int, data: Data) -> Row:
    return structs.replace(row, pos=pos, id=f"018f0000-0000-7000-8000-{pos:012d}", ledger_us=at_us, data=data)


def lines(ended: Ended) -> list[dict[str, Any]]:
    assert (ended.code, ended.err) == (0, "")
    return [json.loads(line) for line in ended.out.splitlines()]


def test_the_history_of_a_blend_says_who_asked_and_why(run: Kite):
    shown, *found = lines(run("show", "risk", "--history", "--json"))
    assert shown["version"] == found[0]["version"] == found[2]["version"] != found[1]["version"]
    assert [(one["by"], one["actor"], one["reason"]) for one in found] == [
        ("injection", "test", ""),
        ("injection", "test", ""),
        ("rollback", "operator", "odd answers"),
    ]
    told = run("show", "risk", "--history").out
    assert "promoted at position" in told
    assert told.count("credit 60 %*, mood 30 %, base 10 %") == 1
    assert told.count("credit 60 %*, base 40 %") == 2


def test_weights_show_how_every_share_moved(run: Kite):
    found = lines(run("weights", "risk", "--json"))
    assert [one["moved_ppm"] for one in found] == [
        {"credit": 600_000},
        {"credit": 0, "mood": 300_000},
        {"credit": 0, "mood": -300_000},
    ]
    assert [one["base_moved_ppm"] for one in found] == [-600_000, -300_000, 300_000]
    assert [one["anchored"] for one in found] == [["credit"]] * 3
    assert all(sum(one["weights_ppm"].values()) + one["base_weight_ppm"] == 1_000_000 for one in found)
    told = run("weights", "risk").out.splitlines()
    assert told[0].split() == ["POS", "VERSION", "MEMBER", "WEIGHT", "MOVED"]
    assert [line.split()[-1] for line in told if "mood" in line] == ["%", "%"]
    assert any("mood" in line and "left" in line and "−30 %" in line for line in told)  # noqa: RUF001 # a minus
    assert any("credit*" in line and "███████████████··········" in line for line in told)


def test_lists_on_a_ledger(run: Kite):
    (found,) = lines(run("list", "--json"))
    assert (found["kind"], found["blend"], found["base_weight_ppm"]) == ("blend", "risk", 400_000)
    assert run("list").out.splitlines()[0].split()[:3] == ["BLEND", "BASE", "VERSION"]
    assert {one["kind"] for one in lines(run("list", "--versions", "--json"))} <= {"version", "account"}
    assert "the store holds" in run("list", "--versions").out


@pytest.mark.parametrize("command", [("show", "nobody"), ("weights", "nobody"), ("rollback", "nobody")])
def test_a_name_that_no_blend_has(run: Kite, command: tuple[str, ...]):
    ended = run(*command)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: no blend 'nobody'\n\nhint: there is risk\n"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--to", "f00"), 1, "risk has no version 'f00'"),
        (("--to", "other@000000000000"), 2, "other@000000000000 is no version of risk"),
        ((), 4, "the fleet is not running"),
    ],
)
def test_a_rollback_that_cannot_be_asked_for(run: Kite, options: tuple[str, ...], code: int, said: str):
    ended = run("rollback", "risk", *options)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


@pytest.mark.parametrize("command", [("list",), ("show", "risk"), ("weights", "risk"), ("rollback", "risk")])
def test_where_no_fleet_ever_was(kite: Kite, tmp_path: Path, command: tuple[str, ...]):
    ended = kite("upcycle", *command, "--dir", tmp_path / "nowhere")
    assert (ended.code, ended.out) == (4, "")
    assert "no fleet in" in ended.err


# --- how a rollback ends


def followed(*chain: Data) -> Followed:
    return Followed(ID, "0" * 32, tuple(Fact(pos, pos * SECOND_US, event(data)) for pos, data in enumerate(chain, 1)))


def event(data: Data) -> Event:
    header = Header(id=ID, source="kite/test/1", type=data.TYPE, subject="blend/risk", time=iso(0), producer="test@0")
    return Event(header=header, data=data)


def closed(outcome: Return, reason: Reason, detail: str = "") -> RollbackClosed:
    return RollbackClosed(
        why=Why(reason=reason),
        request=ID,
        blend="risk",
        outcome=outcome,
        version=RELEASED,
        former=RETAINED,
        detail=detail,
    )


ASKED = RollbackRequested(actor="me", blend="risk")
FAILED = LoadFailed(
    done=True, instance="a", version=RELEASED, stage="load", code="slots_full", message="4 of 4 slots are taken"
)


def test_a_rollback_that_was_done():
    found = ended(followed(ASKED, closed(Return.DONE, Reason.EFFECT_PROVEN)))
    assert (found.ok, found.version, found.former, found.story.took_us) == (True, RELEASED, RETAINED, SECOND_US)
    assert ended(followed(ASKED, closed(Return.DRY_RUN, Reason.DRY_RUN))).ok


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ((closed(Return.REJECTED, Reason.NO_FORMER, "risk meant one version only"),), "risk meant one version only"),
        ((FAILED, closed(Return.FAILED, Reason.LOAD_FAILED)), "a: slots_full: 4 of 4 slots are taken"),
    ],
)
def test_a_rollback_that_was_not_done_says_what_was_in_its_way(
    chain: tuple[Data, ...], said: str, capsys: pytest.CaptureFixture[str]
):
    found = ended(followed(ASKED, *chain))
    assert (found.ok, found.detail) == (False, said)
    upcycle.show_rollback(found)
    told = capsys.readouterr()
    assert told.out == ""
    assert f"error: {found.outcome} ({found.reason}): {said}" in told.err
    assert "hint: " in told.err


def test_a_hint_is_for_a_reason_that_exists():
    assert set(upcycle.HINTS) <= {str(reason) for reason in Reason}


def interrupted(*seen: Data) -> None:
    with Phases("injecting", "risk") as phases:
        for data in seen:
            phases.see(event(data))
        signal.raise_signal(signal.SIGINT)


GOES_ON = (
    "it goes on in the fleet: `kite timeline --follow` shows it, `kite upcycle show risk` what the blend means then"
)
UNHEARD = "nothing was heard of it yet; `kite timeline` tells whether it was taken up"


@pytest.mark.parametrize(("seen", "said"), [((ASKED,), GOES_ON), ((), UNHEARD)])
def test_being_interrupted_says_how_to_follow(seen: tuple[Data, ...], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt):
        interrupted(*seen)
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_a_phase_is_named_for_what_goes_on():
    order = LoadOrdered(
        why=Why(reason=Reason.VERIFIED),
        node=NODE,
        target="x",
        expires_us=1,
        ttl_us=1,
        instance="a",
        endpoint="http://127.0.0.1:1",
        base=BASE,
        resident=Resident(blend="risk", version=RELEASED, path="store/x"),
        noise_micronats=0,
    )
    assert PHASES[LoadOrdered](order) == "loading into a"


@pytest.mark.parametrize("module", [blends, weights])
def test_the_examples_in_docstrings_hold(module: object):
    assert doctest.testmod(module).failed == 0  # pyright: ignore[reportArgumentType] # a module is an object
