"""`kite yoco add`: one more pool on a fleet that runs, changed, and what cannot be one."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kite_cli.testing import Ended

Kite = Callable[..., Ended]
SPARE = ("--name", "spare", "--engine", "fake", "--ready", "0", "--dtype", "float32")
POOLS = "fleet.pools"


def pools(on: Kite) -> list[dict[str, Any]]:
    found = on("config", "get", POOLS, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)["value"]


@pytest.fixture(autouse=True)
def as_before(on: Kite) -> Generator[None]:
    """Leave the shared fleet with the pools that it had."""
    before = pools(on)
    yield
    if pools(on) != before:
        assert on("config", "set", f"{POOLS}={json.dumps(before)}").code == 0


def test_one_more_pool_leaves_the_others_alone_and_is_replaced_by_its_name(on: Kite, tiny_base: Path):
    before = pools(on)
    added = on("yoco", "add", tiny_base, *SPARE, "--standbys", "0", "--reason", "a second name", "--json")
    assert added.code == 0, added.err
    assert json.loads(added.out)["base"] == "spare"
    assert pools(on)[:-1] == before
    changed = on("yoco", "add", tiny_base, *SPARE, "--standbys", "0", "--standby-mode", "kv")
    assert changed.code == 0, changed.err
    assert changed.out == "local runs spare on fake: 0 ready, 0 asleep\n"
    assert pools(on)[:-1] == before
    assert pools(on)[-1]["standby_mode"] == "kv"


def test_a_dry_run_changes_nothing(on: Kite, tiny_base: Path):
    before = pools(on)
    said = on("yoco", "add", tiny_base, *SPARE, "--dry-run")
    assert said.out == "local would run spare on fake: 0 ready, 1 asleep\n"
    assert pools(on) == before


def test_what_cannot_be_a_pool_is_said_before_anything_is_asked(on: Kite, tiny_base: Path, tmp_path: Path):
    before = pools(on)
    nowhere = on("yoco", "add", tmp_path / "nowhere", *SPARE)
    assert (nowhere.code, f"{tmp_path / 'nowhere'} is not a folder" in nowhere.err) == (1, True)
    named = on("yoco", "add", tiny_base, "--engine", "fake", "--node", "no node")
    assert (named.code, "node cannot be 'no node'" in named.err) == (2, True)
    assert pools(on) == before
