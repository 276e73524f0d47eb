"""Adapters for tests and the demo: random ones that have an effect. Defective ones are in `kite.testing.zoo`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from kite.errors import MissingPath, UsageError
from kite.testing.bases import finished, uniform, write_json, write_tensors
from kite.testing.llama import PEFT_PREFIX

if TYPE_CHECKING:
    from torch import Generator as Random
    from torch import Tensor

Tensors: TypeAlias = "dict[str, Tensor]"
Json: TypeAlias = dict[str, object]

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
TARGETS = ("q_proj", "v_proj", "down_proj")


def adapter(
    path: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: int = 8,
    seed: int = 0,
    scale: float = 0.5,
    targets: Sequence[str] = TARGETS,
) -> Path:
    """Write a random PEFT LoRA adapter for a base to a new folder; equal arguments give equal bytes, bfloat16.

    A module's change is about `scale * alpha / rank` times as large as what the module itself gives out: at the
    default the next token moves by nats. Ranks up to 8 on the default targets stay within 0.8 % of the tiny base.
    """
    import torch

    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for module, shape in module_shapes(base, targets).items():
        spreads = 1 / math.sqrt(shape[1]), scale / math.sqrt(rank)
        drawn = lora_tensors(module, shape, rank, spreads, random)
        tensors |= {name: tensor.bfloat16() for name, tensor in drawn.items()}
    return write_adapter(path, tensors, adapter_config(rank, alpha, targets))


def lora_tensors(
    module: str, shape: tuple[int, int], rank: int, spreads: tuple[float, float], random: "Random"
) -> Tensors:
    """Draw A [rank, in] and B [out, rank] of a module whose weight is `shape` [out, in], by their tensors' names.

    Values are uniform, float32, of mean 0; `spreads` are the standard deviations of A and B.
    """
    rows, columns = shape
    a = uniform((rank, columns), spreads[0], random)
    b = uniform((rows, rank), spreads[1], random)
    return {key(module, "A"): a, key(module, "B"): b}


def key(module: str, side: str) -> str:
    """Return the name of a tensor; `side` is A or B.

    >>> key("model.layers.0.mlp.up_proj", "A")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{PEFT_PREFIX}{module}.lora_{side}.weight"


def module_shapes(base: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the weight shapes [out, in] of the base's modules whose last name is a target, sorted by name."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(base.glob("*.safetensors")):
        for name, shape in sorted(tensor_shapes(file).items()):
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in targets:
                shapes[module] = (shape[0], shape[1])
    if not shapes:
        raise MissingPath(f"no module of {base} is called {', '.join(targets)}", hint="name the folder of a base")
    return shapes


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor, from the header of a safetensors file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = cast("dict[str, dict[str, list[int]]]", json.loads(stream.read(length)))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def adapter_config(rank: int, alpha: int, targets: Sequence[str]) -> Json:
    """Return PEFT's `adapter_config.json` for plain LoRA."""
    return {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def write_adapter(path: Path, tensors: Tensors, config: Json) -> Path:
    """Write an adapter to a new folder. Raises UsageError when it exists."""
    if path.exists():
        raise UsageError(f"{path} exists", hint="name a new folder")
    with finished(path) as folder:
        write_tensors(folder / TENSORS_NAME, tensors)
        write_json(folder / CONFIG_NAME, config)
    return path
