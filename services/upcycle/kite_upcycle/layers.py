"""The kinds of layers of a base, one a layer: what each one sees, and how it is told positions."""

from collections.abc import Sequence
from dataclasses import dataclass

from kite_upcycle.families import LATER_LAYERS, Family
from kite_upcycle.fields import COUNT_MAX, Fields
from kite_upcycle.rope import Rope, rope_of

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_WINDOWS = {_SLIDING: "sliding_window", _CHUNKED: "attention_chunk_size"}
_ATTENTION = "_attention"


@dataclass(frozen=True)
class LayerKind:
    """What the cached keys and values of one layer depend on.

    `name`: "full", "sliding", "chunked", "mla", or what else the configuration calls it. `window`: tokens. `rope`: None
    where positions are learned, come from ALiBi, or are not told at all.
    """

    name: str
    window: int | None
    rope: Rope | None


def kinds_of(fields: Fields, family: Family, layers: int, rotated_dim: int) -> tuple[LayerKind, ...]:
    """Return the kind of each layer. `rotated_dim` above 0 makes it MLA. Raises UnreadableBase."""
    rotated = _rotated(fields, family, layers)
    types = _types(fields, family, layers, rotated)
    known = {
        (kind, turns): _kind(fields, family, kind, rotated_dim, turns=turns)
        for kind, turns in set(zip(types, rotated, strict=True))
    }
    return tuple(known[pair] for pair in zip(types, rotated, strict=True))


def _kind(fields: Fields, family: Family, layer_type: str, rotated_dim: int, *, turns: bool) -> LayerKind:
    name = layer_type.removesuffix(_ATTENTION)
    if layer_type not in {_FULL, *_WINDOWS}:
        return LayerKind(name, None, None)  # no attention as we know it: linear, mamba
    rope = rope_of(fields, family, layer_type, rotated_dim) if turns else None
    if layer_type == _FULL:
        return LayerKind("mla" if rotated_dim else name, None, rope)
    return LayerKind(name, fields.count(_WINDOWS[layer_type], default=family.window), rope)


def _rotated(fields: Fields, family: Family, layers: int) -> Sequence[bool]:
    """Say of each layer whether it is rotated: `no_rope_layers` lists 1 where it is (sic), or each n-th is not."""
    listed = fields.items("no_rope_layers")
    if listed:
        if len(listed) != layers or any(item not in (0, 1) for item in listed):
            raise fields.refusal("no_rope_layers", f"must be {layers} times 0 or 1")
        return [item == 1 for item in listed]
    every = fields.count("no_rope_layer_interval", default=family.unrotated_every or COUNT_MAX)
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _types(fields: Fields, family: Family, layers: int, rotated: Sequence[bool]) -> Sequence[str]:
    listed = fields.items("layer_types")
    if listed is not None:
        names = [item for item in listed if isinstance(item, str)]
        if len(listed) != layers or len(names) != layers:
            raise fields.refusal("layer_types", f"must be {layers} names, one a layer")
        return names
    if family.unrotated_every:
        return [_CHUNKED if turns else _FULL for turns in rotated]
    if _window(fields, family) is None:
        return [_FULL] * layers
    return [_FULL if full else _SLIDING for full in _full(fields, family, layers)]


def _window(fields: Fields, family: Family) -> int | None:
    """Return the window in tokens, None where there is none or it is switched off."""
    if not fields.flag("use_sliding_window", default=not family.late_window):
        return None
    if "sliding_window" not in fields.config:
        return family.window
    return fields.count("sliding_window") if fields.name("sliding_window") else None


def _full(fields: Fields, family: Family, layers: int) -> Sequence[bool]:
    """Say of each layer whether it sees everything, although there is a window."""
    if family.late_window:
        first = _later(fields)
        return [layer < first for layer in range(layers)]
    pattern = ("sliding_window_pattern", "_sliding_window_pattern")
    if fields.name(*pattern) or family.full_every:
        every = fields.count(*pattern, default=family.full_every)
        return [(layer + 1) % every == 0 for layer in range(layers)]
    return [False] * layers


def _later(fields: Fields) -> int:
    """Return the first layer with a window; 0 is all of them."""
    first = fields.number("max_window_layers", default=LATER_LAYERS)
    if first != int(first) or first < 0:
        raise fields.refusal("max_window_layers", f"must be a whole number from 0 on, is {first}")
    return int(first)
