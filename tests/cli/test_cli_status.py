"""`kite status` on histories: the verdict first, all that is out of the ordinary, and no window folded for nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid5

import pytest
from msgspec import structs

from kite.ledger import Ledger, Reader
from kite_arbitrator.records import Freeze, Hold, Pressure, Selected
from kite_arbitrator.state import State
from kite_arbitrator.testing import BASE, LEDGER, NODE, Story
from kite_cli import place, view
from kite_cli.bounds import settings
from kite_cli.health import END_OF_GAP, RULES, STOPPED_IN_GAP, Health, gap, judge, look, off
from kite_cli.place import FleetFile
from kite_cli.status import nodes, notes, records
from kite_cli.testing import Ended
from kite_incident.replay import state_at
from kite_incident.testing import record
from kite_schemas.arbitration import Channel, Transport
from kite_schemas.ledger import BusGap, DeadlineMissed, LeaseTaken
from kite_schemas.policy import Change, amend
from kite_schemas.telemetry import InstanceWindow, Window
from kite_schemas.why import Reason

Kite = Callable[..., Ended]
Record = dict[str, Any]  # JSON
US = 1_000_000
HOUR_US = 3_600 * US
TOGETHER = ("span",)  # what is lost in a minute that was left out is not counted


def sent(story: Story, seconds: int, first: int = 1) -> int:
    """Have the node send ten windows a second; return the number of the next."""
    told = tuple(InstanceWindow(id=f"{NODE}-{BASE}-{n}", running=n, waiting=0) for n in range(2))
    for seq in range(first, first + 10 * seconds):
        at_us = story.now_us + 100_000
        story.tell_at(
            at_us,
            Window(
                node=NODE,
                boot=str(uuid5(UUID(LEDGER), "boot")),
                seq=seq,
                interval_us=100_000,
                sampled_us=at_us - 2_000,
                emitted_us=at_us - 1_000,
                instances=told,
            ),
            f"node/{NODE}",
        )
    return first + 10 * seconds


@pytest.fixture
def quiet() -> State:
    """A fleet at rest, with a blend."""
    story = Story().up()
    story.promote("credit", weight_ppm=600_000)
    return story.state


Alter = Callable[[State], State]


def lost(state: State) -> State:
    return with_feed(state, lost=True)


def stale(state: State) -> State:
    return with_feed(state, lag_us=34_000)


def blocked(state: State) -> State:
    return structs.replace(state, blocks={NODE: 1})


def frozen(state: State) -> State:
    return structs.replace(state, freeze=Freeze(blend="risk", since_us=1, until_us=2, severity=1))


def with_gap(state: State) -> State:
    return structs.replace(state, gap_pos=42, degraded=True)


def pressed(state: State) -> State:
    found = Pressure(node=NODE, base=BASE, on=True, since_us=state.now_us - 75 * US, in_flight=40)
    return structs.replace(state, pressures={found.id: found}, pressing=(found.id,))


def on_yoco(state: State) -> State:
    found = Selected(blend="risk", channel=Channel.YOCO, since_us=state.now_us - 12 * US, pos=9)
    return structs.replace(state, channels={"risk": found})


def with_feed(state: State, **fields: Any) -> State:
    story = Story(state=state, now_us=state.now_us)
    sent(story, 1)
    feed = structs.replace(story.state.feeds[NODE], **fields)
    return structs.replace(story.state, feeds={NODE: feed})


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        (with_feed, "healthy", "1 ready, 1 asleep of 2 instances, 1 blend"),
        (pressed, "healthy", "1 blend; tiny on n1 under pressure for 1 min 15 s"),
        (on_yoco, "healthy", "1 blend; risk on yoco"),
        (lost, "degraded", "node n1 lost; 1 ready"),
        (stale, "healthy", "windows of n1 stale"),
        (blocked, "healthy", "prewarms of n1 blocked"),
        (frozen, "healthy", "admissions frozen"),
        (
            with_gap,
            "degraded",
            f"the bus may have lost messages (position 42): {STOPPED_IN_GAP} until `{END_OF_GAP}`; 1 ready",
        ),
    ],
)
def test_the_verdict_says_what_is_out_of_the_ordinary(quiet: State, change: Alter, verdict: str, said: str):
    found, sentence = judge(change(quiet), silent_us=0)
    assert found == verdict
    assert said in sentence


def test_a_silent_arbitrator_is_told_before_anything_else(quiet: State):
    assert judge(structs.replace(quiet, gap_pos=1), silent_us=5 * US + 1)[0] == "stopped"
    assert judge(quiet, silent_us=5 * US)[0] == "healthy"
    assert gap(quiet) == ""


def test_an_unset_limit_is_visibly_off(quiet: State):
    assert dict(off(quiet)) == {
        "upcycle.drift_interval_us": "the look at what engines hold",
        "arbitration.concurrency_max": "pressure",
        "arbitration.injection_rate_max_milli": "shedding",
    }
    assert quiet.policy is not None
    limited = amend(quiet.policy, [Change(key="arbitration.concurrency_max", value=8)])
    assert "arbitration.concurrency_max" not in dict(off(structs.replace(quiet, policy=limited)))


def test_every_limit_that_may_be_unset_says_what_it_switches_off(quiet: State):
    optional = [key for key, setting in settings().items() if setting.optional]
    assert list(RULES) == optional
    assert quiet.policy is not None
    bare = amend(quiet.policy, [Change(key=key, value=None) for key in optional])
    assert [key for key, _ in off(structs.replace(quiet, policy=bare))] == list(RULES)


def test_how_the_windows_of_a_node_travel_is_shown(quiet: State):
    reliable = with_feed(quiet, transport=Transport.RELIABLE, lag_us=40_000)
    (found, cells), *rest = nodes(structs.replace(reliable, blocks={NODE: reliable.now_us - 3 * US}))
    assert rest == []
    assert (found["windows"], found["transport"], found["blocked_us"]) == ("fresh", "reliable", 3 * US)
    assert cells == (NODE, "fresh", "0 ms ago", "40 ms", "0 %", "reliable", "blocked for 3.0 s")
    (found, cells), *rest = nodes(quiet)
    assert (found["windows"], cells) == ("none", (NODE, "none", "", "", "", "", ""))


# --- on a ledger


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def run(kite: Kite, tmp_path: Path, url: str) -> Kite:
    """Run a command on the ledger of a fleet that does not run."""
    place.write(tmp_path, FleetFile(node=NODE, nats_url="", ledger_url=url, adapter_root=str(tmp_path), pid=1))
    return lambda *arguments: kite(*arguments, "--dir", tmp_path)


def lines(ended: Ended) -> list[Record]:
    assert ended.err == ""
    return [json.loads(line) for line in ended.out.splitlines()]


def test_a_look_at_the_end_sees_what_folding_everything_sees(url: str):
    story = Story().up(ready=2)
    seq = sent(story, 60)
    for _ in range(9):
        story.wait(US)  # silence: the node is lost, and found again
    seq = sent(story, 90, seq)
    story.register("boot")
    sent(story, 5, seq)
    record(story.rows, url)
    with Reader.open(url) as reader:
        whole, seen = state_at(reader.rows()), view.latest(reader)
    assert sum(row.type == Window.TYPE for row in story.rows) == 1_550
    assert {row.type.split(".")[2] for row in story.decided} >= {"node_lost", "node_found"}
    same = {name: getattr(whole, name) for name in whole.__struct_fields__ if name != "feeds"}
    assert same == {name: getattr(seen, name) for name in same}
    kept = [name for name in whole.feeds[NODE].__struct_fields__ if name not in TOGETHER]
    assert [getattr(whole.feeds[NODE], name) for name in kept] == [getattr(seen.feeds[NODE], name) for name in kept]


def test_windows_of_long_ago_are_left_out(url: str):
    story = Story().up()
    sent(story, 100)
    record(story.rows, url)
    with Reader.open(url) as reader:
        told = list(view.telling(reader))
    assert told[-1].pos == story.state.pos
    assert sum(isinstance(row.data, Window) for row in told) == 701  # those of the last 70 s, both ends included
    lasting = [row.pos for row in story.rows if row.type in view.LASTING]
    assert [row.pos for row in told if row.type in view.LASTING] == lasting


def test_a_view_goes_on_where_it_stopped(url: str):
    story = Story().up()
    sent(story, 3)
    record(story.rows, url)
    with Reader.open(url) as reader:
        seen = view.View(reader)
        seen.refresh()
        number = len(story.rows)
        story.wait(US)
        record(story.rows[number:], url)
        assert seen.refresh().pos == story.state.pos
        assert seen.state.now_us == story.state.now_us


def test_the_status_of_a_fleet_in_trouble_is_all_there(run: Kite, url: str):
    story = Story().up(ready=2, standbys=1)
    story.tell(LeaseTaken(epoch=1, holder="host:1"), "ledger/fleet")
    story.promote("credit", weight_ppm=600_000)
    sent(story, 2)
    story.tell(DeadlineMissed(first=1, last=1, took_us=18_000, deadline_us=17_000), "ledger/fleet")
    story.tell_at(story.now_us + 25 * HOUR_US, DeadlineMissed(first=2, last=2, took_us=40_000, deadline_us=17_000))
    late_pos = story.state.pos
    story.tell(BusGap(stream="KITE_EVT", first=1, last=2), "ledger/fleet")
    gap_pos = story.state.gap_pos
    record(story.rows, url)
    status, *rest = lines(run("status", "--json"))
    assert (status["verdict"], status["holder"], status["gap_pos"]) == ("stopped", "host:1", gap_pos)
    assert status["late_24h"] == {"number": 1, "worst_us": 40_000, "deadline_us": 17_000, "pos": late_pos}
    assert {found["setting"] for found in status["off"]} >= {"arbitration.concurrency_max"}
    kinds = [found["kind"] for found in rest]
    assert [kinds.count(kind) for kind in ("instance", "node", "pool", "blend")] == [3, 1, 1, 1]
    told = run("status").out
    assert "mode degraded: the bus may have lost messages" in told
    assert "arbitration.concurrency_max unset: pressure is off" in told
    assert "1 time in the last 24 h decisions came late, 40 ms at worst (deadline 17 ms)" in told


def test_what_is_held_is_shown_with_its_reason_and_how_long(url: str):
    story = Story().up()
    record(story.rows, url)
    with Reader.open(url) as reader:
        health = look(reader, story.now_us)
    hold = Hold(subject="capacity/n1.tiny", reason=Reason.NO_STANDBY, pos=33, since_us=health.state.now_us - 4 * US)
    state = structs.replace(health.state, holds={hold.subject: hold}, decays={BASE: 710_000})
    held = pressed(state)
    found = list(records(replaced(health, held)))
    assert found[0]["under_pressure"] == ["pool/n1.tiny"]
    own = next(one for one in found if one["kind"] == "hold")
    assert (own["subject"], own["reason"], own["lasted_us"], own["pos"]) == (hold.subject, "no_standby", 4 * US, 33)
    pool = next(one for one in found if one["kind"] == "pool")
    assert (pool["pressure"], pool["decay_ppm"], pool["decay_in_force"]) == (True, 710_000, True)


def replaced(health: Health, state: State) -> Health:
    return replace(health, state=state)


def test_a_ledger_that_is_only_born_has_a_status(run: Kite, url: str):
    Ledger.open(url).close()
    assert lines(run("status", "--json"))[0]["pos"] == 0
    assert list(notes_of(url))[-1].startswith("guard off; leader unknown")


def notes_of(url: str) -> list[str]:
    with Reader.open(url) as reader:
        return list(notes(look(reader, 0)))


@pytest.mark.parametrize("command", [("timeline",), ("timeline", "--since", "1s"), ("yoco", "instances")])
def test_commands_on_many_windows(run: Kite, url: str, command: tuple[str, ...]):
    story = Story().up()
    sent(story, 20)
    record(story.rows, url)
    ended = run(*command)
    assert ended.code == 0
    assert "window" not in ended.out
