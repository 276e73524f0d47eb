"""A base and adapters in the shapes of Qwen2.5-7B, without its weights: what blend.py and verify.py work on."""

import json
import math
import threading
from pathlib import Path
from typing import Self

import psutil
import torch

from kite_upcycle import header
from kite_upcycle.blend import Member
from kite_upcycle.header import DTYPE_BYTES, Entry
from kite_upcycle.reader import CONFIG_NAME, TENSORS_NAME, digest

LAYERS, HIDDEN, KEYS, INTERMEDIATE, VOCABULARY = 28, 3_584, 512, 18_944, 152_064
HEADS, KV_HEADS = 28, 4
RANK = 16
SPREAD_B = 0.01  # of a trained B; A is as PEFT draws it
DTYPE = "BF16"
LOOK_S = 0.002
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
"""(out, in) features of the linear layers of one block."""


def paths() -> dict[str, tuple[int, int]]:
    """Return every linear layer's path and its (out, in) features."""
    return {f"model.layers.{layer}.{leaf}": size for layer in range(LAYERS) for leaf, size in MODULES.items()}


def write_base(folder: Path) -> Path:
    """Write the configuration and a sparse file with the header of the weights: 15 GB that take no space."""
    folder.mkdir(parents=True)
    sizes = {f"{path}.weight": size for path, size in paths().items()}
    sizes["model.embed_tokens.weight"] = sizes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    head, data_bytes = _head(sizes)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + data_bytes)
    (folder / "config.json").write_text(json.dumps(_base_config()))
    return folder


def write_adapter(folder: Path, seed: int, *, weight_ppm: int) -> Member:
    """Write an adapter of rank 16 on every linear layer, bf16, 81 MB, as PEFT saves one."""
    folder.mkdir(parents=True)
    source = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, int]] = {}
    for path, (out_features, in_features) in paths().items():
        sizes[f"base_model.model.{path}.lora_A.weight"] = (RANK, in_features)
        sizes[f"base_model.model.{path}.lora_B.weight"] = (out_features, RANK)
    with (folder / TENSORS_NAME).open("wb") as file:
        file.write(_head(sizes)[0])
        for name, size in sizes.items():
            spread = 1 / math.sqrt(3 * size[1]) if ".lora_A." in name else SPREAD_B
            values = (torch.randn(size, generator=source) * spread).bfloat16()
            file.write(values.view(torch.uint8).numpy().data)
    (folder / CONFIG_NAME).write_text(json.dumps(_adapter_config()))
    return Member(folder, weight_ppm, digest(folder))


def _head(sizes: dict[str, tuple[int, int]]) -> tuple[bytes, int]:
    """Return the header of a file with these tensors, and how many bytes of data follow it."""
    entries: list[Entry] = []
    start = 0
    for name, size in sizes.items():
        stop = start + math.prod(size) * DTYPE_BYTES[DTYPE]
        entries.append(Entry(name, DTYPE, size, start, stop))
        start = stop
    return header.build(entries), start


def _base_config() -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    }


def _adapter_config() -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "bias": "none",
        "target_modules": [leaf.rpartition(".")[2] for leaf in MODULES],
    }


def resident_mb() -> float:
    """Return the resident memory of this process in megabytes."""
    return psutil.Process().memory_info().rss / 1e6


class Peak:
    """The most resident memory while it was watched, in megabytes; a thread looks every 2 ms."""

    def __init__(self) -> None:
        self.mb = 0.0
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.mb = max(self.mb, resident_mb())
