"""`kite up` from its first line to its last: what it leaves, what it resumes, and what it refuses to begin with."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pytest

from kite.ledger import Ledger, Reader
from kite.ledger.sqlite import connect
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_cli.embedded.readiness import EngineMissing, check_engine
from kite_cli.testing import Ended, Up, left, run
from kite_incident.replay import verify
from kite_schemas.envelope import decode
from kite_schemas.ledger import LeaseTaken
from kite_schemas.model import Data
from kite_schemas.yoco import InstanceChanged, NodeRegistered

NAME = ("--name", "tiny")

Fact = TypeVar("Fact", bound=Data)


@pytest.fixture
def home(tmp_path: Path) -> Iterable[Path]:
    """A folder for a fleet, in which nothing may be left running."""
    directory = tmp_path / "fleet"
    yield directory
    assert left(directory) == []


def ledger(home: Path) -> str:
    return f"sqlite:///{home / 'ledger.db'}"


def lines(ended: Ended) -> list[dict[str, object]]:
    return [json.loads(line) for line in ended.out.splitlines()]


def instances(home: Path) -> dict[str, dict[str, object]]:
    """Return what `kite yoco instances` says, by instance."""
    return {str(one["instance"]): one for one in lines(run("yoco", "instances", "--dir", str(home), "--json"))}


def facts(reader: Reader, kind: type[Fact]) -> list[Fact]:
    """Return the facts of one type in a ledger."""
    found = (decode(row.raw).data for row in reader.find(types={kind.TYPE}))
    return [fact for fact in found if isinstance(fact, kind)]


def test_a_fleet_is_stopped_and_resumed(tiny_base: Path, home: Path, tmp_path: Path):
    adapter = adapters.adapter(tmp_path / "credit", tiny_base, seed=1)
    with Up(tiny_base, home, *NAME) as up:
        request = ("upcycle", "inject", "--adapter", str(adapter), "--target", "tiny", "--dir", str(home))
        assert run(*request).code == 0
        twice = Up(tiny_base, home.parent / "same", *NAME, "--dir", str(home)).start().ended()
        assert twice.code == 1
        assert f"error: a fleet runs in {home} already (process {up.process.pid})" in twice.err
        ended = up.end(signal.SIGINT)
    assert (ended.code, ended.err.splitlines()[-2:]) == (0, ["stopping the fleet", "fleet stopped"])
    assert left(home) == []
    assert lines(run("status", "--dir", str(home), "--json"))[0]["blends"] == 1
    assert run("yoco", "order", "tiny", "--dir", str(home)).code == 4
    assert run("replay", "--dir", str(home)).code == 0
    with Up(tiny_base, home, *NAME) as up:
        found = instances(home)
        assert [found[f"local-tiny-{n}"]["state"] for n in (0, 1)] == ["ready", "asleep"]
        assert found["local-tiny-0"]["versions"] != []  # the promoted blend came back without being asked for
        assert up.end(signal.SIGTERM).code == 0
    with Reader.open(ledger(home)) as reader:
        reader.verify_chain()
        assert [row.pos for row in reader.rows()] == list(range(1, reader.head.pos + 1))
        assert len(list(reader.find(types={LeaseTaken.TYPE}))) == reader.head.epoch == 2
        assert len(list(reader.find(types={NodeRegistered.TYPE}))) == 2
        assert verify(reader).identical


@pytest.mark.parametrize("phase", ["bus at", "starting on", "ready (cold"])
def test_ctrl_c_while_it_starts_leaves_nothing(phase: str, tiny_base: Path, home: Path):
    up = Up(tiny_base, home, *NAME).start()
    up.wait_for(phase)
    ended = up.end()
    assert ended.code == 0
    assert "Traceback" not in ended.err
    assert left(home) == []


def test_a_prewarmed_spare_is_let_on_when_it_is_ordered(tiny_base: Path, home: Path):
    spare = "local-tiny-2"
    with Up(tiny_base, home, *NAME, "--prewarmed", "1") as up:
        found = instances(home)
        assert [found[f"local-tiny-{n}"]["state"] for n in range(3)] == ["ready", "asleep", "prewarmed"]
        refused = run("yoco", "order", "tiny", "--instance", spare, "--dir", str(home))
        assert (refused.code, "--late" in refused.err) == (1, True), "no start meets 417 ms, and none is tried"
        ordered = run("yoco", "order", "tiny", "--instance", spare, "--late", "--dir", str(home))
        assert (ordered.code, "ready (cold)" in ordered.err + ordered.out) == (0, True), ordered
        assert instances(home)[spare]["state"] == "ready"
        assert up.end(signal.SIGINT).code == 0
    with Reader.open(ledger(home)) as reader:
        steps = [fact.code for fact in facts(reader, InstanceChanged) if fact.instance == spare]
        assert steps == ["ordered", "held", "let_on", "healthy", "shutdown"]
        assert verify(reader).identical


def test_a_fleet_that_was_killed_is_resumed(tiny_base: Path, home: Path):
    with Up(tiny_base, home, *NAME) as up:
        assert up.end(signal.SIGKILL).code == -signal.SIGKILL
    with Up(tiny_base, home, *NAME) as up:
        assert up.end().code == 0
    with Reader.open(ledger(home)) as reader:
        assert verify(reader).identical


async def test_engines_of_a_fleet_that_was_killed_with_its_yoco_end_by_themselves(tiny_base: Path, home: Path):
    with Up(tiny_base, home, *NAME, env={"KITE_KEEP_S": "2"}) as up:
        yoco = json.loads((home / "fleet.json").read_text())["pids"]["yoco"]
        os.kill(yoco, signal.SIGKILL)
        assert up.end(signal.SIGKILL).code == -signal.SIGKILL
    assert left(home), "engines serve on for a moment"
    await eventually(lambda: left(home) == [], 30)


def test_a_port_that_is_taken(tiny_base: Path, home: Path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = Up(tiny_base, home, "--nats-port", str(port)).start().ended()
    assert ended.code == 1
    assert f"error: port {port} on the loopback address is taken" in ended.err
    assert not home.exists()


def test_a_file_in_the_way_of_the_folder(tiny_base: Path, home: Path):
    home.write_text("mine")
    ended = Up(tiny_base, home).start().ended()
    assert ended.code == 1
    assert ended.err.startswith(f"error: cannot write in {home}: ")
    assert home.read_text() == "mine"


def test_a_base_that_is_none(home: Path, tmp_path: Path):
    ended = Up(tmp_path / "nope", home).start().ended()
    assert (ended.code, ended.err.splitlines()[0]) == (1, f"error: base {tmp_path / 'nope'} is not a folder")
    ended = Up(tmp_path, home).start().ended()
    assert ended.code == 1
    assert f"error: base {tmp_path} cannot be read" in ended.err
    assert not home.exists()


def test_a_ledger_from_a_later_version(tiny_base: Path, home: Path):
    home.mkdir()
    Ledger.open(ledger(home)).close()
    connection = connect(home / "ledger.db")
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    ended = Up(tiny_base, home).start().ended()
    assert ended.code == 1
    assert "has schema 9999, which this version of KITE does not know" in ended.err


def test_a_bus_whose_folder_was_deleted_is_a_new_epoch_that_somebody_has_to_look_at(tiny_base: Path, home: Path):
    with Up(tiny_base, home, *NAME, "--standbys", "0") as up:
        up.end()
    shutil.rmtree(home / "nats")
    with Up(tiny_base, home, *NAME, "--standbys", "0") as up:
        (epoch,) = [
            line for line in lines(run("ledger", "gaps", "--dir", str(home), "--json")) if line["kind"] == "epoch"
        ]
        assert epoch["why"] == "created_anew"
        assert "degraded" in run("status", "--dir", str(home)).out
        acknowledged = run("gap", "acknowledge", "--reason", "the folder was deleted on purpose", "--dir", str(home))
        assert acknowledged.code == 0
        assert "degraded" not in run("status", "--dir", str(home)).out
        assert up.end().code == 0
    assert run("ledger", "verify", "--dir", str(home)).code == 0


def test_an_engine_that_dies_while_it_starts(tiny_base: Path, home: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_base, broken)
    (broken / "tokenizer.json").unlink()
    ended = Up(broken, home, "--standbys", "0").start().ended()
    assert ended.code == 1
    assert ended.err.count("local-broken-0 failed: engine_died") == 3
    assert "error: local-broken-0 failed 3 times in a row: engine_died" in ended.err
    assert str(home / "state" / "yoco" / "logs" / "local-broken-0.log") in ended.err


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--name", "a/b"), "spec.served_name"), (("--node", ".x"), "node"), (("--name", "x" * 99), "spec.served_name")],
)
def test_names_that_cannot_be(options: tuple[str, ...], said: str, tiny_base: Path, home: Path):
    ended = Up(tiny_base, home, *options).start().ended()
    assert ended.code == 2
    assert said in ended.err
    assert not home.exists()


def test_vllm_that_is_not_installed():
    with pytest.raises(EngineMissing) as caught:
        check_engine("vllm", installed=lambda _: None)
    assert "requirements/vllm-cpu.txt" in caught.value.hint
    check_engine("fake", installed=lambda _: None)
