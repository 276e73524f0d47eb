"""The layout hash: frozen values, every field counts, numbers are exact, and no two records share bytes."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kite_upcycle.geometry import Geometry, LayerKind, Rope
from kite_upcycle.layout import (
    Scalar,
    Serving,
    UnhashableLayout,
    differences,
    hash_of,
    layout_hash,
    record,
)

FULL = LayerKind("full", None, Rope(10_000.0, defaulted=False, scaling=""))
SLIDING = LayerKind("sliding", 512, Rope(500_000.0, defaulted=False, scaling="linear factor=8.0"))
LLAMA = Geometry(
    family="llama",
    layers=4,
    kinds=(FULL,) * 4,
    heads=32,
    kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    mla_ranks=None,
    hidden=4_096,
    q_out=4_096,
    k_out=1_024,
    v_out=1_024,
    qkv_bias=False,
    qk_norm=False,
    norm_eps=1e-5,
    norm_eps_field="rms_norm_eps",
)
MIXED = replace(LLAMA, layers=6, kinds=(SLIDING, SLIDING, FULL) * 2, mla_ranks=(512, 0))

CHANGED: dict[str, Geometry] = {
    "layers": replace(LLAMA, layers=5),
    "one layer more": replace(LLAMA, kinds=(FULL,) * 5),
    "another kind": replace(LLAMA, kinds=(FULL, FULL, FULL, SLIDING)),
    "another order": replace(LLAMA, kinds=(FULL, FULL, SLIDING, FULL)),
    "kind's name": replace(LLAMA, kinds=(replace(FULL, name="chunked"),) * 4),
    "window": replace(LLAMA, kinds=(replace(FULL, window=1),) * 4),
    "no rotary embedding": replace(LLAMA, kinds=(replace(FULL, rope=None),) * 4),
    "theta": replace(LLAMA, kinds=(replace(FULL, rope=Rope(10_001.0, defaulted=False, scaling="")),) * 4),
    "scaling": replace(LLAMA, kinds=(replace(FULL, rope=Rope(10_000.0, defaulted=False, scaling="yarn")),) * 4),
    **{
        name: replace(LLAMA, **{name: getattr(LLAMA, name) + 1})
        for name in ("heads", "kv_heads", "head_dim", "v_head_dim", "hidden", "q_out", "k_out", "v_out")
    },
    "MLA": replace(LLAMA, mla_ranks=(512, 1_536)),
    "MLA, its keys": replace(LLAMA, mla_ranks=(513, 1_536)),
    "MLA, its queries": replace(LLAMA, mla_ranks=(512, 1_537)),
    "bias": replace(LLAMA, qkv_bias=True),
    "norm": replace(LLAMA, qk_norm=True),
}
SERVED = (
    Serving(),
    Serving(kv_dtype="fp8"),
    Serving(block_size=16),
    Serving(kv_layout="HND"),
    Serving(tp=2),
    Serving(pp=2),
)


@pytest.mark.parametrize(
    ("geometry", "version", "expected"),
    [
        (LLAMA, 1, "5b5a7a3bba935016"),
        (LLAMA, 2, "290dfa2db9ec4e1a"),
        (MIXED, 1, "3dabada7c1b2e8ea"),
        (MIXED, 2, "6f405ef3f02e9e5f"),
    ],
)
def test_hashes_are_frozen(geometry: Geometry, version: int, expected: str) -> None:
    assert layout_hash(geometry, Serving(), version) == expected


def test_the_bytes_are_those_that_the_module_describes() -> None:
    def frame(raw: bytes) -> bytes:
        return len(raw).to_bytes(8, "big") + raw

    raw = frame(b"kite.kv_cache_layout") + struct.pack(">QQ", 2, 4)
    raw += frame(b"layers") + b"n" + frame(struct.pack(">d", 28))
    raw += frame(b"bias") + b"b" + frame(b"\1")
    raw += frame(b"dtype") + b"t" + frame(b"auto")
    raw += frame(b"window") + b"0" + frame(b"")
    fields = {"layers": 28, "bias": True, "dtype": "auto", "window": None}
    assert hash_of(fields, 2) == hashlib.blake2b(raw, digest_size=8).hexdigest()
    whole = raw.replace(struct.pack(">Q", 2), struct.pack(">Q", 1), 1).replace(
        struct.pack(">d", 28), (28).to_bytes(8, "big")
    )
    assert hash_of(fields, 1) == hashlib.blake2b(whole, digest_size=8).hexdigest()


@pytest.mark.parametrize("version", [1, 2])
def test_each_field_changes_the_hash_and_no_two_changes_give_the_same(version: int) -> None:
    hashes = {name: layout_hash(geometry, Serving(), version) for name, geometry in CHANGED.items()}
    hashes |= {str(serving): layout_hash(LLAMA, serving, version) for serving in SERVED}
    for (one, first), (other, second) in combinations(hashes.items(), 2):
        assert first != second, f"{one} and {other}"


def test_what_is_no_part_of_the_layout_does_not_change_the_hash() -> None:
    defaulted = replace(FULL, rope=Rope(10_000.0, defaulted=True, scaling=""))
    for same in (
        replace(LLAMA, norm_eps=1e-6, norm_eps_field="norm_eps", family="mistral"),
        replace(LLAMA, kinds=(defaulted,) * 4),
        replace(LLAMA, kinds=(defaulted, FULL, FULL, FULL)),
    ):
        assert layout_hash(same, Serving()) == layout_hash(LLAMA, Serving())


def test_an_integer_equals_the_same_float_and_nothing_else() -> None:
    assert hash_of({"theta": 10_000}, 2) == hash_of({"theta": 10_000.0}, 2)
    assert hash_of({"theta": 10_000}, 1) == hash_of({"theta": 10_000.0}, 1)
    different: Sequence[Scalar] = (10_000, 10_000.0001, "10000", "10000.0", True, 1, None, False, 0, "")
    assert len({hash_of({"theta": value}, 2) for value in different}) == len(different)


@pytest.mark.parametrize("value", [-0.0, float("nan"), float("inf"), -float("inf"), 2**53 + 1, 10**400])
@pytest.mark.parametrize("version", [1, 2])
def test_a_number_without_one_form_is_refused_by_name(value: float, version: int) -> None:
    with pytest.raises(UnhashableLayout, match="theta"):
        hash_of({"theta": value}, version)


def test_version_1_holds_whole_rotary_bases_only() -> None:
    with pytest.raises(UnhashableLayout, match=r"10000\.5"):
        hash_of({"theta": 10_000.5}, 1)


scalars = some.one_of(
    some.none(), some.booleans(), some.integers(-(2**53), 2**53), some.text(max_size=4), some.floats(0.5, 1e9)
)
records = some.dictionaries(some.text(max_size=3), scalars, max_size=4)


@given(one=records, other=records)
def test_records_share_a_hash_only_when_they_are_the_same(one: dict[str, Scalar], other: dict[str, Scalar]) -> None:
    def exact(fields: dict[str, Scalar]) -> list[tuple[str, bool, Scalar]]:
        return [(name, isinstance(value, bool), value) for name, value in fields.items()]

    assert (hash_of(one, 2) == hash_of(other, 2)) == (exact(one) == exact(other))


@given(name=some.text(), text=some.text(alphabet=some.characters()))
def test_any_text_can_be_hashed(name: str, text: str) -> None:
    assert len(hash_of({name: text}, 2)) == 16


def test_differences_are_named_theirs_first() -> None:
    theirs, ours = record(replace(LLAMA, layers=32, qkv_bias=True), Serving()), record(LLAMA, Serving(tp=2))
    assert differences(theirs, ours) == ["layers: 32 != 4", "qkv_bias: true != false", "tp: 1 != 2"]
    assert differences({"window": None}, {"window": 512, "tp": 1}) == ["window: none != 512", "tp: absent != 1"]
