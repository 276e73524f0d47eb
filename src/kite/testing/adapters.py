"""Adapters for tests and the demo: random ones that have an effect, and copies of them with one defect each."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from kite.errors import MissingPath, UsageError
from kite.testing.bases import finished, uniform, write_json, write_tensors
from kite.testing.llama import PEFT_PREFIX, read_json

if TYPE_CHECKING:
    from torch import Tensor

Tensors: TypeAlias = "dict[str, Tensor]"
Json: TypeAlias = dict[str, object]

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
    for module, (rows, columns) in module_shapes(base, targets).items():
        a = uniform((rank, columns), 1 / math.sqrt(columns), random)
        b = uniform((rows, rank), scale / math.sqrt(rank), random)
        tensors |= {f"{PEFT_PREFIX}{module}.lora_A.weight": a.bfloat16()}
        tensors |= {f"{PEFT_PREFIX}{module}.lora_B.weight": b.bfloat16()}
    return write_adapter(path, tensors, adapter_config(rank, alpha, targets))


def module_shapes(base: Path, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the weight shapes [out, in] of the base's modules whose last name is a target, sorted by name."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(base.glob("*.safetensors")):
        for key, shape in sorted(tensor_shapes(file).items()):
            module = key.removesuffix(".weight")
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
    return {key: entry["shape"] for key, entry in header.items() if key != "__metadata__"}


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
        write_tensors(folder / "adapter_model.safetensors", tensors)
        write_json(folder / "adapter_config.json", config)
    return path


def defective(good: Path, out: Path, kind: str) -> Path:
    """Write a copy of a good adapter with one defect of the given kind to a new folder. Raises UsageError.

    Kinds are the keys of `DEFECTS`. vLLM loads most of them with 200 OK.
    """
    from safetensors.torch import load

    if kind not in DEFECTS:
        raise UsageError(f"no defect is called {kind!r}", hint=f"one of {', '.join(DEFECTS)}")
    tensors = load((good / "adapter_model.safetensors").read_bytes())
    return write_adapter(out, *DEFECTS[kind](tensors, dict(read_json(good / "adapter_config.json"))))


def nan(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """One number of one tensor is not a number."""
    key = min(key for key in tensors if key.endswith(".lora_B.weight"))
    broken = tensors[key].clone()
    broken[0, 0] = math.nan
    return {**tensors, key: broken}, config


def wrong_prefix(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """Every tensor names a module that the base does not have: the base is served under the adapter's name."""
    wrong = f"{PEFT_PREFIX}model.decoder.layers."
    return {key.replace(f"{PEFT_PREFIX}model.layers.", wrong): tensor for key, tensor in tensors.items()}, config


def rank_lies(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """The configuration says twice the rank of the tensors: the change is served at half its strength."""
    return tensors, {**config, "r": 2 * cast("int", config["r"])}


def dora(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """It is a DoRA adapter, with a magnitude for each output."""
    import torch

    magnitudes = {
        key.replace(".lora_B.weight", ".lora_magnitude_vector"): torch.ones(tensor.shape[0], dtype=tensor.dtype)
        for key, tensor in tensors.items()
        if key.endswith(".lora_B.weight")
    }
    return {**tensors, **magnitudes}, {**config, "use_dora": True}


def wrong_base(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """It was made for a sibling of the base that has twice the query heads."""
    return {
        key: tensor.repeat(2, 1) if key.endswith(".q_proj.lora_B.weight") else tensor for key, tensor in tensors.items()
    }, config


def int8(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """Its numbers were rounded to 8-bit integers without a scale."""
    import torch

    return {key: (tensor * 64).round().clamp(-127, 127).to(torch.int8) for key, tensor in tensors.items()}, config


def too_large(tensors: Tensors, config: Json) -> tuple[Tensors, Json]:
    """Four times the rank for the same change: from rank 4 on the default targets that is over 0.8 % of our bases."""
    factor = 4
    larger = {
        key: tensor.repeat(factor, 1) if ".lora_A." in key else tensor.repeat(1, factor) / factor
        for key, tensor in tensors.items()
    }
    sizes = {"r": factor * cast("int", config["r"]), "lora_alpha": factor * cast("int", config["lora_alpha"])}
    return larger, {**config, **sizes}


DEFECTS: Mapping[str, Callable[[Tensors, Json], tuple[Tensors, Json]]] = {
    defect.__name__: defect for defect in (nan, wrong_prefix, rank_lies, dora, wrong_base, int8, too_large)
}
