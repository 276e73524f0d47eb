"""Every command on a real fleet, in the order an engineer would use them; each test has blends of its own."""

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kite.ledger import Reader
from kite.testing import zoo
from kite_cli.incident import SKIPPABLE
from kite_cli.testing import Ended, Up, command
from kite_incident.refusals import KINDS

Kite = Callable[..., Ended]
Make = Callable[..., Path]
Record = dict[str, Any]  # JSON
BASE = "tiny"
FIRST, SECOND, STANDBY = (f"local-{BASE}-{number}" for number in range(3))


def lines(ended: Ended) -> list[Record]:
    return [json.loads(line) for line in ended.out.splitlines()]


def one(ended: Ended) -> Record:
    (found,) = lines(ended)
    return found


def inject(on: Kite, path: Path, *options: str) -> Ended:
    return on("upcycle", "inject", "--adapter", path, "--target", BASE, "--json", *options)


def kinds(on: Kite, correlation: object) -> list[str]:
    entry = next(found for found in lines(on("timeline", "--steps", "--json")) if found["correlation"] == correlation)
    return [step["type"].split(".")[2] for step in entry["steps"]]


def test_up_says_where_everything_is(up: Up):
    (ready,) = [json.loads(line) for line in up.said().splitlines() if line.startswith("{")]
    assert ready["event"] == "fleet_ready"
    assert (ready["base"], ready["ready"], ready["standbys"]) == (BASE, 2, 1)
    file = json.loads((up.dir / "fleet.json").read_text())
    assert {"nats", "arbitrator", "yoco", "upcycle", "guard"} == set(file["pids"])
    assert file["nats_url"] == ready["nats_url"]
    assert f"{STANDBY} asleep" in up.said()


def test_status_is_a_sentence_first(on: Kite):
    ended = on("status")
    assert ended.code == 0
    assert ended.out.startswith("healthy: ")
    assert "\x1b" not in ended.out
    assert ended.err == ""
    status, *rest = lines(on("status", "--json"))
    assert (status["kind"], status["verdict"], status["epoch"], status["instances"]) == ("status", "healthy", 1, 3)
    assert isinstance(status["tick_age_us"], int)
    assert {found["kind"] for found in rest} <= {"instance", "node", "pool", "blend", "hold"}
    assert (status["mode"], status["gap_pos"], status["lost"]) == ("static", None, [])


def test_an_injection_is_followed_to_its_promotion(on: Kite, up: Up, make_adapter: Make):
    ended = inject(on, make_adapter("credit", seed=1), "--blend", "risk", "--weight", "0.3", "--reason", "a test")
    found = one(ended)
    assert ended.code == 0
    assert (found["outcome"], found["blend"], found["base_weight_ppm"]) == ("promoted", "risk", 700_000)
    assert "copied below the adapter root" in ended.err
    assert "proven on" in ended.err
    told = kinds(on, found["request"])
    assert told[0] == "injection_requested"
    assert told.index("blend_promoted") < told.index("injection_closed")
    with Reader.open(f"sqlite:///{up.dir / 'ledger.db'}") as reader:
        traces = {row.trace_id for row in reader.find(trace_id=found["trace_id"])}
        assert traces == {found["trace_id"]}


def test_routes_say_where_requests_go(on: Kite):
    found = lines(on("routes", "risk", "--json"))
    assert [(route["name"], route["instance"], route["channel"]) for route in found] == [
        ("risk", FIRST, "upcycle"),
        ("risk", SECOND, "upcycle"),
    ]
    assert {route["version"] for route in found} == {lines(on("upcycle", "show", "risk", "--json"))[0]["version"]}
    assert all(route["endpoint"].startswith("http://127.0.0.1:") for route in found)
    assert {route["name"] for route in lines(on("routes", "--json"))} >= {"risk", BASE}
    assert on("routes").out.splitlines()[0].split() == ["NAME", "VERSION", "INSTANCE", "ENDPOINT", "CHANNEL", "POS"]
    nothing = on("routes", "nobody", "--json")
    assert (nothing.code, nothing.out) == (0, "")


def test_a_second_member_is_anchored_and_shown(on: Kite, make_adapter: Make):
    blend = ("--blend", "pair")
    assert inject(on, make_adapter("one", seed=2), *blend, "--weight", "0.6", "--anchor", "one").code == 0
    ended = on("upcycle", "--adapter", make_adapter("two", seed=3), "--target", BASE, *blend, "--weight", "0.4")
    assert ended.code == 0
    assert "60 %" in ended.out
    assert "promoted: pair as pair@" in ended.out
    shown = one(on("upcycle", "show", "pair", "--json"))
    assert {(m["adapter"]["name"], m["weight_ppm"], m["anchored"]) for m in shown["members"]} == {
        ("one", 600_000, True),
        ("two", 400_000, False),
    }
    assert {FIRST, SECOND} <= set(shown["instances"])
    assert "60 %" in on("upcycle", "show", "pair").out


def test_a_blend_that_is_not_there(on: Kite):
    ended = on("upcycle", "show", "nothing")
    assert ended.code == 1
    assert ended.err.startswith("error: no blend 'nothing'")


def test_a_dry_run_changes_nothing(on: Kite, make_adapter: Make):
    found = one(inject(on, make_adapter("trial", seed=4), "--blend", "trial", "--weight", "0.5", "--dry-run"))
    assert (found["outcome"], found["version"], found["base_weight_ppm"]) == ("dry_run", None, 500_000)
    assert on("upcycle", "show", "trial").code == 1


def test_a_defective_adapter_is_refused_with_every_violation(on: Kite, make_adapter: Make, tmp_path: Path):
    bad = zoo.defective(make_adapter("good", seed=5), tmp_path / "wrong", "wrong_base")
    ended = inject(on, bad, "--blend", "bad")
    found = one(ended)
    assert ended.code == 1
    assert found["outcome"] == "refused"
    assert len(found["violations"]) == found["violations_total"] == 4
    assert {violation["code"] for violation in found["violations"]} == {"attention_heads"}
    told = on("upcycle", "inject", "--adapter", bad, "--target", BASE, "--blend", "bad")
    assert told.code == 1
    assert told.out.splitlines()[0].split() == ["CODE", "WHERE", "EXPECTED", "FOUND"]
    assert told.out.count("attention_heads") == 4
    assert "error: refused (adapter_refused): 4 violations" in told.err


def test_files_that_cannot_be_read_are_refused_before_anything_is_asked(on: Kite, make_adapter: Make):
    path = make_adapter("pickled", seed=6)
    (path / "adapter_model.bin").write_bytes(b"\x80")
    before = lines(on("status", "--json"))[0]["open_injections"]
    ended = inject(on, path)
    assert ended.code == 1
    assert one(ended)["outcome"] == "refused"
    assert "pickle_file" in on("upcycle", "inject", "--adapter", path, "--target", BASE).out
    assert lines(on("status", "--json"))[0]["open_injections"] == before


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--target", "other"), 1, "no pool of the fleet serves 'other'"),
        (("--target", BASE, "--replace", "nobody"), 1, "no member 'nobody' to replace"),
        (("--target", BASE, "--anchor", "nobody"), 1, "no member 'nobody' to anchor"),
        (("--target", BASE, "--blend", "Upper Case"), 2, "blend name"),
        (("--target", "a/b"), 2, "'a/b'"),
        (("--target", BASE, "--name", "a/b"), 2, "'a/b'"),
    ],
)
def test_injections_that_cannot_be(on: Kite, make_adapter: Make, options: tuple[str, ...], code: int, said: str):
    blend = () if "--blend" in options or "a/b" in options else ("--blend", "never")
    ended = on("upcycle", "inject", "--adapter", make_adapter("fine", seed=7), *blend, *options)
    assert ended.code == code
    assert said in ended.err


def test_an_adapter_is_verified_without_a_fleet(kite: Kite, make_adapter: Make, tiny_base: Path, tmp_path: Path):
    good = make_adapter("good", seed=8)
    ended = kite("adapter", "verify", good, "--base", tiny_base)
    assert ended.code == 0
    assert ended.out.startswith("good keeps the contract: rank 4")
    bad = zoo.defective(good, tmp_path / "lies", "rank_lies")
    ended = kite("adapter", "verify", bad, "--base", tiny_base, "--json")
    assert ended.code == 1
    found = one(ended)
    assert found["accepted"] is False
    assert found["violations"]
    assert kite("adapter", "verify", tmp_path / "nope", "--base", tiny_base).code == 1
    assert kite("adapter", "verify", good, "--base", tmp_path).code == 1


def test_a_standby_is_handed_over_once(on: Kite):
    ended = on("yoco", "order", BASE, "--reason", "a test", "--json")
    found = one(ended)
    assert ended.code == 0
    assert (found["instance"], found["path"]) == (STANDBY, "hot")
    assert found["deadline_us"] == 417_000
    assert found["deadline_met"] == (found["took_us"] <= 417_000)
    again = on("yoco", "order", BASE)
    assert again.code == 1
    assert "no_standby" in again.err
    woken = next(found for found in lines(on("yoco", "instances", "--json")) if found["instance"] == STANDBY)
    assert (woken["state"], woken["summoned"]) == ("ready", True)
    assert "woken" in on("yoco", "instances").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("other",), "base_unknown"), ((BASE, "--instance", "nobody"), "instance_unknown")],
)
def test_orders_that_cannot_be(on: Kite, arguments: tuple[str, ...], said: str):
    ended = on("yoco", "order", *arguments)
    assert ended.code == 1
    assert said in ended.err


def test_two_instances_are_compared(on: Kite):
    ended = on("guard", "compare", FIRST, SECOND, "--json")
    found = one(ended)
    assert ended.code == 0
    assert (found["ok"], found["first"], found["second"]) == (True, FIRST, SECOND)
    assert found["kl_micronats"] == 0
    assert on("guard", "compare", FIRST, "nobody").code == 1
    assert "KL 0.0000 nats" in on("guard", "compare", FIRST, SECOND).out


def test_the_timeline_tells_requests(on: Kite, make_adapter: Make):
    found = one(inject(on, make_adapter("told", seed=9), "--blend", "told"))
    entries = lines(on("timeline", "--since", "20m", "--json"))
    own = next(entry for entry in entries if entry["correlation"] == found["request"])
    assert (own["title"], own["outcome"]) == ("inject told into told", "promoted: effect_proven")
    assert own["trace_id"] == found["trace_id"]
    assert "inject told into told" in on("timeline").out
    assert "→ arbitrator: blend_promoted blend/told" in on("timeline", "--steps").out
    assert on("timeline", "--since", "0s").code == 0


def test_a_decision_is_explained(on: Kite, make_adapter: Make):
    found = one(inject(on, make_adapter("why", seed=10), "--blend", "why", "--weight", "0.25"))
    steps = lines(on("timeline", "--steps", "--json"))
    own = next(entry for entry in steps if entry["correlation"] == found["request"])["steps"]
    admitted = next(step for step in own if step["type"].endswith("injection_admitted.v1"))
    told = on("explain", str(admitted["pos"]))
    assert told.code == 0
    for word in (
        "injection_admitted",
        "upcycle.params_share_max_ppm",
        "MARGIN",
        "candidates",
        "inputs",
        "brought about",
    ):
        assert word in told.out
    assert str(found["trace_id"]) in told.out
    account = one(on("explain", admitted["id"], "--json"))
    assert (account["pos"], account["reason"]) == (admitted["pos"], "verified")
    assert one(on("explain", admitted["id"][:12], "--json"))["id"] == admitted["id"]
    missing = on("explain", "999999")
    assert missing.code == 1
    assert "the ledger ends at" in missing.err


def test_a_decision_leads_to_its_trace(on: Kite, make_adapter: Make):
    found = one(inject(on, make_adapter("traced", seed=11), "--blend", "traced", "--weight", "0.25"))
    at = f"http://127.0.0.1:16686/trace/{found['trace_id']}"
    assert on("trace", str(found["request"]), "--print-url").out == f"{at}\n"
    told = one(on("trace", str(found["request"]), "--jaeger", "http://jaeger.example/ui/", "--json"))
    assert told == {"trace_id": found["trace_id"], "url": f"http://jaeger.example/ui/trace/{found['trace_id']}"}
    untraced = on("trace", "1", "--print-url")
    assert (untraced.code, untraced.out) == (1, "")
    assert "error: 1 is kite.ledger.created.v1, which belongs to no trace" in untraced.err
    assert on("trace", "999999", "--print-url").code == 1


def test_everything_so_far_replays(on: Kite):
    ended = on("replay")
    assert ended.code == 0
    number, *words = ended.out.split()
    assert words == ["decisions,", "identical"]
    found = one(on("replay", "--json"))
    assert found["identical"] is True
    assert found["decisions"] >= int(number)
    part = one(on("replay", "--from", "4", "--to", "10", "--json"))
    assert (part["first"], part["last"]) == (4, 10)
    assert on("replay", "--from", "1", "--to", "1").code == 1  # the ledger's birth decides nothing


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_a_table(up: Up, no_color: str):
    ours, theirs = pty.openpty()
    env = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "200"}
    argv = command("yoco", "instances", "--dir", str(up.dir))
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        said = read_all(ours)
        assert process.wait() == 0
    assert "─" in said
    assert FIRST in said
    assert ("\x1b[3" in said) is False  # no colours, only weight


def read_all(terminal: int) -> str:
    """Read a terminal until its other end is closed, which Linux reports as an error."""
    parts: list[bytes] = []
    try:
        while part := os.read(terminal, 65_536):
            parts.append(part)
    except OSError:
        pass
    os.close(terminal)
    return b"".join(parts).decode()


def test_why_not_explains_the_skip_that_was_in_force(on: Kite):
    refused = on("yoco", "order", "nobody")
    assert refused.code == 1
    told = on("explain", "--why-not", "wake", "--json")
    assert told.code == 0
    assert json.loads(told.out)["reason"] == "base_unknown"
    assert on("explain").code == 2
    assert on("explain", "--why-not", "sleepless").code == 2


def test_every_kind_of_skip_can_be_asked_for(on: Kite):
    assert tuple(KINDS) == SKIPPABLE
    for what in SKIPPABLE:
        ended = on("explain", "--why-not", what)
        assert ended.code == 0 or ended.err.startswith("error: up to position")
