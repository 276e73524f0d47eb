"""Keys on a real fleet: made, added, listed; what is signed is taken, and what is not is refused with a reason."""

import json
import stat
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from kite.ledger import Reader
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.trust import load_public, load_signer, new_key
from kite_arbitrator.testing.running import Place, arbitrator
from kite_cli import place
from kite_cli.asking import keys
from kite_cli.asking.following import actor
from kite_cli.asking.sending import NOTHING_DEMANDED, RequestRefused
from kite_cli.embedded.fleet import SERVICES, embedded
from kite_cli.embedded.keys import Keys, introduce, sources
from kite_cli.embedded.options import Options
from kite_cli.place import FleetFile
from kite_cli.testing import Ended, Up
from kite_schemas.envelope import decode
from kite_schemas.ledger import ProducerKeyAdded, Refusal, Rejected
from kite_schemas.policy import ChangeRequested
from kite_schemas.yoco import NodeRegistered

Kite = Callable[..., Ended]
Record = dict[str, Any]  # JSON
BECAUSE = ("--reason", "a test")
HARMLESS = ("config", "set", "expiry.compare_us=31000000")
UP = {f"kite/{name}/local" for name in ("yoco", "upcycle", "guard")} | {"kite/arbitrator/leader"}


def lines(ended: Ended) -> list[Record]:
    return [json.loads(line) for line in ended.out.splitlines()]


def one(ended: Ended) -> Record:
    assert ended.code == 0, ended.err
    (found,) = lines(ended)
    return found


@pytest.fixture
def ledger(up: Up) -> str:
    return f"sqlite:///{up.dir / 'ledger.db'}"


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A key that no ledger knows."""
    path = tmp_path / "stranger.key"
    new_key(path)
    return path


def rejected(ledger: str) -> list[Rejected]:
    with Reader.open(ledger) as reader:
        datas = [decode(row.raw).data for row in reader.find(types=(Rejected.TYPE,))]
    return [data for data in datas if isinstance(data, Rejected)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("command", "mark"), [("new", "[changes]"), ("add", "[changes]"), ("list", "[reads]")])
def test_every_command_says_what_it_does(command: str, mark: str, kite: Kite):
    ended = kite("key", command, "--help")
    assert mark in ended.out
    assert "--json" in ended.out


@pytest.mark.usefixtures("kite")  # it clears the environment
def test_which_key_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place.write(tmp_path, FleetFile(node="n", nats_url="nats://x", ledger_url="sqlite:////x", adapter_root="/", pid=1))
    assert place.find(tmp_path).signing_key is None
    new_key(tmp_path / "keys" / "operator.key")
    assert place.find(tmp_path).signing_key == tmp_path / "keys" / "operator.key"
    monkeypatch.setenv("KITE_SIGNING_KEY", "/elsewhere.key")
    assert place.find(tmp_path).signing_key == Path("/elsewhere.key")
    monkeypatch.setenv("KITE_NATS_URL", "nats://x")
    monkeypatch.setenv("KITE_LEDGER_URL", "sqlite:////x")
    assert place.find(None).signing_key == Path("/elsewhere.key")


def test_a_key_is_made_once(kite: Kite, tmp_path: Path):
    file = tmp_path / "node-a.key"
    made = one(kite("key", "new", file, "--json"))
    assert (made["key"], made["public_key"]) == (load_signer(file).key_id, load_public(tmp_path / "node-a.pub").hex())
    assert (made["file"], made["public_file"]) == (str(file), str(tmp_path / "node-a.pub"))
    before = file.read_bytes()
    again = kite("key", "new", file)
    assert (again.code, again.out, file.read_bytes()) == (1, "", before)
    assert again.err.startswith(f"error: {file} exists, and no key is ever replaced\n\nhint: ")
    other = kite("key", "new", tmp_path / "other")
    assert other.out.splitlines()[1] == f"private: {tmp_path / 'other'}, public: {tmp_path / 'other.pub'}"
    assert before.split()[1].decode() not in other.out
    assert kite("key", "new", tmp_path / "x.pub").code == 2
    assert "cannot write the key" in kite("key", "new", file / "below").err


def test_a_fleet_has_keys_of_its_own(on: Kite, up: Up, ledger: str):
    folder = up.dir / "keys"
    names = {"operator", "arbitrator", "yoco", "upcycle", "guard"}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{end}" for name in names for end in ("key", "pub")}
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.glob("*.key")} == {0o600}
    listed = {found["source"]: found for found in lines(on("key", "list", "--json"))}
    assert set(listed) >= UP
    assert listed["kite/yoco/local"]["key"] == load_signer(folder / "yoco.key").key_id
    with Reader.open(ledger) as reader:
        facts = {row.key_id for row in reader.find(types=(NodeRegistered.TYPE,))}
        requests = {row.key_id for row in reader.find(types=(ProducerKeyAdded.TYPE,))}
    assert facts == {listed["kite/yoco/local"]["key"]}
    assert requests == {load_signer(folder / "operator.key").key_id}
    assert on("key", "list").out.splitlines()[0].split() == ["KEY", "SOURCE", "TIME", "POS", "ACTOR", "REASON"]


def test_a_key_is_tried_added_and_listed(on: Kite, stranger: Path):
    add = ("key", "add", stranger.with_suffix(".pub"), "--source", "kite/yoco/node-b", *BECAUSE)
    key = load_signer(stranger).key_id
    tried = one(on(*add, "--dry-run", "--json"))
    assert (tried["key"], tried["dry_run"], tried["added"], tried["pos"]) == (key, True, False, None)
    assert key not in {found["key"] for found in lines(on("key", "list", "--json"))}

    added = on(*add)
    assert added.code == 0, added.err
    listed = {found["key"]: found for found in lines(on("key", "list", "--json"))}[key]
    assert added.out == f"key {key} speaks for kite/yoco/node-b from position {listed['pos']} on\n"
    assert (listed["source"], listed["actor"], listed["reason"]) == ("kite/yoco/node-b", actor(), "a test")

    again = on(*add, "--json")
    assert again.err == "the ledger trusts this key for kite/yoco/node-b already: nothing is added\n"
    assert (one(again)["added"], one(again)["pos"]) == (False, listed["pos"])


@pytest.mark.parametrize("source", ["yoco/node-b", "kite/yoco/", "kite/yoco/a/b", "kite/YOCO/a", "kite/yoco/a b"])
def test_a_source_that_cannot_be(on: Kite, stranger: Path, source: str):
    ended = on("key", "add", stranger.with_suffix(".pub"), "--source", source, *BECAUSE)
    assert ended.code == 2
    assert ended.err.startswith(f"error: source cannot be {source!r}")


def test_a_private_key_is_not_told_to_anybody(on: Kite, stranger: Path):
    ended = on("key", "add", stranger, "--source", "kite/yoco/node-b", *BECAUSE)
    assert ended.code == 1
    assert "it holds a `kite-private-key`" in ended.err
    assert stranger.read_text().split()[1] not in ended.err


def test_a_key_is_not_added_without_a_reason(on: Kite, stranger: Path):
    ended = on("key", "add", stranger.with_suffix(".pub"), "--source", "kite/yoco/node-b")
    assert ended.code == 2
    assert "--reason" in ended.err


@pytest.mark.parametrize("request_", [HARMLESS, ("yoco", "order", "tiny"), ("key", "add")])
def test_requests_under_a_key_that_nobody_added(
    on: Kite, ledger: str, stranger: Path, request_: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KITE_SIGNING_KEY", str(stranger))
    if request_ == ("key", "add"):
        request_ = (*request_, str(stranger.with_suffix(".pub")), "--source", "kite/yoco/node-b", *BECAUSE)
    before = len(rejected(ledger))
    ended = on(*request_)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-3].startswith("error: the arbitrator refuses the request (key_unknown): ")
    assert ended.err.splitlines()[-1].startswith("hint: `kite key list` shows which keys the ledger has")
    assert [found.code for found in rejected(ledger)[before:]] == [Refusal.KEY_UNKNOWN]


def test_requests_that_nobody_signed(on: Kite, up: Up, ledger: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KITE_DIR")
    monkeypatch.setenv("KITE_NATS_URL", place.read(up.dir).nats_url)
    monkeypatch.setenv("KITE_LEDGER_URL", ledger)
    ended = on(*HARMLESS)
    assert ended.code == 1
    assert "the arbitrator refuses the request (unsigned): " in ended.err
    assert "hint: KITE_SIGNING_KEY names the private key" in ended.err
    assert on("status").code == 0  # looking needs no key


def test_a_user_s_key_makes_that_user_s_requests_and_adds_no_keys(
    on: Kite, ledger: str, stranger: Path, monkeypatch: pytest.MonkeyPatch
):
    source = f"kite/cli/{actor()}"
    assert on("key", "add", stranger.with_suffix(".pub"), "--source", source, *BECAUSE).code == 0
    monkeypatch.setenv("KITE_SIGNING_KEY", str(stranger))
    changed = on(*HARMLESS, "--json")
    assert changed.code == 0, changed.err
    with Reader.open(ledger) as reader:
        *_, last = reader.find(types=(ChangeRequested.TYPE,))
    assert last.key_id == load_signer(stranger).key_id
    new_key(stranger.with_name("friend.key"))
    ended = on("key", "add", stranger.with_name("friend.pub"), "--source", "kite/yoco/node-c", *BECAUSE)
    assert ended.code == 1
    assert "the arbitrator refuses the request (not_of_producer): " in ended.err
    assert "adds no keys" in ended.err


def test_a_signing_key_that_is_not_there(on: Kite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("KITE_SIGNING_KEY", str(tmp_path / "nowhere.key"))
    ended = on(*HARMLESS)
    assert ended.code == 1
    assert ended.err.startswith(f"error: no key at {tmp_path / 'nowhere.key'}")


@pytest.fixture
async def trusting(tmp_path: Path) -> AsyncGenerator[Place]:
    """A bus and a ledger whose arbitrator demands no signatures."""
    async with nats(tmp_path) as server:
        found = Place.beside(server, tmp_path)
        file = FleetFile(node="n", nats_url=server.url, ledger_url=found.url, adapter_root=str(tmp_path), pid=1)
        place.write(tmp_path, file)
        yield found


async def test_without_an_operator_s_key_no_key_is_taken(trusting: Place, stranger: Path, tmp_path: Path):
    async with arbitrator(trusting):
        fleet = place.in_folder(tmp_path, signing_key=stranger)
        with pytest.raises(RequestRefused) as caught:
            await keys.add(fleet, "kite/yoco/n", load_signer(stranger).public, reason="a test")
    assert (caught.value.refused.code, caught.value.hint) == (Refusal.UNSIGNED, NOTHING_DEMANDED)
    assert trusting.found(ProducerKeyAdded) == []


async def test_a_folder_from_before_gets_keys_and_demands_them(tmp_path: Path, tiny_base: Path):
    folder = tmp_path / "fleet"
    async with nats(folder) as server:
        before = Place.beside(server, folder)
        async with arbitrator(before):
            pass
    options = Options(base=tiny_base, name="tiny", engine="fake", dir=folder, ready=0, standbys=0)
    async with embedded(options) as fleet:
        assert {key.source for key in keys.known(fleet)} == UP
        await introduce(fleet, Keys(folder), sources(SERVICES, fleet.node))  # as when it is started again
        assert len(before.found(ProducerKeyAdded)) == len(UP)
        await eventually(lambda: before.found(NodeRegistered))
    assert before.found(Rejected) == []
