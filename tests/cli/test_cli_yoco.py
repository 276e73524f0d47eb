"""`kite yoco` on a real fleet: pools, a drain and its way back, refusals, logs, metrics of the services."""

import asyncio
import json
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from kite.testing.eventually import eventually
from kite_cli.testing import Ended, Up, command, left

Kite = Callable[..., Ended]
Record = dict[str, Any]  # JSON
BASE = "tiny"
FIRST, STANDBY = (f"local-{BASE}-{number}" for number in range(2))
METRICS_PORT = 23_417
"""Below what the kernel gives out by itself; the other services have the next three."""


@pytest.fixture(scope="module")
def own(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterable[Up]:
    """A fleet of one ready instance and a standby, which tells its metrics."""
    directory = tmp_path_factory.mktemp("yoco") / "fleet"
    with Up(tiny_base, directory, "--name", BASE, "--metrics-port", str(METRICS_PORT)) as up:
        yield up
    assert left(directory) == []


@pytest.fixture
def on(kite: Kite, own: Up, monkeypatch: pytest.MonkeyPatch) -> Kite:
    """Run a command on this file's fleet."""
    monkeypatch.setenv("KITE_DIR", str(own.dir))
    return kite


def lines(ended: Ended) -> list[Record]:
    return [json.loads(line) for line in ended.out.splitlines()]


def one(ended: Ended) -> Record:
    (found,) = lines(ended)
    return found


def states(on: Kite) -> dict[str, Record]:
    return {found["instance"]: found for found in lines(on("yoco", "instances", "--json"))}


def test_a_pool_is_shown(on: Kite):
    found = one(on("yoco", "pool", "--json"))
    assert (found["base"], found["node"]) == (BASE, "local")
    assert found["wanted"] == {"ready": 1, "standbys": 1, "prewarmed": 0}
    assert (found["found"]["ready"], found["found"]["asleep"]) == (1, 1)
    assert {path["path"] for path in found["paths"]} >= {"cold"}
    said = on("yoco", "pool", BASE).out
    assert said.startswith("POOL  NODE")
    assert "none kept" in said
    assert lines(on("yoco", "pool", "nobody", "--json")) == []


def test_a_drained_instance_is_left_alone_until_somebody_orders_it(on: Kite):
    woken = one(on("yoco", "order", BASE, "--json"))
    assert (woken["ok"], woken["instance"], woken["path"]) == (True, STANDBY, "hot")
    ended = on("yoco", "drain", STANDBY, "--reason", "a look at it", "--json")
    found = one(ended)
    assert (ended.code, found["state"], found["mode"]) == (0, "asleep", "paused")
    assert states(on)[STANDBY]["parked"] is True
    assert f"`kite yoco order {BASE} --instance {STANDBY}`" in on("yoco", "pool").out
    refused = on("yoco", "order", BASE)
    assert (refused.code, "not done (no_standby)" in refused.err) == (1, True)
    again = one(on("yoco", "order", BASE, "--instance", STANDBY, "--json"))
    assert (again["ok"], states(on)[STANDBY]["parked"]) == (True, False)
    assert on("yoco", "drain", STANDBY).out.startswith(f"{STANDBY} asleep (paused) after ")


def test_the_last_one_that_answers_is_not_drained(on: Kite):
    ended = on("yoco", "drain", FIRST)
    assert ended.code == 1
    assert "not done (last_instance)" in ended.err
    assert "hint: `--force` drains it all the same" in ended.err
    assert states(on)[FIRST]["state"] == "ready"


def test_an_instance_that_nobody_knows(on: Kite):
    ended = on("yoco", "drain", "nobody")
    assert ended.code == 1
    assert "not done (instance_unknown)" in ended.err


def test_an_order_within_a_deadline_that_nothing_meets(on: Kite):
    ended = on("yoco", "order", BASE, "--instance", STANDBY, "--deadline", "1", "--json")
    found = one(ended)
    assert ended.code == 1
    assert (found["code"], found["instance"]) == ("deadline_unreachable", None)
    assert found["expected_us"] > 1_000
    said = on("yoco", "order", BASE, "--instance", STANDBY, "--deadline", "1").err
    assert "not done (deadline_unreachable): " in said
    assert "`--late` takes the fastest" in said


def test_the_log_of_an_engine(on: Kite, own: Up):
    log = own.dir / "state" / "yoco" / "logs" / f"{FIRST}.log"
    with log.open("a", encoding="utf-8") as stream:
        stream.write("first\nsecond\n")  # the fake has nothing to say while all is well
    assert on("yoco", "logs", FIRST, "--lines", "1").out == "second\n"
    ended = on("yoco", "logs", "nobody")
    assert ended.code == 1
    assert f"there are logs of: {FIRST}, {STANDBY}" in ended.err


@pytest.mark.parametrize("words", [("logs", FIRST, "--follow"), ("instances", "--watch"), ("pool", "--watch")])
async def test_what_is_followed_ends_quietly(own: Up, words: tuple[str, ...], tmp_path: Path):
    said = tmp_path / "said"
    with said.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command("yoco", *words, "--dir", str(own.dir)), stdout=out, stderr=asyncio.subprocess.PIPE
        )
    await eventually(lambda: said.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")


def test_every_service_tells_its_metrics(own: Up):
    pages = [urlopen(f"http://127.0.0.1:{METRICS_PORT + n}/metrics").read().decode() for n in range(4)]
    assert "kite_arbitrator_leading 1.0" in pages[0]
    assert 'kite_yoco_passages_total{base="tiny",node="local",path="cold"} 2.0' in pages[0]
    assert 'kite_yoco_ready_seconds_count{path="cold"} 2.0' in pages[1]
    assert 'kite_yoco_orders_total{code="done",order="start"} 2.0' in pages[1]
    assert all("kite_order_redeliveries_total 0.0" in page for page in pages[1:])
    assert "# TYPE kite_upcycle_order_seconds histogram" in pages[2]
    assert "# TYPE kite_guard_order_seconds histogram" in pages[3]
    ports = json.loads((own.dir / "fleet.json").read_text())["ports"]
    assert [ports[name] - METRICS_PORT for name in ("arbitrator", "yoco", "upcycle", "guard")] == [0, 1, 2, 3]
