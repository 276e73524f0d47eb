"""JSON without its traps: duplicate keys, NaN and infinities, other encodings, half characters, depth bombs."""

import json
import math
from typing import TypeAlias, cast

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


def parse(raw: bytes) -> JSON:
    """Parse UTF-8 JSON.

    Raises ValueError, with the reason, for anything that two parsers could read in two ways.
    """
    try:
        text = raw.decode("utf-8")
        parsed = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite)
        if b"\\u" in raw:
            json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate pair is no text: this raises ValueError
        return cast("JSON", parsed)
    except RecursionError:
        msg = "nested too deeply"
        raise ValueError(msg) from None


def parse_object(raw: bytes) -> dict[str, JSON]:
    """Parse UTF-8 JSON whose top is an object; raises ValueError otherwise."""
    value = parse(raw)
    if isinstance(value, dict):
        return value
    msg = f"an object is needed, got {type(value).__name__}"
    raise ValueError(msg)


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    msg = "duplicate key"
    raise ValueError(msg)


def _constant(name: str) -> float:
    msg = f"{name} is not JSON"
    raise ValueError(msg)


def _finite(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        return value
    msg = f"number {text[:32]} is out of range"
    raise ValueError(msg)
