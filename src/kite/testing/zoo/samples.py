"""Bases and adapters of any shape, with random weights and no meaning: the sound animals, and how to change one."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from kite.testing.adapters import CONFIG_NAME, TENSORS_NAME, Json, Tensors, adapter_config, key, lora_tensors
from kite.testing.bases import uniform, write_json, write_tensors

if TYPE_CHECKING:
    import torch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
SPREAD = 0.02  # standard deviation of the random values
Edit: TypeAlias = Callable[[Tensors, Json], None]
"""Changes tensors and configuration of an adapter in place."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like base."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 48
    vocabulary: int = 64

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def features(self, leaf: str) -> tuple[int, int]:
        """Return (out, in) features of a linear layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }[leaf]


TINY = Shape()
SMOLLM2_135M = Shape(layers=30, hidden=576, heads=9, kv_heads=3, intermediate=1_536, vocabulary=49_152)


def module_path(layer: int, leaf: str) -> str:
    """Return the path of a linear layer.

    >>> module_path(3, "q_proj")
    'model.layers.3.self_attn.q_proj'
    """
    return f"model.layers.{layer}.{'self_attn' if leaf in ATTENTION else 'mlp'}.{leaf}"


FIRST = key(module_path(0, "q_proj"), "A")
FIRST_B = key(module_path(0, "q_proj"), "B")


def write_base(folder: Path, shape: Shape = TINY, *, seed: int = 0, config: Mapping[str, object] | None = None) -> Path:
    """Write a random base with tied embeddings, bf16, as one file; `config` overrides any field."""
    import torch

    source = torch.Generator().manual_seed(seed)
    sizes = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        sizes |= {f"{module_path(layer, leaf)}.weight": shape.features(leaf) for leaf in (*ATTENTION, *FEED_FORWARD)}
    tensors = {name: uniform(size, SPREAD, source).bfloat16() for name, size in sizes.items()}
    tensors |= {name: torch.ones(shape.hidden).bfloat16() for name in _norms(shape.layers)}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", base_config(shape) | dict(config or {}))
    return folder


def _norms(layers: int) -> list[str]:
    leaves = ("input_layernorm", "post_attention_layernorm")
    return ["model.norm.weight", *(f"model.layers.{n}.{leaf}.weight" for n in range(layers) for leaf in leaves)]


def base_config(shape: Shape) -> Json:
    """Return the `config.json` of a Llama of this shape, rotary base and epsilon at their usual values."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": True,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
    }


def write_adapter(
    folder: Path,
    shape: Shape = TINY,
    *,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION,
    layers: Sequence[int] | None = None,
    dtype: str = "bfloat16",
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write a random adapter as PEFT saves it, over what is there; return the folder.

    `ranks` overrides the rank per leaf name (it is also written as `rank_pattern`), `config` any field.
    """
    import torch

    source = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for layer in range(shape.layers) if layers is None else layers:
        for leaf in targets:
            width = (ranks or {}).get(leaf, rank)
            drawn = lora_tensors(module_path(layer, leaf), shape.features(leaf), width, (SPREAD, SPREAD), source)
            tensors |= {name: tensor.to(getattr(torch, dtype)) for name, tensor in drawn.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / TENSORS_NAME)
    write_json(
        folder / CONFIG_NAME, peft_config(rank, targets) | {"rank_pattern": dict(ranks or {})} | dict(config or {})
    )
    return folder


def peft_config(rank: int, targets: Sequence[str]) -> Json:
    """Return every field that PEFT 0.20 writes for an ordinary adapter, at its usual value."""
    absent = (
        "alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules",
        "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config",
        "monteclora_config", "revision", "target_parameters", "trainable_token_indices", "use_bdlora", "velora_config",
    )  # fmt: skip
    false = ("ensure_weight_tying", "lora_bias", "use_qalora")
    return {
        **adapter_config(rank, 2 * rank, targets),
        **dict.fromkeys(absent, None),
        **dict.fromkeys(false, False),
        "alpha_pattern": {}, "loftq_config": {}, "lora_dropout": 0.05, "megatron_core": "megatron.core",
        "peft_version": "0.20.0", "qalora_group_size": 16, "rank_pattern": {},
    }  # fmt: skip


def read_config(folder: Path) -> Json:
    """Read the configuration of a trusted adapter."""
    return cast("Json", json.loads((folder / CONFIG_NAME).read_bytes()))


def edit_config(folder: Path, **fields: object) -> None:
    """Change fields of an adapter's configuration."""
    write_json(folder / CONFIG_NAME, read_config(folder) | fields)


def edit_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Let `change` edit an adapter's tensors in place, and save them."""
    tensors = load_tensors(folder / TENSORS_NAME)
    change(tensors)
    save_tensors(tensors, folder / TENSORS_NAME)


def edit(folder: Path, change: Edit) -> None:
    """Let `change` edit tensors and configuration of an adapter in place, and save both."""
    tensors, config = load_tensors(folder / TENSORS_NAME), read_config(folder)
    change(tensors, config)
    save_tensors(tensors, folder / TENSORS_NAME)
    write_json(folder / CONFIG_NAME, config)


def load_tensors(path: Path) -> Tensors:
    """Read a trusted safetensors file whole."""
    from safetensors.torch import load

    return load(path.read_bytes())


def save_tensors(tensors: "Mapping[str, torch.Tensor]", path: Path) -> None:
    """Write a safetensors file."""
    write_tensors(path, dict(tensors))
