"""The rotary embedding of each kind of layer, from the three layouts in use: flat, nested, nested per layer type.

transformers 5 moved `rope_theta` and `rope_scaling` into `rope_parameters`; one model written by either version must
read the same, so the rules by which version 5 converts are followed here (`modeling_rope_utils.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from kite_upcycle.families import Family
from kite_upcycle.fields import Fields, finite
from kite_upcycle.strict import JSON

NESTED = "rope_parameters"
FLAT = "rope_scaling"
THETA = "rope_theta"
PARTIAL = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
# Fields beside the nested object that turn the angles too.
_BESIDE = ("rotary_dim", "rope_ratio", "rope_interleave")
# What says only that nothing is special; mrope is told by its sections.
_NEUTRAL: Mapping[str, tuple[JSON, ...]] = {
    "rope_type": ("default", "mrope"),
    PARTIAL: (1.0,),
    "rope_interleave": (True,),
}
# Kinds of scaling that count from the length which the base was trained with.
_FROM_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})
_NUMBERS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        ORIGINAL,
        PARTIAL,
        "rope_ratio",
        "rotary_dim",
    }
)
_WORDS = frozenset({"rope_type", "type"})


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one kind of layer.

    `defaulted`: config.json does not say theta, so it is the family's. `scaling`: canonical text of all else that turns
    the angles (kind and factors of scaling, the rotated part of a head); empty if there is nothing.
    """

    theta: float
    defaulted: bool
    scaling: str


def rope_of(fields: Fields, family: Family, layer_type: str, rotated_dim: int = 0) -> Rope | None:
    """Read the embedding of a layer type ("sliding_attention"), None if it has none.

    `rotated_dim`: features that MLA rotates apart from the others. Raises UnreadableBase, which names the field.
    """
    if family.theta is None or _positions(fields) or _without(fields, layer_type):
        return None
    local = layer_type == "sliding_attention" and family.local_theta is not None
    nested = _nested(fields, family, layer_type, local=local)
    fallback = family.local_theta if local else family.theta
    flat = ("rope_local_base_freq",) if local else (THETA, "rotary_emb_base")
    source, names = (nested, (THETA,)) if nested.name(THETA) else (fields, flat)
    return Rope(
        theta=source.positive(*names, default=fallback),
        defaulted=source.name(*names) is None,
        scaling=_scaling(fields, nested, family, rotated_dim),
    )


def _positions(fields: Fields) -> bool:
    """Say whether positions are given in another way than by rotation: ALiBi, or learned vectors."""
    return fields.flag("alibi") or fields.text("position_embedding_type") in {"absolute", "alibi", "learned", "nope"}


def _without(fields: Fields, layer_type: str) -> bool:
    """Say whether the nested object has an entry for the layer type, and that it is null."""
    outer = fields.object(NESTED)
    return outer is not None and layer_type in outer.config and outer.config[layer_type] is None


def _nested(fields: Fields, family: Family, layer_type: str, *, local: bool) -> Fields:
    """Return the object that holds for the layer type, an empty one if there is none."""
    new, old = fields.object(NESTED), fields.object(FLAT)
    if new is not None and old is not None and new.config and old.config and new.config != old.config:
        raise fields.refusal(FLAT, f"and {NESTED} are both given, and differ")
    found = new if new is not None and new.config else old
    if found is None or (local and found is old):  # Gemma 3: scaling in the old layout is for full attention
        return Fields({}, fields.path, fields.inside)
    if any(isinstance(value, dict) for name, value in found.config.items() if name != THETA):
        inner = found.object(layer_type)
        if inner is None and family.local_theta is None:
            raise found.refusal(layer_type, "is missing")
        return inner or Fields({}, fields.path, f"{found.inside}{layer_type}.")
    return found


def _scaling(fields: Fields, nested: Fields, family: Family, rotated_dim: int) -> str:
    """Write what is neither theta nor neutral as JSON with sorted keys, all numbers as float64."""
    further = {name: _checked(fields, name) for name in _BESIDE} | {
        name: _checked(nested, name) for name in nested.config if name not in {THETA, "type"}
    }
    further["rope_type"] = _kind(nested)
    further[PARTIAL] = _share(fields, nested, family)
    if further["rope_type"] in _FROM_ORIGINAL:
        further[ORIGINAL] = _original(fields, nested)
    if rotated_dim:
        further["qk_rope_head_dim"] = float(rotated_dim)
    kept = {name: value for name, value in further.items() if value is not None and not _is_neutral(name, value)}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")) if kept else ""


def _is_neutral(name: str, value: JSON) -> bool:
    return value in _NEUTRAL.get(name, ())


def _kind(nested: Fields) -> str | None:
    """Name the kind of scaling; Phi-3 calls longrope "su", and in its first configurations "yarn"."""
    kind = nested.text("rope_type") or nested.text("type")
    long = nested.name("short_factor") is not None and kind == "yarn"
    return "longrope" if kind == "su" or long else kind


def _share(fields: Fields, nested: Fields, family: Family) -> float:
    """Return the rotated share of a head: 1.0 is all of it."""
    if nested.name(PARTIAL):
        return nested.positive(PARTIAL)
    return fields.positive(PARTIAL, "rotary_pct", "rope_pct", default=family.rotated)


def _original(fields: Fields, nested: Fields) -> float | None:
    if fields.name(ORIGINAL) or not nested.name(ORIGINAL):
        names = (ORIGINAL,) if fields.name(ORIGINAL) else ("max_position_embeddings",)
        return fields.positive(*names) if fields.name(*names) else None
    return nested.positive(ORIGINAL)


def _checked(fields: Fields, name: str) -> JSON:
    """Return a field with its numbers as float64. Raises UnreadableBase for one that is no number where one must be."""
    value = fields.config.get(name)
    if value is None:
        return None
    if name in _NUMBERS and finite(value) is None:
        raise fields.refusal(name, f"is no finite number: {value!r}")
    if name in _WORDS:
        return fields.text(name)
    return _canonical(fields, name, value)


def _canonical(fields: Fields, name: str, value: JSON) -> JSON:
    if isinstance(value, list):
        return [_canonical(fields, name, item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    number = finite(value)
    if number is None or number < 0:
        raise fields.refusal(name, f"must hold finite numbers from 0 on, holds {value!r}")
    return number
