"""Probe sets: the shipped one, and files that are none. No error quotes a prompt."""

import json
from pathlib import Path

import pytest

from kite import probes
from kite.probes import PROMPT_MAX_CHARS, PROMPTS_MAX, ProbesInvalid
from kite.testing import bases

LONG = " ".join(["word"] * 33)
PRIVATE = "private prompt "


def written(prompts: list[str], version: int = 1) -> bytes:
    return json.dumps({"version": version, "prompts": prompts}).encode()


def test_the_shipped_set_is_small_and_has_what_proofs_need() -> None:
    shipped = probes.default()
    assert len(shipped.prompts) == 17
    assert len(shipped.short) >= 4
    assert shipped.long == 16
    assert shipped == probes.default()


def test_bounds_in_bytes_and_words_bound_tokens(tiny_base: Path) -> None:
    """Held against a tokenizer of one token a byte, the most there can be, and against a real one if it is there."""
    from tokenizers import Tokenizer

    shipped = probes.default()
    real = bases.cache() / "smollm2-135m-instruct"
    for base in filter(Path.exists, (tiny_base, real)):
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        counts = [len(tokenizer.encode(prompt).ids) for prompt in shipped.prompts]
        assert all(counts[index] <= 8 for index in shipped.short)
        assert counts[shipped.long] > 32


def test_a_set_is_known_by_its_bytes() -> None:
    one = probes.parse(written(["Hi", LONG]), "one")
    other = probes.parse(written(["Ho", LONG]), "other")
    assert one.prompts == ("Hi", LONG)
    assert one.digest != other.digest
    assert one == probes.parse(written(["Hi", LONG]), "again")


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        ([PRIVATE, LONG], "at most 7 bytes"),
        (["Hi", PRIVATE], "at least 33 words"),
        (["Hi", "Hi", LONG], "twice"),
        (["Hi", LONG, " "], "prompts.2"),
        (["Hi", LONG, PRIVATE * PROMPT_MAX_CHARS], "prompts.2"),
        (["Hi", LONG, *(PRIVATE + str(n) for n in range(PROMPTS_MAX))], "at most 64"),
        ([], "at most 7 bytes"),
    ],
)
def test_what_is_no_use_is_refused_without_being_quoted(prompts: list[str], why: str) -> None:
    with pytest.raises(ProbesInvalid, match=why) as caught:
        probes.parse(written(prompts), "bad")
    assert PRIVATE.strip() not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("content", "why"),
    [(written(["Hi", LONG], version=2), "version"), (b"Hi", "no probe set"), (b" " * 70_000, "larger than")],
    ids=["later version", "no JSON", "too large"],
)
def test_another_format_or_none_at_all_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(ProbesInvalid, match=why):
        probes.parse(content, "file")
