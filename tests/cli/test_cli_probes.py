"""`kite probes` on a real fleet: a set is written, checked, registered, listed, shown, asked, and replaced again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kite import probes
from kite.ledger import Reader
from kite_cli.asking.probing import long
from kite_cli.testing import Ended, Up

Kite = Callable[..., Ended]
Record = dict[str, Any]  # JSON
BASE = "tiny"
FIRST, SECOND = (f"local-{BASE}-{number}" for number in range(2))
SHIPPED = probes.default()
OWN = "\n".join(SHIPPED.prompts[4:]) + "\n"
PRIVATE = "a private probe"


def lines(ended: Ended) -> list[Record]:
    return [json.loads(line) for line in ended.out.splitlines()]


def one(ended: Ended) -> Record:
    (found,) = lines(ended)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A set of 13 probes."""
    path = tmp_path / "own.txt"
    path.write_text(OWN)
    return path


def listed(on: Kite) -> dict[str, Record]:
    """Return what is listed by digest; of one that was registered twice, the newest."""
    return {found["digest"]: found for found in lines(on("probes", "list", "--json"))}


def test_a_set_is_checked_registered_asked_and_replaced(on: Kite, up: Up, file: Path, tmp_path: Path):
    tried = one(on("probes", "add", file, "--base", BASE, "--dry-run", "--json"))
    digest = tried["digest"]
    assert (tried["probes"], tried["dry_run"], tried["request"]) == (13, True, None)
    assert tried["longest_tokens"] == len(SHIPPED.prompts[-1].encode())  # the tiny base has a token a byte
    assert digest not in listed(on)
    assert not (up.dir / "adapter-root" / "store" / "probes" / f"{digest}.json").exists()

    longest = tried["longest_tokens"]
    added = on("probes", "add", file, "--base", BASE, "--reason", "a test")
    assert (added.code, added.err) == (0, "")
    assert added.out == f"{digest[:12]}: 13 probes, the longest of {longest} tokens, now in force for tiny\n"
    found = listed(on)
    assert (found[digest]["in_force"], found[SHIPPED.digest]["in_force"]) == (True, False)
    assert (found[digest]["reason"], found[digest]["shipped"], found[SHIPPED.digest]["shipped"]) == (
        "a test",
        False,
        True,
    )
    assert digest[:12] in on("probes", "list").out

    compared = one(on("guard", "compare", FIRST, SECOND, "--json"))
    assert (compared["probes"], compared["positions"], compared["kl_micronats"]) == (digest, 13, 0)
    assert on("probes", "show", digest[:12]).out == OWN

    (tmp_path / "back.txt").write_text(on("probes", "show", SHIPPED.digest).out)
    back = one(on("probes", "add", tmp_path / "back.txt", "--base", BASE, "--json"))
    assert back["digest"] == SHIPPED.digest
    assert listed(on)[digest]["in_force"] is False
    compared = one(on("guard", "compare", FIRST, SECOND, "--json"))
    assert (compared["probes"], compared["positions"]) == (SHIPPED.digest, 17)
    assert on("replay").code == 0


def test_no_text_of_a_probe_leaves_the_store(on: Kite, up: Up, tmp_path: Path):
    path = tmp_path / "private.txt"
    path.write_text(f"{OWN}{PRIVATE}\n")
    assert on("probes", "add", path, "--base", BASE).code == 0
    assert on("guard", "compare", FIRST, SECOND).code == 0
    with Reader.open(f"sqlite:///{up.dir / 'ledger.db'}") as reader:
        assert not [row for row in reader.rows() if PRIVATE.encode() in row.raw]
    logs = [*(up.dir / "logs").rglob("*"), *(up.dir / "state").rglob("*.log")]
    assert logs
    assert not [log for log in logs if log.is_file() and PRIVATE.encode() in log.read_bytes()]
    (tmp_path / "back.txt").write_text("\n".join(SHIPPED.prompts))
    assert on("probes", "add", tmp_path / "back.txt", "--base", BASE).code == 0


def test_every_bad_line_is_said_and_nothing_is_registered(on: Kite, tmp_path: Path):
    path = tmp_path / "bad.txt"
    path.write_text(f'{OWN}\n"{PRIVATE}\n{PRIVATE * 40}\n')
    before = lines(on("probes", "list", "--json"))
    ended = on("probes", "add", path, "--base", BASE)
    assert ended.code == 1
    assert ended.err.splitlines()[:2] == [
        "error: bad.txt:15: begins with a quotation mark and is no JSON string",
        f"bad.txt:16: {40 * len(PRIVATE)} characters, at most 400",
    ]
    assert PRIVATE not in ended.err
    assert lines(on("probes", "list", "--json")) == before


def test_a_probe_that_the_base_cannot_take_is_found_by_its_line():
    assert long(b"short\n\na long probe\r\nhi\n", [1, 3, 1], 2) == [(3, 3)]
    assert long(b"short\n", [2], 2) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("add", "FILE", "--base", "other"), 2, "no pool of the fleet serves 'other'"),
        (("add", "nowhere.txt", "--base", BASE), 1, "nowhere.txt cannot be read"),
        (("add", "FILE"), 2, "--base"),
        (("show", "0123456789"), 1, "no probe set begins with '0123456789'"),
        (("show", ""), 1, "probe sets begin with ''"),
    ],
)
def test_lines_that_cannot_be(on: Kite, file: Path, arguments: tuple[str, ...], code: int, said: str):
    ended = on("probes", *(file if word == "FILE" else word for word in arguments))
    assert ended.code == code
    assert said in ended.err
