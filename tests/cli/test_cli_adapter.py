"""`kite adapter`: one sentence for each mistake, exit codes, tables for people and lines of JSON for programs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kite.engine import EngineProcess
from kite.testing import zoo
from kite.testing.zoo.samples import write_adapter, write_base
from kite_cli.testing import Ended
from kite_upcycle import stamp
from kite_upcycle.rewrite import rewrite
from kite_upcycle.testing import older

Kite = Callable[..., Ended]
ANY_SIZE = ("--params-share-max-ppm", "1000000")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "small")


@pytest.fixture
def credit(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapters" / "credit")


@pytest.fixture
def paths(credit: Path, base: Path) -> dict[str, Path]:
    return {"ADAPTER": credit, "BASE": base}


def lines(ended: Ended) -> list[dict[str, object]]:
    return [json.loads(line) for line in ended.out.splitlines()]


def test_from_training_to_the_strict_contract(kite: Kite, credit: Path, base: Path) -> None:
    refused = kite("adapter", "verify", credit, "--base", base, "--strict", *ANY_SIZE)
    assert (refused.code, "stamp_missing" in refused.out) == (1, True)

    tried = kite("adapter", "stamp", credit, "--base", base, "--dry-run")
    assert (tried.code, "credit would be stamped" in tried.out) == (0, True)
    assert kite("adapter", "stamp", credit, "--base", base).out.endswith("credit is stamped\n")
    again = kite("adapter", "stamp", credit, "--base", base, "--json")
    assert lines(again)[0]["outcome"] == "unchanged"

    kept = kite("adapter", "verify", credit, "--base", base, "--strict", *ANY_SIZE)
    assert (kept.code, "credit keeps the contract" in kept.out) == (0, True)
    moved = kite("adapter", "verify", credit, "--base", base, "--strict", "--block-size", "16", *ANY_SIZE)
    assert (moved.code, "block_size: 32 != 16" in moved.out) == (1, True)


def test_several_adapters_are_verified_each(kite: Kite, credit: Path, base: Path, tmp_path: Path) -> None:
    bad = zoo.defective(credit, tmp_path / "bad", "nan")
    ended = kite("adapter", "verify", credit, bad, "--base", base, "--json", *ANY_SIZE)
    assert ended.code == 1
    assert [(line["adapter"], line["accepted"]) for line in lines(ended)] == [(str(credit), True), (str(bad), False)]


def test_the_sentence_that_operators_search_for_is_printed(kite: Kite, tmp_path: Path, tiny_base: Path) -> None:
    from kite.testing import adapters

    wide = zoo.defective(adapters.adapter(tmp_path / "good", tiny_base), tmp_path / "wide", "wrong_base")
    ended = kite("adapter", "verify", wide, "--base", tiny_base)
    assert ended.code == 1
    assert "KV cache alignment mismatch at layer 3: adapter 8 heads, base 4\n" in ended.out


def test_a_bad_adapter_is_not_stamped(kite: Kite, credit: Path, base: Path, tmp_path: Path) -> None:
    bad = zoo.defective(credit, tmp_path / "bad", "nan")
    ended = kite("adapter", "stamp", bad, "--base", base)
    assert (ended.code, "not_finite" in ended.out, "bad was not stamped" in ended.err) == (1, True, True)


def test_a_stamp_for_another_base_needs_force(kite: Kite, credit: Path, base: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", seed=3)
    assert kite("adapter", "stamp", credit, "--base", other).code == 0
    ended = kite("adapter", "stamp", credit, "--base", base)
    assert (ended.code, "is stamped for base" in ended.err, "--force" in ended.err) == (1, True, True)
    assert kite("adapter", "stamp", credit, "--base", base, "--force").code == 0


def test_a_folder_is_migrated_and_told_before(kite: Kite, credit: Path, base: Path) -> None:
    root = credit.parent
    kite("adapter", "stamp", credit, "--base", base)
    rewrite(credit, older)
    shutil.copytree(credit, root / "mood")
    write_adapter(root / "plain")

    tried = kite("adapter", "migrate", root, "--from-version", "3.5", "--dry-run", "--json")
    assert [(line["state"], line["outcome"]) for line in lines(tried)] == [
        ("migrate", "would be migrated"),
        ("migrate", "would be migrated"),
        ("unstamped", "no stamp"),
    ]
    made = kite("adapter", "migrate", root, "--version", "3.5")
    assert made.code == 0
    assert made.out.splitlines() == ["credit: migrated", "mood: migrated", "plain: no stamp"]
    told = made.err.splitlines()
    assert told.index("1 of 2: credit") > next(at for at, line in enumerate(told) if "2 of 3 adapters will be" in line)
    assert kite("adapter", "verify", credit, "--base", base, "--strict", *ANY_SIZE).code == 0


def test_one_that_cannot_be_migrated_ends_with_1(kite: Kite, credit: Path, base: Path) -> None:
    kite("adapter", "stamp", credit, "--base", base)
    rewrite(credit, lambda found: {**found, stamp.VERSION: "3"})
    ended = kite("adapter", "migrate", credit, "--from-version", "3.5", "--json")
    assert (ended.code, lines(ended)[0]["state"]) == (1, "newer")


def test_adapters_are_listed_and_shown(kite: Kite, credit: Path, base: Path) -> None:
    kite("adapter", "stamp", credit, "--base", base)
    write_adapter(credit.parent / "broken", config={"r": "four"})

    table = kite("adapter", "list", credit.parent, "--base", base)
    assert table.code == 0
    assert [line.split()[0] for line in table.out.splitlines()] == ["NAME", "broken", "credit"]
    broken, sound = lines(kite("adapter", "list", credit.parent, "--json"))
    assert (sound["rank"], sound["alpha"], sound["modules"], sound["share_ppm"]) == (4, 8, 8, None)
    assert broken["violations"]

    shown = kite("adapter", "show", credit, "--base", base)
    assert (shown.code, "kite.norm_eps" in shown.out, "share of the base" in shown.out) == (0, True, True)
    assert kite("adapter", "show", credit.parent / "broken").code == 1
    assert lines(kite("adapter", "show", credit, "--json"))[0]["name"] == "credit"


def test_a_folder_without_adapters_lists_none(kite: Kite, tmp_path: Path) -> None:
    ended = kite("adapter", "list", tmp_path)
    assert (ended.code, "no adapter lies" in ended.err) == (0, True)


def test_a_running_server_says_what_counts(
    kite: Kite, credit: Path, base: Path, fake_server: EngineProcess, tmp_path: Path
) -> None:
    wide = write_adapter(tmp_path / "wide", rank=32)
    at = ("--base", base, "--server", fake_server.url, *ANY_SIZE)
    assert kite("adapter", "verify", credit, *at).code == 0
    ended = kite("adapter", "verify", wide, *at, "--max-lora-rank", "64")
    assert (ended.code, "at most 16, the servers' max_lora_rank" in ended.out) == (1, True)
    assert "note: the server serves tiny, not small" in ended.err


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        (("verify", "nowhere", "--base", "BASE"), 1, "nowhere is not a folder"),
        (("verify", "ADAPTER", "--base", "nowhere"), 1, "base nowhere is not a folder"),
        (("verify", "ADAPTER", "--base", "ADAPTER"), 1, "cannot be read: config.json"),
        (("verify", "ADAPTER", "--base", "BASE", "--server", "localhost"), 2, "no address of a server"),
        (("verify", "ADAPTER", "--base", "BASE", "--server", "http://[x"), 2, "no address of a server"),
        (("verify", "ADAPTER", "--base", "BASE", "--server", "http://127.0.0.1:1"), 4, "127.0.0.1:1"),
        (("stamp", "nowhere", "--base", "BASE"), 1, "nowhere is not a folder"),
        (("stamp", "BASE", "--base", "BASE"), 1, "was not stamped"),
        (("stamp", "ADAPTER", "--base", "BASE", "--tp", "0"), 2, "--tp"),
        (("migrate", "BASE", "--from-version", "3.5"), 1, "no adapter lies at"),
        (("migrate", "nowhere", "--from-version", "3.5"), 1, "nowhere is not a folder"),
        (("migrate", "ADAPTER", "--from-version", "2"), 2, "no way back"),
        (("migrate", "ADAPTER", "--from-version", "9"), 2, "'9' are known"),
        (("migrate", "ADAPTER"), 2, "--from-version"),
        (("list", "nowhere"), 1, "nowhere is not a folder"),
        (("show", "nowhere"), 1, "nowhere is not a folder"),
        (("show", "ADAPTER", "--base", "nowhere"), 1, "base nowhere is not a folder"),
    ],
)
def test_a_mistake_gets_one_sentence(
    command: tuple[str, ...], code: int, text: str, kite: Kite, paths: dict[str, Path]
) -> None:
    ended = kite("adapter", *(paths.get(word, word) for word in command))
    assert (ended.code, text in ended.err) == (code, True), ended.err
    assert ended.err.count("error: ") == 1


def test_what_is_no_adapter_is_shown_with_why(kite: Kite, base: Path) -> None:
    ended = kite("adapter", "show", base)
    assert (ended.code, "missing_file" in ended.out) == (1, True)
