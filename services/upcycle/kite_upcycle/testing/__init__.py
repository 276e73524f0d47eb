"""Stamps as earlier versions of kite wrote them, for tests of what became of them."""

from collections.abc import Mapping
from dataclasses import replace

from kite_upcycle import stamp
from kite_upcycle.layout import Scalar, hash_of


def older(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return stamped metadata as version 1 had it: whole rotary bases, and the hash of those.

    Raises UnhashableLayout for a rotary base that version 1 does not hold.
    """
    new, violations = stamp.parse(metadata)
    assert new is not None, violations  # noqa: S101 # for tests
    fields = {name: _whole(value) for name, value in new.layout.items()}
    old = replace(new, version=1, layout=fields, layout_hash=hash_of(fields, 1))
    return {**metadata, **old.metadata()}


def _whole(value: Scalar) -> Scalar:
    return int(value) if isinstance(value, float) and value.is_integer() else value
