"""What an adapter's attention must agree on with its base: heads, rotary embedding and norms, from config.json.

Sources are the fields' meaning in transformers 5; docs/adr/0021 says what is read, defaulted and refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kite_upcycle.families import FAMILIES, SAME, Family, family_of
from kite_upcycle.fields import LAYERS_MAX, Fields, UnreadableBase
from kite_upcycle.layers import LayerKind, kinds_of
from kite_upcycle.rope import Rope
from kite_upcycle.strict import JSON

__all__ = ["Geometry", "LayerKind", "Rope", "UnreadableBase", "geometry"]

# Where a multimodal configuration keeps that of its language model.
_TEXT_NAMES = ("text_config", "language_config", "llm_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "kv_channels")
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layernorm_epsilon")
_BIAS = ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias")
_QK_NORM = ("use_qk_norm", "qk_layernorm", "qk_norm")


@dataclass(frozen=True)
class Geometry:
    """The attention of a base.

    `family`: its `model_type`. `kinds`: one a layer, in order. `head_dim`: features of a query and of a key, with MLA
    the rotated and the other part; `v_head_dim`: of a value. `mla_ranks`: of keys and values, and of queries (0 where
    those are not factored); None without MLA. `q_out`, `k_out`, `v_out`: features of all heads together, with MLA after
    expansion. `norm_eps_field`: where eps stands, empty if it is the family's. `known`: whether the family is one
    whose defaults we know; others are read by the general names. `defaulted`: fields that were left out, for which the
    family has a fixed value.
    """

    family: str
    layers: int
    kinds: tuple[LayerKind, ...]
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    mla_ranks: tuple[int, int] | None
    hidden: int
    q_out: int
    k_out: int
    v_out: int
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    norm_eps_field: str
    known: bool = True
    defaulted: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Heads:
    """Head sizes in features. `rotated_dim`: what MLA rotates of a key, else 0."""

    query: int
    value: int
    ranks: tuple[int, int] | None = None
    rotated_dim: int = 0


def geometry(config: Mapping[str, JSON], path: Path = Path()) -> Geometry:
    """Read the geometry from a config.json of the folder `path`. Raises UnreadableBase, which names the field."""
    top = Fields(config, path)
    fields = language(top)
    name = _family_name(top, fields)
    family = family_of(name)
    layers, hidden, heads = _sizes(fields, family)
    kv_heads = _kv_heads(fields, family, heads)
    sizes = _heads(fields, family, hidden, heads)
    eps, eps_field = _eps(fields, family)
    return Geometry(
        family=name,
        layers=layers,
        kinds=kinds_of(fields, family, layers, sizes.rotated_dim),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=sizes.query,
        v_head_dim=sizes.value,
        mla_ranks=sizes.ranks,
        hidden=hidden,
        q_out=heads * sizes.query,
        k_out=kv_heads * sizes.query,
        v_out=kv_heads * sizes.value,
        qkv_bias=_switch(fields, family.qkv_bias, _BIAS if _is_unknown(name) else ()),
        qk_norm=_switch(fields, family.qk_norm, _QK_NORM if _is_unknown(name) else ()),
        norm_eps=eps,
        norm_eps_field=eps_field,
        known=not _is_unknown(name),
        defaulted=_defaulted(fields, family),
    )


def language(top: Fields) -> Fields:
    """Return the language model's part of a configuration: a nested object, or the whole of it."""
    nested = (top.object(name) for name in _TEXT_NAMES)
    return next((found for found in nested if found is not None), top)


def _family_name(top: Fields, fields: Fields) -> str:
    """Return the model type; a nested part without one is of the family that the outer type brings."""
    outer = top.text("model_type")
    return fields.text("model_type") or (outer and SAME.get(outer, outer)) or "unknown"


def _is_unknown(name: str) -> bool:
    return SAME.get(name, name) not in FAMILIES


def _sizes(fields: Fields, family: Family) -> tuple[int, int, int]:
    """Return layers, hidden size and heads; only a nested part may leave them out."""
    layers, hidden, heads = family.sizes if family.sizes and fields.inside else (None, None, None)
    return (
        fields.count(*_LAYERS, default=layers, most=LAYERS_MAX),
        fields.count(*_HIDDEN, default=hidden),
        fields.count(*_HEADS, default=heads),
    )


def _kv_heads(fields: Fields, family: Family, heads: int) -> int:
    """Return the heads of keys and values: one for multi-query, unless grouped in the newer Falcon's way."""
    shared = fields.flag("multi_query", default=family.multi_query)
    if shared and not fields.flag("new_decoder_architecture", default=family.grouped):
        return 1
    silent = family.kv_heads if not any(name in fields.config for name in _KV_HEADS) else None
    kv_heads = fields.count(*_KV_HEADS, default=silent or heads)
    if heads % kv_heads:
        raise fields.refusal(
            fields.name(*_KV_HEADS) or _KV_HEADS[0], f"is {kv_heads}, which does not divide {heads} heads"
        )
    return kv_heads


def _heads(fields: Fields, family: Family, hidden: int, heads: int) -> _Heads:
    if _is_mla(fields, family):
        return _mla(fields)
    query = _head_dim(fields, family, hidden, heads)
    return _Heads(query, fields.count("v_head_dim", default=query))


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    given = fields.name(*_HEAD_DIM)
    if given is None and family.head_dim is not None:
        return family.head_dim
    if given is None and hidden % heads:
        raise fields.refusal(_HEAD_DIM[0], f"is missing, and hidden size {hidden} is not a multiple of {heads} heads")
    head_dim = fields.count(*_HEAD_DIM, default=hidden // heads)
    if family.head_dim_derived and head_dim * heads != hidden:
        raise fields.refusal(given or _HEAD_DIM[0], f"is {head_dim}, but hidden size {hidden} has {heads} heads")
    return head_dim


def _is_mla(fields: Fields, family: Family) -> bool:
    """Say whether keys and values are cached as one latent vector: DeepSeek's multi-head latent attention."""
    if family.mla and "kv_lora_rank" not in fields.config:
        raise fields.refusal("kv_lora_rank", "is missing (null if keys and values are not factored)")
    return fields.name("kv_lora_rank") is not None and fields.flag("use_mla", default=True)


def _mla(fields: Fields) -> _Heads:
    plain, rotated = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    if "q_lora_rank" not in fields.config:
        raise fields.refusal("q_lora_rank", "is missing (null if queries are not factored)")
    whole = fields.count("qk_head_dim", default=plain + rotated)
    head_dim = fields.count("head_dim", default=rotated)
    if whole != plain + rotated:
        raise fields.refusal("qk_head_dim", f"is {whole}, but its parts are {plain} and {rotated}")
    if head_dim not in {rotated, whole}:
        raise fields.refusal("head_dim", f"is {head_dim}, but a head is {plain} + {rotated}")
    queries = fields.count("q_lora_rank") if fields.name("q_lora_rank") else 0
    return _Heads(whole, fields.count("v_head_dim"), (fields.count("kv_lora_rank"), queries), rotated)


def _switch(fields: Fields, known: tuple[str | None, bool], general: tuple[str, ...]) -> bool:
    """Return what the family fixes, what its field says, or what any of the general names says."""
    name, default = known
    names = general or ((name,) if name else ())
    return fields.flag(*names, default=default) if names else default


def _eps(fields: Fields, family: Family) -> tuple[float, str]:
    """Return eps and its field: the family's own, else any alias, else the family's value and no field."""
    own, value = family.eps
    names = (own,) if fields.name(own) and value is not None else _EPS
    return fields.positive(*names, default=value), fields.name(*names) or ""


def _defaulted(fields: Fields, family: Family) -> tuple[str, ...]:
    """Name what was left out and is fixed by the family."""
    sizes = family.sizes or (None, None, None)
    fixed: list[tuple[tuple[str, ...], float | None]] = [
        *zip((_LAYERS, _HIDDEN, _HEADS), sizes, strict=True),
        (_KV_HEADS, None if any(name in fields.config for name in _KV_HEADS) else family.kv_heads),
        (_HEAD_DIM, family.head_dim),
        (_EPS, family.eps[1]),
    ]
    return tuple(names[0] for names, value in fixed if value is not None and fields.name(*names) is None)
