"""`kv_cache_layout_hash`: 64 bits over everything that the layout of cached keys and values depends on.

A record is a flat list of named scalars in fixed order. Its hash is BLAKE2b-64 over, in this order: the frame of
`MAGIC`, the version as 8 bytes big-endian, the number of fields likewise, then of each field the frame of its name, one
byte for the type of its value, and the frame of the value. A frame is the length as 8 bytes big-endian, then the bytes:
no two records share bytes.

- Version 2 takes every number as the 8 bytes of a big-endian float64: 10000 and 10000.0 are equal, 10000.0001 is not.
- Version 1 takes whole numbers only, rotary base included, as 8 bytes of a big-endian integer. It is read by
  `kite adapter migrate`, and written by nobody.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from kite.errors import Fault, KiteError
from kite_upcycle.geometry import Geometry, LayerKind

Scalar: TypeAlias = bool | int | float | str | None
Record: TypeAlias = Mapping[str, Scalar]
"""Fields by name, in the order that is hashed."""

CURRENT_VERSION = 2
MAGIC = b"kite.kv_cache_layout"
HASH_BYTES = 8
LENGTH_BYTES = 8
INTEGER_BITS = 64


class UnhashableLayout(KiteError):
    """A value of the record has no one form in bytes: -0.0, NaN, infinity, or a number that the version cannot hold."""

    code: ClassVar[str] = "unhashable_layout"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, field: str, value: Scalar, version: int) -> None:
        super().__init__(
            f"{field} is {value!r}, which version {version} of the layout hash does not hold",
            hint="check this field in the config.json of the base",
        )
        self.field = field
        self.value = value
        self.version = version


@dataclass(frozen=True)
class Serving:
    """How servers hold the cache. The defaults are those of `kite up` and of vLLM.

    `kv_dtype` "auto" is the base's own dtype, `block_size` in tokens, `kv_layout` vLLM's order of the axes (NHD or
    HND); `tp` and `pp` are the sizes of tensor and pipeline parallelism.
    """

    kv_dtype: str = "auto"
    block_size: int = 32
    kv_layout: str = "NHD"
    tp: int = 1
    pp: int = 1


def layout_hash(geometry: Geometry, serving: Serving, version: int = CURRENT_VERSION) -> str:
    """Return the hash as 16 hex digits. Raises UnhashableLayout."""
    return hash_of(record(geometry, serving), version)


def record(geometry: Geometry, serving: Serving) -> dict[str, Scalar]:
    """Return what is hashed, by name, in order. Layers name their kind by its number, from 0 on as they first occur."""
    kinds = distinct(geometry)
    ranks = geometry.mla_ranks or (None, None)
    return {
        "layers": geometry.layers,
        "kinds": len(kinds),
        "kind_of_layers": ",".join(str(kinds.index(_plain(kind))) for kind in geometry.kinds),
        **{name: value for number, kind in enumerate(kinds) for name, value in _kind(number, kind)},
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "v_head_dim": geometry.v_head_dim,
        "kv_lora_rank": ranks[0],
        "q_lora_rank": ranks[1],
        "hidden": geometry.hidden,
        "q_out": geometry.q_out,
        "k_out": geometry.k_out,
        "v_out": geometry.v_out,
        "qkv_bias": geometry.qkv_bias,
        "qk_norm": geometry.qk_norm,
        "kv_dtype": serving.kv_dtype,
        "block_size": serving.block_size,
        "kv_layout": serving.kv_layout,
        "tp": serving.tp,
        "pp": serving.pp,
    }


def distinct(geometry: Geometry) -> tuple[LayerKind, ...]:
    """Return the kinds of layers in the order in which they first occur."""
    return tuple(dict.fromkeys(map(_plain, geometry.kinds)))


def _plain(kind: LayerKind) -> LayerKind:
    """Forget whether theta was a default: with it and without, the angles are the same."""
    return replace(kind, rope=replace(kind.rope, defaulted=False)) if kind.rope else kind


def _kind(number: int, kind: LayerKind) -> Iterator[tuple[str, Scalar]]:
    yield f"kind_{number}.name", kind.name
    yield f"kind_{number}.window", kind.window
    yield f"kind_{number}.rope_theta", kind.rope and kind.rope.theta
    yield f"kind_{number}.rope_scaling", kind.rope and kind.rope.scaling


def hash_of(fields: Record, version: int) -> str:
    """Return the hash of a record as 16 hex digits. Raises UnhashableLayout."""
    return hashlib.blake2b(_framed(fields, version), digest_size=HASH_BYTES).hexdigest()


def _framed(fields: Record, version: int) -> bytes:
    number = _NUMBERS[version]
    parts = [_frame(MAGIC), _length(version), _length(len(fields))]
    for name, value in fields.items():
        kind, raw = _typed(value, number)
        if raw is None:
            raise UnhashableLayout(name, value, version)
        parts += [_frame(_utf8(name)), kind, _frame(raw)]
    return b"".join(parts)


def _typed(value: Scalar, number: "Callable[[float], bytes | None]") -> tuple[bytes, bytes | None]:
    """Return the byte of a value's type, and the value in bytes; None when it has no form."""
    match value:
        case None:
            return b"0", b""
        case bool():
            return b"b", bytes([value])
        case str():
            return b"t", _utf8(value)
        case _:
            return b"n", number(value)


def _utf8(text: str) -> bytes:
    """Encode; half a surrogate pair, which JSON of strangers can hold, keeps its own bytes."""
    return text.encode("utf-8", "surrogatepass")


def _float64(value: float) -> bytes | None:
    """Return 8 bytes, big-endian; None for what is not finite, for -0.0, and for integers that would be rounded."""
    try:
        exact = float(value)
    except OverflowError:
        return None
    negative_zero = exact == 0 and math.copysign(1, exact) < 0
    return struct.pack(">d", exact) if math.isfinite(exact) and exact == value and not negative_zero else None


def _int64(value: float) -> bytes | None:
    """Return 8 bytes, big-endian; None for what is not whole."""
    whole = isinstance(value, int) or value.is_integer()
    fits = whole and abs(value) < 1 << (INTEGER_BITS - 1) and _float64(value) is not None
    return int(value).to_bytes(INTEGER_BITS // 8, "big", signed=True) if fits else None


_NUMBERS: "Mapping[int, Callable[[float], bytes | None]]" = {1: _int64, 2: _float64}
VERSIONS = tuple(sorted(_NUMBERS))


def _frame(raw: bytes) -> bytes:
    return _length(len(raw)) + raw


def _length(number: int) -> bytes:
    return number.to_bytes(LENGTH_BYTES, "big")


def differences(theirs: Record, ours: Record) -> list[str]:
    """Return each field in which two records differ, theirs first; a field that one lacks is "absent".

    >>> differences({"layers": 32, "heads": 8}, {"layers": 28, "heads": 8.0})
    ['layers: 32 != 28']
    """
    absent = "absent"
    names = dict.fromkeys([*theirs, *ours])
    pairs = ((name, theirs.get(name, absent), ours.get(name, absent)) for name in names)
    return [f"{name}: {_text(one)} != {_text(other)}" for name, one, other in pairs if not _same(one, other)]


def _same(one: Scalar, other: Scalar) -> bool:
    """Compare as the hash does: numbers by value, and a boolean is no number."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _text(value: Scalar) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case _:
            return str(value)
