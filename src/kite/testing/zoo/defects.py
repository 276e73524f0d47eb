"""Adapters whose files are sound and whose content breaks the contract; each works on any adapter of attention.

vLLM loads most of them with 200 OK.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from kite.testing.adapters import Json, Tensors
from kite.testing.llama import PEFT_PREFIX
from kite.testing.zoo.animal import MAX_LORA_RANK, Defect, edited

if TYPE_CHECKING:
    from torch import Tensor

REPORT_MAX = 1_000  # violations that a report lists; one more of them, and the report says so
MAX_RANK = 4_096
DEEP = "layers.400."


def _first(tensors: Tensors, ending: str) -> str:
    return min(name for name in tensors if name.endswith(ending))


def _module(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).rsplit(".lora_", 1)[0]


# ------------------------------------------------------------------------------------------------------ kinds of edits


def _rename(old: str, new: str) -> Callable[[Tensors, Json], None]:
    def change(tensors: Tensors, _: Json) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return change


def _drop_first(ending: str) -> Callable[[Tensors, Json], None]:
    def change(tensors: Tensors, _: Json) -> None:
        del tensors[_first(tensors, ending)]

    return change


def _alter(ending: str, to: "Callable[[Tensor], Tensor]") -> Callable[[Tensors, Json], None]:
    def change(tensors: Tensors, _: Json) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            tensors[name] = to(tensors[name])

    return change


def _alter_first(ending: str, to: "Callable[[Tensor], Tensor]") -> Callable[[Tensors, Json], None]:
    def change(tensors: Tensors, _: Json) -> None:
        name = _first(tensors, ending)
        tensors[name] = to(tensors[name])

    return change


def _poke(value: float) -> "Callable[[Tensor], Tensor]":
    def change(tensor: "Tensor") -> "Tensor":
        poked = tensor.clone()
        poked.view(-1)[0] = value
        return poked

    return change


def _add(name: str, *sizes: int) -> Callable[[Tensors, Json], None]:
    def change(tensors: Tensors, _: Json) -> None:
        import torch

        tensors[name] = torch.ones(sizes)

    return change


def _set(**fields: object) -> Callable[[Tensors, Json], None]:
    return lambda _, config: config.update(fields)


def _unset(name: str) -> Callable[[Tensors, Json], None]:
    def change(_: Tensors, config: Json) -> None:
        del config[name]

    return change


# ----------------------------------------------------------------------------------------------------- single defects


def _int8(tensor: "Tensor") -> "Tensor":
    """Round to 8-bit integers, without a scale."""
    import torch

    return (tensor * 64).round().clamp(-127, 127).to(torch.int8)


def _float8(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.to(torch.float8_e4m3fn)


def _magnitudes(tensors: Tensors, _: Json) -> None:
    """Give each output a magnitude, as DoRA has."""
    import torch

    for name, tensor in [item for item in tensors.items() if item[0].endswith(".lora_B.weight")]:
        magnitude = name.replace(".lora_B.weight", ".lora_magnitude_vector")
        tensors[magnitude] = torch.ones(tensor.shape[0], dtype=tensor.dtype)


def _dora(tensors: Tensors, config: Json) -> None:
    _magnitudes(tensors, config)
    config["use_dora"] = True


def _rank_lies(_: Tensors, config: Json) -> None:
    """Promise twice the rank of the tensors: vLLM serves the change at half its strength."""
    config["r"] = 2 * cast("int", config["r"])


def _pattern_lies(tensors: Tensors, config: Json) -> None:
    config["rank_pattern"] = {_module(_first(tensors, ".lora_A.weight")): 3}


def _ranks_differ(tensors: Tensors, config: Json) -> None:
    """Cut a rank off B of one module, so that B·A cannot be multiplied."""
    _alter_first(".lora_B.weight", lambda tensor: tensor[:, :-1])(tensors, config)


def _no_rank(tensors: Tensors, _: Json) -> None:
    """Leave one module without a rank: both of its tensors are empty, which any parser lets through."""
    for ending, axis in ((".lora_A.weight", 0), (".lora_B.weight", 1)):
        name = _first(tensors, ending)
        tensors[name] = tensors[name].narrow(axis, 0, 0)


def _rank_above(tensors: Tensors, config: Json) -> None:
    """Raise the rank of one module above what servers take, and nearly nothing else."""
    rank = MAX_LORA_RANK + 1
    for ending, axis in ((".lora_A.weight", 0), (".lora_B.weight", 1)):
        name = _first(tensors, ending)
        tensors[name] = tensors[name].repeat_interleave(rank, axis).narrow(axis, 0, rank)
    config["rank_pattern"] = {_module(_first(tensors, ".lora_A.weight")): rank}


def _too_large(tensors: Tensors, config: Json) -> None:
    """Say the same with four times the parameters: from rank 4 on, that is over 0.8 % of our bases."""
    factor = 4
    for name, tensor in tensors.items():
        tensors[name] = tensor.repeat(factor, 1) if ".lora_A." in name else tensor.repeat(1, factor) / factor
    config |= {name: factor * cast("int", config[name]) for name in ("r", "lora_alpha")}


def _half_lost(tensors: Tensors, config: Json) -> None:
    lost = max(cast("list[str]", config["target_modules"]))
    for name in [name for name in tensors if f".{lost}." in name]:
        del tensors[name]


def _outside_targets(_: Tensors, config: Json) -> None:
    config["target_modules"] = sorted(cast("list[str]", config["target_modules"]))[:-1]


def _empty(tensors: Tensors, _: Json) -> None:
    tensors.clear()


def _crowd(tensors: Tensors, _: Json) -> None:
    import torch

    tensors |= {f"stranger.{number}": torch.ones(1).bfloat16() for number in range(REPORT_MAX + 1)}


# ------------------------------------------------------------------------------------------------------------ the zoo

NAMES: Mapping[str, Defect] = {
    "wrong_prefix": edited("unknown_module", change=_rename("model.layers.", "model.decoder.layers.")),
    "doubled_prefix": edited("unknown_module", change=_rename(PEFT_PREFIX, f"{PEFT_PREFIX}model.")),
    "no_prefix": edited("key_pattern", change=_rename(PEFT_PREFIX, "")),
    "adapter_name_kept": edited("key_pattern", change=_rename(".weight", ".default.weight")),
    "capitals": edited("key_pattern", change=_rename(".weight", ".WEIGHT")),
    "no_suffix": edited("key_pattern", change=_rename(".weight", "")),
    "magnitudes": edited("key_pattern", change=_magnitudes),
    "deeper_base": edited("layer_range", change=_rename("layers.1.", DEEP)),
    "embeddings": edited("vocabulary", change=_add(f"{PEFT_PREFIX}model.embed_tokens.lora_embedding_A", 4, 64)),
    "output_head": edited("vocabulary", change=_add(f"{PEFT_PREFIX}lm_head.lora_A.weight", 4, 32)),
    "no_b": edited("missing_pair", change=_drop_first(".lora_B.weight")),
    "no_a": edited("missing_pair", change=_drop_first(".lora_A.weight")),
    "half_lost": edited("target_without_tensors", change=_half_lost),
    "outside_targets": edited("outside_targets", change=_outside_targets),
    "outside_pattern": edited("outside_targets", change=_set(target_modules=r".*\.q_proj")),
    "crowd": edited("key_pattern", "more", change=_crowd),
}

SHAPES: Mapping[str, Defect] = {
    "smaller_sibling": edited("shape", change=_alter("q_proj.lora_A.weight", lambda t: t[:, : t.shape[1] // 2])),
    "three_dimensions": edited("shape", change=_alter_first(".lora_A.weight", lambda t: t.unsqueeze(0))),
    "one_dimension": edited("shape", change=_alter_first(".lora_B.weight", lambda t: t.flatten())),
    "no_dimension": edited("shape", change=_alter_first(".lora_B.weight", lambda t: t.sum())),
    "transposed": edited("rank", "rank_limit", "shape", change=_alter_first(".lora_A.weight", lambda t: t.t())),
    "wrong_base": edited("attention_heads", change=_alter("q_proj.lora_B.weight", lambda t: t.repeat(2, 1))),
    "fewer_kv_heads": edited("attention_heads", change=_alter("v_proj.lora_B.weight", lambda t: t[: t.shape[0] // 2])),
    "rank_lies": edited("rank", change=_rank_lies),
    "pattern_lies": edited("rank", change=_pattern_lies),
    "ranks_differ": edited("rank", change=_ranks_differ),
    "no_rank": edited("rank", change=_no_rank),
    "rank_above_limit": edited("rank_limit", change=_rank_above),
    "too_large": edited("params_share", change=_too_large),
}

VALUES: Mapping[str, Defect] = {
    "int8": edited("dtype", change=_alter("", _int8)),
    "one_float8": edited("dtype", change=_alter_first(".lora_B.weight", _float8)),
    "float64": edited("dtype", change=_alter("", lambda t: t.double())),
    "nan": edited("not_finite", change=_alter_first(".lora_B.weight", _poke(math.nan))),
    "infinity": edited("not_finite", change=_alter_first(".lora_A.weight", _poke(math.inf))),
    "minus_infinity": edited("not_finite", change=_alter_first(".lora_B.weight", _poke(-math.inf))),
    "dead_module": edited("zero_module", change=_alter_first(".lora_B.weight", lambda t: t * 0)),
    "dead_input": edited("zero_module", change=_alter_first(".lora_A.weight", lambda t: -0.0 * t.abs())),
    "never_trained": edited("no_effect", change=_alter(".lora_B.weight", lambda t: t * 0)),
    "empty": edited("no_effect", change=_empty),
}

# One value that means something, for each field that changes what the tensors mean.
TRUTHY: Mapping[str, object] = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 2},
    "bias": "lora_only",
    "corda_config": {"corda_method": "kpm"},
    "fan_in_fan_out": True,
    "layer_replication": [[0, 2], [1, 2]],
    "loftq_config": {"loftq_bits": 4},
    "lora_bias": True,
    "lora_ga_config": {"scale": "stable"},
    "megatron_config": {"tensor_model_parallel_size": 2},
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"samples": 4},
    "target_parameters": ["experts.down_proj"],
    "trainable_token_indices": [7],
    "use_bdlora": {"nblocks": 2},
    "use_dora": True,
    "use_qalora": True,
    "velora_config": {"groups": 2},
}
INITS = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "of_the_future", ["gaussian"])
# Regular expressions that take for ever, or that two engines read in two ways.
BOMBS = {
    "repeated_group": "(a+)+$",
    "repeated_choice": "(a|a)*$",
    "many_wildcards": ".*.*.*.*.*.*x",
    "counted": "(.{9}){9}",
    "look_ahead": "(?=a)q_proj",
    "named_group": "(?P<q>q)_proj",
    "unbalanced": "(q_proj",
    "nested_set": "[[q]_proj",
    "other_letters": "q_prój",
    "long": "q" * 300,
    "a_line_more": "q_proj\n",
}

CONFIGS: Mapping[str, Defect] = {
    "dora": edited("unsupported_field", "key_pattern", change=_dora),
    **{f"with_{name}": edited("unsupported_field", change=_set(**{name: value})) for name, value in TRUTHY.items()},
    **{
        f"init_{init if isinstance(init, str) else 'list'}": edited(
            "unsupported_field", change=_set(init_lora_weights=init)
        )
        for init in INITS
    },
    "future_field": edited("unknown_field", change=_set(use_quantum=True)),
    "other_method": edited("peft_type", change=_set(peft_type="LOHA")),
    "no_method": edited("peft_type", change=_unset("peft_type")),
    "classifier": edited("task_type", change=_set(task_type="SEQ_CLS")),
    "no_r": edited("config_field", change=_unset("r")),
    "r_zero": edited("config_field", change=_set(r=0)),
    "r_negative": edited("config_field", change=_set(r=-4)),
    "r_text": edited("config_field", change=_set(r="4")),
    "r_true": edited("config_field", change=_set(r=True)),
    "r_fraction": edited("config_field", change=_set(r=4.5)),
    "r_huge": edited("config_field", change=_set(r=MAX_RANK + 1)),
    "no_alpha": edited("config_field", change=_unset("lora_alpha")),
    "alpha_zero": edited("config_field", change=_set(lora_alpha=0)),
    "alpha_negative": edited("config_field", change=_set(lora_alpha=-8)),
    "alpha_text": edited("config_field", change=_set(lora_alpha="16")),
    "alpha_huge": edited("config_field", change=_set(lora_alpha=10**400)),
    "rslora_text": edited("config_field", change=_set(use_rslora="yes")),
    "no_targets": edited("config_field", change=_unset("target_modules")),
    "targets_empty": edited("config_field", change=_set(target_modules=[])),
    "targets_numbers": edited("config_field", change=_set(target_modules=[1, 2])),
    "targets_unnamed": edited("config_field", change=_set(target_modules=["q_proj", ""])),
    "rank_pattern_list": edited("config_field", change=_set(rank_pattern=[["q_proj", 4]])),
    "rank_pattern_zero": edited("config_field", change=_set(rank_pattern={"q_proj": 0})),
    "alpha_pattern_negative": edited("config_field", change=_set(alpha_pattern={"q_proj": -1})),
    **{f"targets_{name}": edited("config_field", change=_set(target_modules=text)) for name, text in BOMBS.items()},
    **{f"rank_pattern_{name}": edited("config_field", change=_set(rank_pattern={t: 4})) for name, t in BOMBS.items()},
    **{f"alpha_pattern_{name}": edited("config_field", change=_set(alpha_pattern={t: 4})) for name, t in BOMBS.items()},
    "many_patterns": edited(
        "config_field", change=_set(alpha_pattern={f"v{number}_proj": 4 for number in range(4_097)})
    ),
}

DEFECTS: Mapping[str, Defect] = {**NAMES, **SHAPES, **VALUES, **CONFIGS}
