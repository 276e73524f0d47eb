"""The policy on a real fleet: seen, changed, refused, compared and remembered; and the ledger followed as it grows."""

import json
import signal
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kite_cli.testing import Ended, Up, command

Kite = Callable[..., Ended]
Record = dict[str, Any]  # JSON
KEY = "upcycle.weight_min_ppm"
SHIPPED = 10_000
TRIES = 30


def lines(ended: Ended) -> list[Record]:
    return [json.loads(line) for line in ended.out.splitlines()]


def one(ended: Ended) -> Record:
    (found,) = lines(ended)
    return found


def end(on: Kite) -> int:
    return int(lines(on("status", "--json"))[0]["pos"])


@pytest.fixture(autouse=True)
def as_before(on: Kite) -> Generator[None]:
    """Leave the numbers of the shared fleet as they were."""
    before = str(end(on))
    yield
    changed = [as_it_was(found) for found in lines(on("config", "diff", before, "now", "--json"))]
    assert not changed or on("config", "set", *changed).code == 0


def as_it_was(found: Record) -> str:
    return f"{found['key']}={'unset' if found['before'] is None else found['before']}"


def test_the_policy_is_changed_by_an_event(on: Kite):
    before = one(on("config", "get", "yoco.cold_start_deadline_us", "--json"))
    assert before == {"key": "yoco.cold_start_deadline_us", "value": 417_000}
    trial = one(on("config", "set", "upcycle.weight_min", "0.02", "--dry-run", "--json"))
    assert (trial["before"], trial["after"], trial["digest"]) == (SHIPPED, 20_000, None)
    ended = on("config", "set", "upcycle.weight_min", "0.02", "--reason", "a test")
    assert (ended.code, ended.out) == (0, f"{KEY} is now 20000 (was 10000)\n")
    assert one(on("config", "get", "upcycle.weight_min", "--json"))["value"] == 20_000
    assert on("config", "set", KEY, str(SHIPPED)).code == 0
    assert len(on("config", "get").out.splitlines()) == len(lines(on("config", "get", "--json"))) + 1


def test_another_name_says_on_stderr_what_it_means(on: Kite):
    got = on("config", "get", "upcycle.weight_decay")
    assert "930000" in got.out
    assert got.err == "upcycle.weight_decay means upcycle.weight_decay_ppm (parts per million)\n"
    tried = on("config", "set", "upcycle.weight_decay", "0.93", "--dry-run")
    assert "(parts per million): '0.93' is 930000\n" in tried.err
    assert on("config", "get", KEY).err == ""


def test_several_settings_are_one_change(on: Kite):
    before = end(on)
    ended = on("config", "set", "upcycle.weight_min=0.02", "expiry.wake=9s", "--json")
    assert [(found["key"], found["after"]) for found in lines(ended)] == [(KEY, 20_000), ("expiry.wake_us", 9_000_000)]
    assert len({found["digest"] for found in lines(ended)}) == 1
    (own,) = [found for found in lines(on("config", "history", "--json")) if found["pos"] > before]
    assert [change["key"] for change in own["changes"]] == [KEY, "expiry.wake_us"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nope", "1"), "unknown setting 'nope'"),
        (("upcycle.weight_mim", "1"), "did you mean upcycle.weight_min"),
        ((KEY, "2000000"), "from 0 to 1000000, not '2000000'"),
        ((KEY, "-1"), "from 0 to 1000000, not '-1'"),
        ((KEY, "many"), "a whole number of parts per million"),
        (("upcycle.weight_min", "half"), "'half' is no number"),
        (("upcycle.weight_min", "0.0000001"), "kept in whole parts per million"),
        (("rules", "2"), "rules takes only 1"),
        (("fleet.pools", "[{}]"), "fleet.pools.0.node is missing"),
        (("fleet.pools", "null"), "fleet.pools cannot be unset: it takes a JSON list"),
        ((KEY, "unset"), f"{KEY} cannot be unset: it takes a whole number"),
        ((KEY, "1", "upcycle.weight_min", "1"), f"{KEY} is given twice"),
        ((f"{KEY}=1", "rules=2"), "rules takes only 1"),
        ((KEY,), "has no value"),
    ],
)
def test_changes_that_cannot_be_are_one_error(on: Kite, words: tuple[str, ...], said: str):
    before = one(on("config", "get", KEY, "--json"))
    ended = on("config", "set", "--", *words)
    assert ended.code == 2
    assert ended.out == ""
    assert said in ended.err
    assert ended.err.count("error: ") == 1
    assert "\n\nhint: " in ended.err or "twice" in said
    assert one(on("config", "get", KEY, "--json")) == before


def test_a_limit_is_set_and_unset_and_says_so(on: Kite):
    limit = "arbitration.concurrency_max"
    assert one(on("config", "get", limit, "--json")) == {"key": limit, "value": None}
    assert on("config", "get", limit).out.splitlines()[1].split() == [limit, "unset"]
    assert "pressure is off" in on("status").out
    assert on("config", "set", limit, "64").out == f"{limit} is now 64 (was unset)\n"
    assert [limit, "unset", "64"] in [line.split() for line in on("config", "diff").out.splitlines()]
    assert f"{limit} unset: pressure is off" not in on("status").out
    ended = on("config", "set", limit, "unset", "arbitrator.jitter_window", "unset")
    assert ended.out == f"{limit} is now unset (was 64)\narbitration.switch_window_us is now unset (was 137000)\n"
    assert one(on("config", "get", limit, "--json"))["value"] is None
    listed = {found["key"]: found for found in lines(on("config", "list", "--json"))}
    assert listed["arbitration.switch_window_us"]["differs"]
    assert "arbitration.switch_window_us unset: discarding jitter is off" in on("status").out
    table = on("config", "history").out.splitlines()
    assert table[-1].split()[-3:] == ["arbitration.switch_window_us", "137000", "unset"]


def test_an_unknown_setting_cannot_be_seen(on: Kite):
    ended = on("config", "get", "upcycle.weight_dekay")
    assert (ended.code, ended.out) == (2, "")
    assert "did you mean upcycle.weight_decay" in ended.err


def test_the_list_has_every_setting_with_unit_and_meaning(on: Kite):
    assert on("config", "set", KEY, "20000").code == 0
    found = {setting["key"]: setting for setting in lines(on("config", "list", "--json"))}
    assert found.keys() == {setting["key"] for setting in lines(on("config", "get", "--json"))}
    assert (found[KEY]["value"], found[KEY]["shipped"], found[KEY]["differs"]) == (20_000, SHIPPED, True)
    assert (found[KEY]["unit"], found["rules"]["unit"]) == ("parts per million", "")
    assert all(setting["meaning"] and setting["takes"] for setting in found.values())
    header, *rows = on("config", "list").out.splitlines()
    assert header.split() == ["KEY", "VALUE", "UNIT", "SHIPPED", "MEANING"]
    own = next(row for row in rows if row.startswith(KEY))
    assert own.split() == f"{KEY} 20000 parts per million 10000 {found[KEY]['meaning']}".split()


def test_policies_are_compared_by_position_digest_and_name(on: Kite):
    before = end(on)
    changed = one(on("config", "set", KEY, "20000", "--json"))
    told = on("config", "diff")
    assert told.code == 3
    assert [f"{KEY}", "10000", "20000"] in [line.split() for line in told.out.splitlines()]
    for name in (str(end(on)), str(changed["digest"])[:12]):
        found = one(on("config", "diff", str(before), name, "--json"))
        assert found == {"key": KEY, "before": SHIPPED, "after": 20_000}
        same = on("config", "diff", name, "now")
        assert (same.code, same.out, same.err) == (0, "", f"{name} and now are equal\n")
    assert on("config", "diff", "now", "shipped").code == 3


@pytest.mark.parametrize("name", ["1", "99999999", "ffffff", "later"])
def test_policies_that_are_not_there(on: Kite, name: str):
    ended = on("config", "diff", name)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"error: no policy '{name}'")


def test_the_history_tells_who_changed_what_and_why(on: Kite):
    changed = one(on("config", "set", KEY, "30000", "--reason", "a story", "--json"))
    *_, own = lines(on("config", "history", "--json"))
    assert (own["outcome"], own["reason"], own["digest"]) == ("set", "a story", changed["digest"])
    assert own["changes"] == [{"key": KEY, "before": SHIPPED, "after": 30_000}]
    assert own["actor"]
    table = on("config", "history").out.splitlines()
    assert "all " in table[1]
    assert str(own["pos"]) in table[-1]
    assert f"set {own['digest'][:12]}" in table[-1]
    assert table[-1].endswith("a story")


def following(up: Up, out: Path, *options: str) -> subprocess.Popen[str]:
    argv = command("timeline", "--follow", *options, "--dir", str(up.dir))
    with out.open("w") as stream:
        return subprocess.Popen(argv, stdout=stream, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """End it as Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def changed_until_told(on: Kite, out: Path, text: str) -> None:
    """A follower needs a moment to start: change the policy until it tells one of the changes."""
    for number in range(TRIES):
        if text in out.read_text():
            return
        assert on("config", "set", KEY, str(20_000 + number)).code == 0
    raise AssertionError(out.read_text())


def test_the_timeline_is_followed_from_here_on(on: Kite, up: Up, tmp_path: Path):
    before = end(on)
    out = tmp_path / "followed"
    process = following(up, out, "--json")
    changed_until_told(on, out, "kite.policy.set.v1")
    assert ended(process) == (0, "")
    steps = [json.loads(line) for line in out.read_text().splitlines()]
    assert [step["pos"] for step in steps] == sorted({step["pos"] for step in steps})
    assert all(step["pos"] > before for step in steps)
    own = next(step for step in steps if step["type"] == "kite.policy.set.v1")
    assert (own["title"], own["decision"]) == (f"change the policy: {KEY}", True)
    assert own["correlation"] in {found["correlation"] for found in lines(on("timeline", "--json"))}


def test_the_timeline_is_followed_for_people(on: Kite, up: Up, tmp_path: Path):
    out = tmp_path / "told"
    process = following(up, out, "--since", "1h")
    changed_until_told(on, out, f"change the policy: {KEY}\n")
    changed_until_told(on, out, "→ arbitrator: set policy/fleet")
    assert ended(process) == (0, "")
    said = out.read_text()
    assert "node local registered\n" in said  # it began with what was there
    assert "\x1b" not in said


def test_a_follower_ends_with_its_reader(on: Kite, up: Up):
    argv = command("timeline", "-f", "--since", "1h", "--dir", str(up.dir))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert on("config", "set", KEY, "20000").code == 0
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
