"""Probe sets: written by people, kept in the store, asked by the guard; no text of theirs leaves the file."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite import probes, proof
from kite.probes import PROMPT_MAX_CHARS, PROMPTS_MAX, PROMPTS_MIN, ProbesInvalid
from kite.proof import ProbesAltered, ProbesMissing, ProbesUnwritable

LONG = " ".join(["word"] * 33)
PRIVATE = "a private probe"
TEXT = "\n".join(["Hi", LONG, *(f"{PRIVATE} {number}" for number in range(6))])


def test_a_set_is_written_one_probe_a_line() -> None:
    found = probes.read(f"\n  \n{TEXT}\r\n\n".encode(), "set.txt")
    assert found.prompts == tuple(TEXT.split("\n"))
    assert found.digest == hashlib.sha256(probes.content(found.prompts)).hexdigest()
    assert found == probes.parse(probes.content(found.prompts), "file")


def test_a_line_in_quotation_marks_can_hold_anything() -> None:
    odd = ["two\nlines ", '"quoted"', "trailing ", "é\u2028"]
    text = "\n".join([TEXT, *(json.dumps(prompt) for prompt in odd)])
    assert probes.read(text.encode(), "set.txt").prompts[-4:] == tuple(odd)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), max_size=20))
def test_what_is_shown_is_read_again(odd: list[str]) -> None:
    wanted = tuple(dict.fromkeys(prompt for prompt in [*TEXT.split("\n"), *odd] if prompt.strip()))
    shown = "\n".join(probes.line(prompt) for prompt in wanted)
    assert probes.read(shown.encode(), "set.txt").prompts == wanted


def test_the_shipped_prompts_are_the_shipped_set() -> None:
    """So that somebody can return to them."""
    shipped = probes.default()
    assert probes.read("\n".join(shipped.prompts).encode(), "set.txt") == shipped


def test_every_bad_line_is_said_by_its_number_and_none_is_quoted() -> None:
    lines = ["Hi", LONG, PRIVATE * PROMPT_MAX_CHARS, '"no end', '" "', '"\\ud800"', '"ok"', '"a" "b"']
    with pytest.raises(ProbesInvalid) as caught:
        probes.read("\n".join(lines).encode(), "set.txt")
    assert str(caught.value).splitlines() == [
        f"set.txt:3: {len(PRIVATE) * PROMPT_MAX_CHARS} characters, at most {PROMPT_MAX_CHARS}",
        "set.txt:4: begins with a quotation mark and is no JSON string",
        "set.txt:5: is blank",
        "set.txt:6: holds half a character",
        "set.txt:8: begins with a quotation mark and is no JSON string",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT.encode() + b"\n\xff", "not UTF-8: byte"),
        (b"x\n" * 40_000, "larger than"),
        ("\n".join(TEXT.split("\n")[: PROMPTS_MIN - 1]).encode(), "7 probes, 8 to 64 are a set"),
        ("\n".join([TEXT, *map(str, range(PROMPTS_MAX))]).encode(), "72 probes, 8 to 64"),
        (f"{TEXT}\nHi".encode(), "twice"),
        (TEXT.replace("Hi", "Good morning").encode(), "at most 7 bytes"),
        (TEXT.replace(LONG, "short").encode(), "at least 33 words"),
        (b"", "0 probes"),
    ],
    ids=["bytes", "large", "few", "many", "twice", "no short one", "no long one", "empty"],
)
def test_what_is_no_set_is_refused_without_being_quoted(text: bytes, why: str) -> None:
    with pytest.raises(ProbesInvalid, match=why) as caught:
        probes.read(text, "set.txt")
    assert PRIVATE not in str(caught.value)


def test_a_set_is_kept_once_under_its_digest(tmp_path: Path) -> None:
    made = probes.read(TEXT.encode(), "set.txt")
    path = proof.keep_probes(tmp_path, made)
    assert path == f"store/probes/{made.digest}.json"
    assert proof.keep_probes(tmp_path, made) == path
    assert [file.name for file in (tmp_path / "store" / "probes").iterdir()] == [f"{made.digest}.json"]
    assert proof.load_probes(tmp_path, made.digest) == made


def test_without_a_digest_or_with_the_shipped_one_no_file_is_needed(tmp_path: Path) -> None:
    assert proof.load_probes(tmp_path, None) == proof.load_probes(tmp_path, probes.default().digest) == probes.default()


def test_a_set_that_is_missing_or_altered_is_not_used(tmp_path: Path) -> None:
    made = probes.read(TEXT.encode(), "set.txt")
    with pytest.raises(ProbesMissing):
        proof.load_probes(tmp_path, made.digest)
    file = tmp_path / proof.keep_probes(tmp_path, made)
    for content in (probes.content([*made.prompts, "More"]), b"{}", b" " * 70_000):
        file.unlink()
        file.write_bytes(content)
        with pytest.raises(ProbesAltered) as caught:
            proof.load_probes(tmp_path, made.digest)
        assert PRIVATE not in str(caught.value)
        with pytest.raises(ProbesAltered):
            proof.keep_probes(tmp_path, made)


def test_a_root_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"a file")
    with pytest.raises(ProbesUnwritable, match="cannot write"):
        proof.keep_probes(tmp_path, probes.read(TEXT.encode(), "set.txt"))
