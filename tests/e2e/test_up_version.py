"""A version's life on a running fleet, with the commands of an operator: return, forward, retire, return once more."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kite.ledger import Reader
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_cli.__main__ import main
from kite_cli.exits import Exit
from kite_cli.testing import Ended, Up, left
from kite_incident.replay import verify
from kite_schemas.upcycle import RetireOrdered

Record = dict[str, Any]  # JSON
BASE, BLEND = "tiny", "risk"
READY = 2
PARTED_S = 30.0


def lines(ended: Ended) -> list[Record]:
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in ended.out.splitlines()]


class Fleet:
    """The commands on one fleet, run inside the test's process."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._home = home
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Ended:
        self._capsys.readouterr()
        code = main([*arguments, "--dir", str(self._home)])
        said = self._capsys.readouterr()
        return Ended(code, said.out, said.err)

    def json(self, *arguments: str) -> list[Record]:
        return lines(self(*arguments, "--json"))

    def inject(self, adapter: Path, weight: str) -> Record:
        options = ("--target", BASE, "--blend", BLEND, "--weight", weight)
        return self.json("upcycle", "inject", "--adapter", str(adapter), *options)[0]

    def version(self) -> str:
        return self.json("upcycle", "show", BLEND)[0]["version"]

    def standing(self, version: str) -> Record:
        return next(one for one in self.json("upcycle", "list", "--versions") if one.get("version") == version)

    def parted(self, version: str) -> bool:
        """Whether no instance holds a version, which the store does."""
        found = self.standing(version)
        return found["standing"] == "released" and not found["instances"]


def unanswered(ended: Ended, reason: str, way_out: str) -> None:
    """Check that there was nobody to ask: one error, with a hint, and nothing on stdout."""
    assert (ended.code, ended.out) == (Exit.UNREACHABLE, "")
    assert ended.err.count("error:") == ended.err.count("hint:") == 1
    assert reason in ended.err
    assert way_out in ended.err


def test_without_a_fleet_nothing_is_rolled_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kite = Fleet(tmp_path / "nowhere", capsys)
    for options in ((), ("--to", "0123456789ab"), ("--dry-run",), ("--json",)):
        unanswered(kite("upcycle", "rollback", BLEND, *options), f"no fleet in {tmp_path / 'nowhere'}", "--dir")


@pytest.mark.timeout(180)
def test_a_version_returns_is_retired_and_returns_again(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    home = tmp_path / "fleet"
    first, second = (adapters.adapter(tmp_path / f"a{n}", tiny_base, rank=4, seed=n) for n in (1, 2))
    with Up(tiny_base, home, "--name", BASE, "--ready", str(READY)):
        kite = Fleet(home, capsys)
        only = kite.inject(first, "0.6")
        nothing = kite("upcycle", "rollback", BLEND)
        assert (nothing.code, nothing.out) == (1, "")
        assert "rejected (no_former)" in nothing.err
        both = kite.inject(second, "0.4")
        assert (both["missing"], len(both["instances"])) == ([], READY)
        (listed,) = kite.json("upcycle", "list")
        assert (listed["version"], listed["retained"]) == (both["version"], only["version"])
        assert 0 < listed["left_us"] <= 120_000_000
        assert (len(listed["serving"]), listed["serving_total"]) == (READY, READY)
        would = kite.json("upcycle", "rollback", BLEND, "--dry-run")[0]
        assert (would["outcome"], would["version"], kite.version()) == ("dry_run", only["version"], both["version"])

        back = kite.json("upcycle", "rollback", BLEND, "--reason", "odd answers")[0]
        assert (back["outcome"], back["version"], back["former"]) == ("done", only["version"], both["version"])
        assert (kite.version(), len(back["instances"])) == (only["version"], READY)
        assert {route["version"] for route in kite.json("routes", BLEND)} == {only["version"]}
        forward = kite.json("upcycle", "rollback", BLEND, "--to", both["version"].partition("@")[2][:6])[0]
        assert (forward["outcome"], kite.version()) == ("done", both["version"])

        assert kite("config", "set", "upcycle.retention_us=1000000").code == 0
        asyncio.run(eventually(lambda: kite.parted(only["version"]), PARTED_S))
        assert kite.json("upcycle", "list")[0]["retained"] is None
        again = kite.json("upcycle", "rollback", BLEND, "--to", only["version"])[0]
        assert (again["outcome"], kite.version()) == ("done", only["version"])

        _, *history = kite.json("upcycle", "show", BLEND, "--history")
        assert [(one["by"], one["version"]) for one in history] == [
            ("injection", only["version"]),
            ("injection", both["version"]),
            ("rollback", only["version"]),
            ("rollback", both["version"]),
            ("rollback", only["version"]),
        ]
        assert history[2]["reason"] == "odd answers"
        moved = [one["moved_ppm"].get("a2") for one in kite.json("upcycle", "weights", BLEND)]
        assert moved == [None, 400_000, -400_000, 400_000, -400_000]
        told = [(entry["title"], entry["outcome"]) for entry in kite.json("timeline")]
        returns = [outcome for title, outcome in told if title == f"roll {BLEND} back to the version before"]
        assert [outcome.partition(":")[0] for outcome in returns] == ["rejected", "done"]
        (parted,) = [outcome for title, outcome in told if title == f"retire {only['version']}: its retention is over"]
        assert parted.startswith(f"{only['version']} left ")
    assert left(home) == []
    unanswered(kite("upcycle", "rollback", BLEND), "the fleet is not running", "kite up")
    with Reader.open(f"sqlite:///{home / 'ledger.db'}") as reader:
        assert next(iter(reader.find(types=[RetireOrdered.TYPE])))
        assert verify(reader).identical
