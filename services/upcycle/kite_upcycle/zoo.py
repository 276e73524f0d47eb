"""Sample bases and adapters, sound and defective: random weights in real shapes, for tests and the demo.

Each defect spoils a sound adapter folder in place and breaks exactly one clause of the contract.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kite_upcycle.reader import CONFIG_NAME, TENSORS_NAME
from kite_upcycle.violations import Code

if TYPE_CHECKING:
    import torch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
SPREAD = 0.02  # standard deviation of the random values


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


def key(module: str, side: str) -> str:
    """Return the name of a tensor; `side` is A or B."""
    return f"base_model.model.{module}.lora_{side}.weight"


def write_base(folder: Path, shape: Shape = TINY, *, seed: int = 0) -> Path:
    """Write a random base with tied embeddings, bf16, as one file; return the folder."""
    import torch

    source = torch.Generator().manual_seed(seed)
    sizes = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden), "model.norm.weight": (shape.hidden,)}
    for layer in range(shape.layers):
        sizes |= {f"{module_path(layer, leaf)}.weight": shape.features(leaf) for leaf in (*ATTENTION, *FEED_FORWARD)}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"model.layers.{layer}.{norm}.weight"] = (shape.hidden,)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: (torch.randn(size, generator=source) * SPREAD).bfloat16() for name, size in sizes.items()}
    save_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_base_config(shape)))
    return folder


def _base_config(shape: Shape) -> dict[str, object]:
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
    """Write a random adapter as PEFT saves it; return the folder.

    `ranks` overrides the rank per leaf name (it is also written as `rank_pattern`), `config` any field.
    """
    import torch

    source = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.layers) if layers is None else layers:
        for leaf in targets:
            out_features, in_features = shape.features(leaf)
            width = (ranks or {}).get(leaf, rank)
            for side, size in (("A", (width, in_features)), ("B", (out_features, width))):
                values = torch.randn(size, generator=source) * SPREAD
                tensors[key(module_path(layer, leaf), side)] = values.to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / TENSORS_NAME)
    fields = peft_config(rank, targets) | {"rank_pattern": dict(ranks or {})} | dict(config or {})
    (folder / CONFIG_NAME).write_text(json.dumps(fields))
    return folder


def peft_config(rank: int, targets: Sequence[str]) -> dict[str, object]:
    """Return every field that PEFT 0.20 writes for an ordinary adapter, at its usual value."""
    absent = (
        "alora_invocation_tokens", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config",
        "eva_config", "exclude_modules", "layer_replication", "layers_pattern", "layers_to_transform",
        "lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision", "target_parameters",
        "trainable_token_indices", "use_bdlora", "velora_config",
    )  # fmt: skip
    false = ("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora")
    return {
        **dict.fromkeys(absent, None),
        **dict.fromkeys(false, False),
        "alpha_pattern": {}, "bias": "none", "inference_mode": True, "init_lora_weights": True, "loftq_config": {},
        "lora_alpha": 2 * rank, "lora_dropout": 0.05, "megatron_core": "megatron.core", "peft_type": "LORA",
        "peft_version": "0.20.0", "qalora_group_size": 16, "r": rank, "rank_pattern": {},
        "target_modules": list(targets), "task_type": "CAUSAL_LM",
    }  # fmt: skip


def edit_config(folder: Path, **fields: object) -> None:
    """Change fields of an adapter's configuration."""
    path = folder / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: "Callable[[dict[str, torch.Tensor]], None]") -> None:
    """Let `change` edit an adapter's tensors in place, and save them."""
    tensors = load_tensors(folder / TENSORS_NAME)
    change(tensors)
    save_tensors(tensors, folder / TENSORS_NAME)


def load_tensors(path: Path) -> "dict[str, torch.Tensor]":
    """Read a trusted safetensors file whole."""
    from safetensors.torch import load

    return load(path.read_bytes())


def save_tensors(tensors: "Mapping[str, torch.Tensor]", path: Path) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.write_bytes(save(whole, metadata={"format": "pt"}))


EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
MAGNITUDE = f"base_model.model.{module_path(0, 'q_proj')}.lora_magnitude_vector"
FIRST = key(module_path(0, "q_proj"), "A")
FIRST_B = key(module_path(0, "q_proj"), "B")


def _rename(old: str, new: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        def change(tensors: "dict[str, torch.Tensor]") -> None:
            for name in [name for name in tensors if old in name]:
                tensors[name.replace(old, new)] = tensors.pop(name)

        edit_tensors(folder, change)

    return spoil


def _drop(part: str) -> Callable[[Path], None]:
    def change(tensors: "dict[str, torch.Tensor]") -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return lambda folder: edit_tensors(folder, change)


def _alter(part: str, change: "Callable[[torch.Tensor], torch.Tensor]") -> Callable[[Path], None]:
    def apply(tensors: "dict[str, torch.Tensor]") -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name] = change(tensors[name])

    return lambda folder: edit_tensors(folder, apply)


def _poke(value: float) -> "Callable[[torch.Tensor], torch.Tensor]":
    def change(tensor: "torch.Tensor") -> "torch.Tensor":
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return change


def _int8(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return (tensor.float() * 100).to(torch.int8)


def _configure(**fields: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **fields)


def _add(name: str, *sizes: int) -> Callable[[Path], None]:
    def change(tensors: "dict[str, torch.Tensor]") -> None:
        import torch

        tensors[name] = torch.ones(sizes)

    return lambda folder: edit_tensors(folder, change)


def _grow_heads(folder: Path) -> None:
    wide = Shape(heads=TINY.heads * 2, hidden=TINY.hidden * 2, kv_heads=TINY.kv_heads).features("q_proj")[0]
    _alter(FIRST_B, lambda tensor: tensor.repeat(wide // tensor.shape[0], 1))(folder)


def _empty(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.clear())


@dataclass(frozen=True)
class Defect:
    """A way to spoil a sound adapter, and the one code that it must be refused with."""

    code: Code
    spoil: Callable[[Path], None]


# Each applies to `write_adapter(folder)` with its default shape, targets and rank.
DEFECTS: Mapping[str, Defect] = {
    "wrong prefix, serves the base": Defect(
        Code.UNKNOWN_MODULE, _rename("base_model.model.", "base_model.model.model.")
    ),
    "no prefix": Defect(Code.KEY_PATTERN, _rename("base_model.model.", "")),
    "unsaved adapter name": Defect(Code.KEY_PATTERN, _rename(".weight", ".default.weight")),
    "magnitude vectors of DoRA": Defect(Code.KEY_PATTERN, _add(MAGNITUDE, TINY.hidden)),
    "layer of a deeper base": Defect(Code.LAYER_RANGE, _rename("layers.1.", "layers.40.")),
    "embeddings": Defect(Code.VOCABULARY, _add(EMBEDDING, 4, TINY.vocabulary)),
    "no B": Defect(Code.MISSING_PAIR, _drop(FIRST_B)),
    "no A": Defect(Code.MISSING_PAIR, _drop(FIRST)),
    "half of it lost": Defect(Code.TARGET_WITHOUT_TENSORS, _drop("v_proj")),
    "tensors that nobody asked for": Defect(
        Code.OUTSIDE_TARGETS, _configure(target_modules=["q_proj", "k_proj", "v_proj"])
    ),
    "a smaller sibling's": Defect(Code.SHAPE, _alter("q_proj.lora_A", lambda tensor: tensor[:, : TINY.hidden // 2])),
    "three dimensions": Defect(Code.SHAPE, _alter(FIRST, lambda tensor: tensor.unsqueeze(0))),
    "more heads": Defect(Code.ATTENTION_HEADS, _grow_heads),
    "a rank that lies": Defect(Code.RANK, _configure(r=2)),
    "a pattern that lies": Defect(Code.RANK, _configure(rank_pattern={"q_proj": 3})),
    "int8": Defect(Code.DTYPE, _alter(FIRST, _int8)),
    "float64": Defect(Code.DTYPE, _alter(FIRST, lambda tensor: tensor.double())),
    "NaN": Defect(Code.NOT_FINITE, _alter(FIRST, _poke(math.nan))),
    "infinity": Defect(Code.NOT_FINITE, _alter(FIRST_B, _poke(-math.inf))),
    "one dead module": Defect(Code.ZERO_MODULE, _alter(FIRST_B, lambda tensor: tensor * 0)),
    "never trained": Defect(Code.NO_EFFECT, _alter("lora_B", lambda tensor: tensor * 0)),
    "nothing in it": Defect(Code.NO_EFFECT, _empty),
    "DoRA": Defect(Code.UNSUPPORTED_FIELD, _configure(use_dora=True)),
    "bias": Defect(Code.UNSUPPORTED_FIELD, _configure(bias="lora_only")),
    "LoRA bias": Defect(Code.UNSUPPORTED_FIELD, _configure(lora_bias=True)),
    "whole modules": Defect(Code.UNSUPPORTED_FIELD, _configure(modules_to_save=["lm_head"])),
    "layer replication": Defect(Code.UNSUPPORTED_FIELD, _configure(layer_replication=[[0, 2], [1, 2]])),
    "PiSSA": Defect(Code.UNSUPPORTED_FIELD, _configure(init_lora_weights="pissa_niter_16")),
    "aLoRA": Defect(Code.UNSUPPORTED_FIELD, _configure(alora_invocation_tokens=[1, 2])),
    "trainable tokens": Defect(Code.UNSUPPORTED_FIELD, _configure(trainable_token_indices=[7])),
    "target parameters": Defect(Code.UNSUPPORTED_FIELD, _configure(target_parameters=["experts.down_proj"])),
    "a field of the future": Defect(Code.UNKNOWN_FIELD, _configure(use_quantum=True)),
    "another method": Defect(Code.PEFT_TYPE, _configure(peft_type="LOHA")),
    "a classifier": Defect(Code.TASK_TYPE, _configure(task_type="SEQ_CLS")),
    "a rank of zero": Defect(Code.CONFIG_FIELD, _configure(r=0)),
    "an alpha of text": Defect(Code.CONFIG_FIELD, _configure(lora_alpha="16")),
    "a pattern that hangs": Defect(Code.CONFIG_FIELD, _configure(target_modules="(a+)+$")),
}
