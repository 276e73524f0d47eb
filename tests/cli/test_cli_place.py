"""Finding a fleet: by folder, by environment, and what is said when there is none."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kite.errors import UsageError
from kite_cli import place
from kite_cli.place import FleetFile, FleetFileUnreadable, NoFleet
from kite_cli.testing import Ended

Kite = Callable[..., Ended]
FILE = FleetFile(node="n1", nats_url="nats://127.0.0.1:1", ledger_url="sqlite:////x.db", adapter_root="/a", pid=1)


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("KITE_DIR", "KITE_NATS_URL", "KITE_LEDGER_URL", "KITE_ADAPTER_ROOT", "KITE_SIGNING_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_file_comes_back_and_is_for_its_owner_only(tmp_path: Path):
    place.write(tmp_path, FILE)
    assert place.read(tmp_path) == FILE
    assert (tmp_path / "fleet.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.json"]


def test_a_folder_that_is_named_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    place.write(tmp_path / "a", FILE)
    monkeypatch.setenv("KITE_DIR", str(tmp_path / "b"))
    monkeypatch.setenv("KITE_NATS_URL", "nats://elsewhere:4222")
    monkeypatch.setenv("KITE_LEDGER_URL", "sqlite:////elsewhere.db")
    assert place.find(tmp_path / "a").nats_url == FILE.nats_url
    with pytest.raises(NoFleet, match="b"):
        place.find(None)
    monkeypatch.delenv("KITE_DIR")
    found = place.find(None)
    assert (found.nats_url, found.ledger_url, found.adapter_root) == (
        "nats://elsewhere:4222",
        "sqlite:////elsewhere.db",
        None,
    )


def test_the_default_folder_is_the_last_resort(tmp_path: Path):
    (tmp_path / ".kite").mkdir()
    place.write(tmp_path / ".kite", FILE)
    assert place.find(None).adapter_root == Path("/a")


def test_half_an_address_is_no_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KITE_NATS_URL", "nats://elsewhere:4222")
    with pytest.raises(UsageError, match="only one"):
        place.find(None)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"node": 1, "other": 2})])
def test_a_strange_file_is_said_to_be_one(tmp_path: Path, content: str):
    (tmp_path / "fleet.json").write_text(content)
    with pytest.raises(FleetFileUnreadable):
        place.in_folder(tmp_path)


@pytest.mark.parametrize("line", ["status", "timeline", "yoco instances", "config get", "yoco order tiny"])
def test_without_a_fleet_commands_end_as_unreachable(line: str, kite: Kite):
    ended = kite(*line.split())
    assert ended.code == 4
    assert ended.err == "error: no fleet in .kite\n\nhint: start one with `kite up`, or name its folder by --dir\n"


def test_a_fleet_that_was_stopped_takes_no_requests(tmp_path: Path, kite: Kite):
    place.write(tmp_path, FleetFile(node="n1", nats_url="", ledger_url="sqlite:////x.db", adapter_root="/a", pid=0))
    ended = kite("yoco", "order", "tiny", "--dir", tmp_path)
    assert ended.code == 4
    assert "not running" in ended.err


def test_a_bus_that_is_gone_is_unreachable(tmp_path: Path, kite: Kite):
    place.write(tmp_path, FILE)
    ended = kite("yoco", "order", "tiny", "--dir", tmp_path)
    assert ended.code == 4
    assert "no NATS server answers at nats://127.0.0.1:1" in ended.err


def test_a_ledger_that_is_gone_is_one_error(tmp_path: Path, kite: Kite):
    place.write(tmp_path, FILE)
    ended = kite("status", "--dir", tmp_path)
    assert ended.code == 1
    assert ended.err.startswith("error: no ledger at /x.db")
