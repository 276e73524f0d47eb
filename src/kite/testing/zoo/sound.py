"""Adapters that keep the contract although they look unusual: refusing one of them would be a false alarm."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kite.testing.adapters import CONFIG_NAME
from kite.testing.zoo import hostile
from kite.testing.zoo.samples import ATTENTION, FEED_FORWARD, TINY, edit, module_path, peft_config, write_adapter

Make: TypeAlias = Callable[[Path], Path]
"""Writes an adapter for `TINY` to a folder, and returns the folder."""

REGEX = r".*\.self_attn\.(q|k|v|o)_proj"
MINIMAL = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
PATHS = [module_path(layer, leaf) for layer in range(TINY.layers) for leaf in ATTENTION]


def _configured(**fields: object) -> Make:
    return partial(write_adapter, config=fields)


def _targeting(targets: Sequence[str], **fields: object) -> Make:
    return partial(write_adapter, targets=targets, config=fields)


def _minimal(folder: Path) -> Path:
    write_adapter(folder)
    (folder / CONFIG_NAME).write_text(json.dumps(MINIMAL))
    return folder


def _without_nulls(folder: Path) -> Path:
    """Write it as a tool does that drops whatever is absent."""
    write_adapter(folder)
    kept = {name: value for name, value in peft_config(4, ATTENTION).items() if value is not None}
    (folder / CONFIG_NAME).write_text(json.dumps(kept))
    return folder


def _metadata(value: Mapping[str, str]) -> Make:
    def make(folder: Path) -> Path:
        write_adapter(folder)
        hostile.edit_header(folder, lambda header: header.update({hostile.METADATA: dict(value)}))
        return folder

    return make


def _no_metadata(folder: Path) -> Path:
    write_adapter(folder)
    hostile.edit_header(folder, lambda header: header.pop(hostile.METADATA))
    return folder


def _padded(folder: Path) -> Path:
    header, data = hostile.split(write_adapter(folder))
    hostile.join(folder, json.dumps(header).encode() + b" " * 100, data)
    return folder


def _unsorted(folder: Path) -> Path:
    """Name the tensors in another order than their data lies."""
    header, data = hostile.split(write_adapter(folder))
    hostile.join(folder, json.dumps(dict(reversed(header.items()))).encode(), data)
    return folder


def _mixed_dtypes(folder: Path) -> Path:
    import torch

    write_adapter(folder)
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    edit(folder, lambda tensors, _: tensors.update({k: t.to(kinds[n % 3]) for n, (k, t) in enumerate(tensors.items())}))
    return folder


def _small_values(folder: Path) -> Path:
    """Leave numbers that float16 can only hold as subnormal ones."""
    write_adapter(folder, dtype="float16")
    edit(folder, lambda tensors, _: tensors.update({name: tensor * 1e-5 for name, tensor in tensors.items()}))
    return folder


def _beside(**files: str) -> Make:
    def make(folder: Path) -> Path:
        write_adapter(folder)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    return make


SOUND: Mapping[str, Make] = {
    "plain": write_adapter,
    "float16": partial(write_adapter, dtype="float16"),
    "float32": partial(write_adapter, dtype="float32"),
    "mixed_dtypes": _mixed_dtypes,
    "small_values": _small_values,
    "rslora": _configured(use_rslora=True),
    "rank_one": partial(write_adapter, rank=1),
    "rank_at_limit": partial(write_adapter, rank=16, targets=["q_proj"]),
    "rank_pattern": partial(write_adapter, ranks={"q_proj": 2, "v_proj": 8}),
    "rank_pattern_of_paths": partial(
        write_adapter, ranks={"o_proj": 3}, config={"rank_pattern": {r"layers\.\d+\.self_attn\.o_proj": 3}}
    ),
    "rank_pattern_elsewhere": _configured(rank_pattern={"c_attn": 64}),
    "alpha_pattern": _configured(alpha_pattern={"q_proj": 3, r"layers\.1\..*v_proj": 64}),
    "no_patterns": _configured(rank_pattern=None, alpha_pattern=None),
    "regex": _configured(target_modules=REGEX),
    "all_linear": _targeting((*ATTENTION, *FEED_FORWARD), target_modules="all-linear"),
    "attention_only": _targeting(ATTENTION),
    "feed_forward_only": _targeting(FEED_FORWARD),
    "every_module": _targeting((*ATTENTION, *FEED_FORWARD)),
    "one_module": partial(write_adapter, targets=["down_proj"], layers=[1], config={"layers_to_transform": [1]}),
    "some_layers": partial(write_adapter, layers=[1], config={"layers_to_transform": [1], "layers_pattern": "layers"}),
    "one_layer_as_number": partial(write_adapter, layers=[0], config={"layers_to_transform": 0}),
    "targets_as_paths": _configured(target_modules=PATHS),
    "targets_of_other_families": _configured(target_modules=[*ATTENTION, "c_attn", "query_key_value"]),
    "excluded_modules": _configured(exclude_modules=["down_proj"], lora_dropout=0.3),
    "minimal_config": _minimal,
    "no_nulls": _without_nulls,
    "no_task": _configured(task_type=None),
    "false_unknown_fields": _configured(enable_lora=None, merge_weights=False),
    "gaussian": _configured(init_lora_weights="gaussian"),
    "float_alpha": _configured(lora_alpha=16.0),
    "fractional_alpha": _configured(lora_alpha=7.5),
    "float_rank": _configured(r=4.0),
    "float_pattern": partial(write_adapter, ranks={"q_proj": 2}, config={"rank_pattern": {"q_proj": 2.0}}),
    "inference_off": _configured(inference_mode=False),
    "base_with_slash": _configured(base_model_name_or_path="somewhere/tiny/"),
    "base_elsewhere": _configured(base_model_name_or_path="org/other-7b"),
    "no_metadata": _no_metadata,
    "more_metadata": _metadata({"format": "pt", "trainer": "a: {b}, [c]", "note": "déjà vu \U0001f600", "empty": ""}),
    "padded_header": _padded,
    "unsorted_header": _unsorted,
    "documents_beside": _beside(README__md="# An adapter", tokenizer_config__json="{}", training_args="x"),
}
