"""Random files against the reader: it never raises, and takes nothing that safetensors itself would not load.

`pytest tests/upcycle/test_upcycle_fuzz.py --hypothesis-profile=fuzz` looks longer. A failure prints the example and how
to repeat it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kite.testing import zoo
from kite.testing.zoo import hostile
from kite_upcycle import lora, strict
from kite_upcycle.base import Base
from kite_upcycle.header import LENGTH_BYTES, MAX_ELEMENTS
from kite_upcycle.reader import CONFIG_NAME, SUPPORTED_DTYPES, TENSORS_NAME, examine
from kite_upcycle.verify import Limits, verify

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = Limits(max_lora_rank=16, params_share_max_ppm=10**6)
Loaded: TypeAlias = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Type, shape and bytes by name of tensor."""

fuzz = settings(
    max_examples=2 * settings().max_examples,  # about 5 s in all; the profile says otherwise
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.load(zoo.write_base(tmp_path_factory.mktemp("bases") / "tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose files each example overwrites."""
    return zoo.write_adapter(tmp_path_factory.mktemp("adapters") / "adapter")


SMALL = zoo.Shape(layers=1, hidden=4, heads=2, kv_heads=1, intermediate=4, vocabulary=4)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The tensors of a sound adapter, most of them header."""
    path = zoo.write_adapter(tmp_path_factory.mktemp("good") / "small", SMALL, rank=1, targets=["q_proj", "v_proj"])
    return (path / TENSORS_NAME).read_bytes()


def taken(raw: bytes, folder: Path) -> Loaded | None:
    """Return what our reader loads from a file that it takes; None when it refuses it.

    Tensors of another type are not loaded: verify refuses them by name.
    """
    (folder / TENSORS_NAME).write_bytes(raw)
    with examine(folder) as findings:
        if findings.violations or findings.tensors is None:
            assert findings.violations
            return None
        entries = findings.tensors.entries.values()
        if any(entry.dtype not in SUPPORTED_DTYPES for entry in entries):
            return None
        return {entry.name: told(findings.tensors.load(entry.name)) for entry in entries}


def told(tensor: "Tensor") -> tuple[str, tuple[int, ...], bytes]:
    import torch

    return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def compare(raw: bytes, folder: Path) -> None:
    """Let safetensors load what we take; it raises when it would not."""
    from safetensors.torch import load

    ours = taken(raw, folder)
    assert ours is None or ours == {name: told(tensor) for name, tensor in load(raw).items()}


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(LENGTH_BYTES, "little") + header + data


# ------------------------------------------------------------------------------------------------------- arbitrary


@fuzz
@given(raw=st.binary(max_size=200) | st.builds(framed, st.binary(max_size=100), st.binary(max_size=20)))
def test_arbitrary_bytes_are_no_tensors(raw: bytes, folder: Path) -> None:
    compare(raw, folder)


NUMBERS = st.integers(-2, 8) | st.sampled_from([2**31, 2**53 + 1, MAX_ELEMENTS + 1, 2**63, 2**64, 10**40])
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "BF16", "X1"])
)
ANYTHING: st.SearchStrategy[object] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "X1"]) | LEAVES,
        "shape": st.lists(NUMBERS, max_size=3) | ANYTHING,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | ANYTHING,
    },
    optional={"more": LEAVES},
)
HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "c.d", hostile.METADATA]) | st.text(max_size=4), ENTRIES | ANYTHING, max_size=4
)


@fuzz
@given(header=HEADERS, data=st.binary(max_size=16), ascii_only=st.booleans())
@example(header={hostile.METADATA: {"format": 1}}, data=b"", ascii_only=True)
@example(header={"a": {"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}, data=b"", ascii_only=True)
@example(header={"a": {"dtype": "F32", "shape": [0], "data_offsets": [False, 0]}}, data=b"", ascii_only=True)
@example(header={hostile.METADATA: {"a": "\ud800"}}, data=b"", ascii_only=True)
def test_arbitrary_headers_are_taken_only_where_safetensors_takes_them(
    header: dict[str, object], data: bytes, ascii_only: bool, folder: Path
) -> None:
    raw = json.dumps(header, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    compare(framed(raw, data), folder)


# -------------------------------------------------------------------------------------------------------- mutations

Mutation: TypeAlias = Callable[[bytes], bytes]
PIECES = st.binary(min_size=1, max_size=8) | st.sampled_from(
    [b",", b":", b"[0,0]", b'"a":{}', b"{}", b"[", b"]", b"-", b"0", b"1e3", b"true", b"null", b" ", b"\n", b"\xff"]
)


@st.composite
def mutations(draw: st.DrawFn) -> Mutation:
    """Flip, cut, insert, repeat or swap, at a place that is counted from either end of the header or of the file."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "digit"]))
    place, length = draw(st.integers(0, 700)), draw(st.integers(1, 12))
    piece, bit = draw(PIECES), draw(st.integers(0, 7))

    def mutate(raw: bytes) -> bytes:
        start = place % (len(raw) + 1)
        stop = min(len(raw), start + length)
        match kind:
            case "flip":
                return raw[:start] + bytes(byte ^ 1 << bit for byte in raw[start : start + 1]) + raw[start + 1 :]
            case "cut":
                return raw[:start] + raw[stop:]
            case "insert":
                return raw[:start] + piece + raw[start:]
            case "repeat":
                return raw[:stop] + raw[start:]
            case _:
                return raw[:start].rstrip(b"0123456789") + str(place).encode() + raw[stop:]

    return mutate


@fuzz
@given(changes=st.lists(mutations(), min_size=1, max_size=3))
def test_a_mutated_file_is_taken_only_where_safetensors_takes_it(
    changes: list[Mutation], good: bytes, folder: Path
) -> None:
    raw = good
    for change in changes:
        raw = change(raw)
    compare(raw, folder)


@fuzz
@given(changes=st.lists(mutations(), min_size=1, max_size=3), padding=st.integers(0, 9))
def test_a_mutated_header_of_the_right_length_is_taken_only_where_safetensors_takes_it(
    changes: list[Mutation], padding: int, good: bytes, folder: Path
) -> None:
    length = int.from_bytes(good[:LENGTH_BYTES], "little")
    header, data = good[LENGTH_BYTES : LENGTH_BYTES + length], good[LENGTH_BYTES + length :]
    for change in changes:
        header = change(header)
    compare(framed(header + b" " * padding, data), folder)


@fuzz
@given(change=mutations(), text=st.binary(max_size=12))
def test_a_header_of_one_file_before_the_data_of_another_is_taken_only_where_safetensors_takes_it(
    change: Mutation, text: bytes, good: bytes, folder: Path
) -> None:
    length = int.from_bytes(good[:LENGTH_BYTES], "little")
    compare(good[: LENGTH_BYTES + length] + change(good[LENGTH_BYTES + length :]) + text, folder)


def test_the_good_file_is_taken_by_both(good: bytes, folder: Path) -> None:
    ours = taken(good, folder)
    assert ours is not None
    assert len(ours) == 4
    compare(good, folder)


# --------------------------------------------------------------------------------------------------- configurations

KNOWN = sorted({*zoo.peft_config(4, ["q_proj"]), *lora.UNSUPPORTED})
PATTERNS = st.text("abqv_proj.*+?()[]|^$\\0", max_size=12)
VALUES = ANYTHING | PATTERNS | st.lists(PATTERNS, max_size=3) | st.dictionaries(PATTERNS, NUMBERS | st.floats())


@fuzz
@given(fields=st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=8), VALUES, max_size=6))
def test_a_configuration_never_raises_and_is_sound_only_with_a_number_for_each_module(
    fields: dict[str, object],
) -> None:
    config = zoo.peft_config(4, ["q_proj"]) | fields
    try:
        parsed = strict.parse_object(json.dumps(config).encode())
    except ValueError:
        return  # NaN, infinity, half a character
    found, violations = lora.parse(parsed)
    assert found is not None or violations
    if found is not None:
        for module in ("model.layers.0.self_attn.q_proj", "a", "v.q.v.q.v.q"):
            assert found.rank_of(module) >= 1
            assert 0 < found.scale_of(module) < float("inf")
            assert found.aims_at(module) in (True, False)


@fuzz
@given(raw=st.binary(max_size=64) | ANYTHING.map(lambda value: json.dumps(value).encode()))
def test_verify_says_of_any_configuration_what_is_wrong(raw: bytes, folder: Path, base: Base, good: bytes) -> None:
    (folder / CONFIG_NAME).write_bytes(raw)
    (folder / TENSORS_NAME).write_bytes(good)
    assert not verify(folder, base, LIMITS).accepted
