"""Stamps that do not fit: each defect is one of an adapter that was stamped for the base, and is shown strictly."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from kite.testing.zoo.animal import Defect, placed
from kite.testing.zoo.hostile import METADATA, Header, edit_header

Texts: TypeAlias = dict[str, str]
PREFIX = "kite."
LAYOUT = "kite.kv_cache_layout"
LAYOUT_HASH = "kite.kv_cache_layout_hash"
NORM_EPS = "kite.norm_eps"
ROPE_THETA = "kite.rope_theta"
VERSION = "kite.stamp_version"
BASE = "kite.base"


def texts(header: Header) -> Texts:
    """Return the metadata of a header."""
    return cast("Texts", header.setdefault(METADATA, {}))


def _metadata(code: str, change: Callable[[Texts], object]) -> Defect:
    return placed(code, change=lambda folder: edit_header(folder, lambda header: change(texts(header))))


def _stamped(code: str, name: str, text: str) -> Defect:
    return _metadata(code, lambda found: found.update({name: text}))


def _without(name: str) -> Defect:
    return _metadata("stamp_field", lambda found: found.pop(name))


def _unstamp(found: Texts) -> None:
    for name in [name for name in found if name.startswith(PREFIX)]:
        del found[name]


def _relay(**changes: object) -> Callable[[Texts], None]:
    """Change the record of the KV cache, and hash it again: it is sound, and of other servers or another base."""

    def change(found: Texts) -> None:
        record = cast("dict[str, bool | float | str | None]", json.loads(found[LAYOUT]) | changes)
        found[LAYOUT] = json.dumps(record)
        found[LAYOUT_HASH] = layout_hash(record)

    return change


def layout_hash(record: Mapping[str, bool | float | str | None]) -> str:
    """Hash a record by the second version, written again from its description, so that a slip in one shows."""
    raw = _frame(b"kite.kv_cache_layout") + _long(2) + _long(len(record))
    for name, value in record.items():
        raw += _frame(name.encode()) + _value(value)
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def _value(value: bool | float | str | None) -> bytes:
    if value is None:
        return b"0" + _frame(b"")
    if isinstance(value, bool):
        return b"b" + _frame(bytes([value]))
    return b"t" + _frame(value.encode()) if isinstance(value, str) else b"n" + _frame(struct.pack(">d", value))


def _frame(raw: bytes) -> bytes:
    return _long(len(raw)) + raw


def _long(count: int) -> bytes:
    return struct.pack(">Q", count)


def _theta(theta: object) -> Callable[[Texts], None]:
    def change(found: Texts) -> None:
        kinds = cast("dict[str, object]", json.loads(found[ROPE_THETA]))
        found[ROPE_THETA] = json.dumps(dict.fromkeys(kinds, theta))

    return change


STAMPS: Mapping[str, Defect] = {
    "not_stamped": _metadata("stamp_missing", _unstamp),
    "stamp_of_the_future": _stamped("stamp_version", VERSION, "99"),
    "stamp_of_no_version": _stamped("stamp_version", VERSION, "two"),
    "stamp_without_version": _without(VERSION),
    "stamp_without_eps": _without(NORM_EPS),
    "stamp_without_layout": _without(LAYOUT),
    "eps_text": _stamped("stamp_field", NORM_EPS, '"1e-05"'),
    "eps_true": _stamped("stamp_field", NORM_EPS, "true"),
    "eps_nan": _stamped("stamp_field", NORM_EPS, "NaN"),
    "eps_overflow": _stamped("stamp_field", NORM_EPS, "1e999"),
    "eps_digits": _stamped("stamp_field", NORM_EPS, "9" * 10_000),
    "eps_nested": _stamped("stamp_field", NORM_EPS, "[" * 100_000),
    "theta_text": _metadata("stamp_field", _theta("10000")),
    "theta_true": _metadata("stamp_field", _theta(True)),
    "theta_negative": _metadata("stamp_field", _theta(-10_000)),
    "theta_infinity": _stamped("stamp_field", ROPE_THETA, '{"full": Infinity}'),
    "layout_altered": _stamped("stamp_field", LAYOUT, '{"layers": 3}'),
    "hash_capitals": _stamped("stamp_field", LAYOUT_HASH, "0123456789ABCDEF"),
    "other_blocks": _metadata("kv_cache_layout_hash", _relay(block_size=16)),
    "other_cache_dtype": _metadata("kv_cache_layout_hash", _relay(kv_dtype="fp8")),
    "other_heads": _metadata("kv_cache_layout_hash", _relay(kv_heads=4)),
    # The real case: 1e-05 kept as float32 by a trainer.
    "eps_as_float32": _stamped("norm_eps", NORM_EPS, "9.999999747378752e-06"),
    "theta_off_by_little": _metadata("rope_theta", _theta(10_000.0001)),
    "theta_of_no_rope": _metadata("rope_theta", _theta(None)),
    "other_base": _stamped("base_identity", BASE, "0" * 64),
}
"""The base is one of `write_base`, served as `kite up` does it."""
