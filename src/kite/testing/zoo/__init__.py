"""The zoo: bases and adapters, sound and defective, one defect for each check of the adapter contract.

`SOUND` must be accepted; each of `DEFECTS` (content), `HOSTILE` (files) and `STAMPS` (of a stamped adapter, strictly)
must be refused with exactly its codes.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from kite.errors import UsageError
from kite.testing.adapters import key
from kite.testing.zoo.animal import MAX_LORA_RANK, SHARE_TIMES, Defect
from kite.testing.zoo.defects import DEFECTS
from kite.testing.zoo.hostile import HOSTILE
from kite.testing.zoo.samples import (
    ATTENTION,
    FEED_FORWARD,
    FIRST,
    FIRST_B,
    SMOLLM2_135M,
    TINY,
    Shape,
    base_config,
    edit_config,
    edit_tensors,
    load_tensors,
    module_path,
    peft_config,
    save_tensors,
    write_adapter,
    write_base,
)
from kite.testing.zoo.sound import SOUND
from kite.testing.zoo.stamps import STAMPS

__all__ = [
    "ANIMALS",
    "ATTENTION",
    "DEFECTS",
    "FEED_FORWARD",
    "FIRST",
    "FIRST_B",
    "HOSTILE",
    "MAX_LORA_RANK",
    "SHARE_TIMES",
    "SMOLLM2_135M",
    "SOUND",
    "STAMPS",
    "TINY",
    "Defect",
    "Shape",
    "base_config",
    "defective",
    "edit_config",
    "edit_tensors",
    "key",
    "load_tensors",
    "module_path",
    "peft_config",
    "save_tensors",
    "write_adapter",
    "write_base",
]

ANIMALS: Mapping[str, Defect] = {**DEFECTS, **HOSTILE, **STAMPS}
"""Every defective one."""


def defective(good: Path, out: Path, kind: str) -> Path:
    """Write a copy of a good adapter with one defect, a key of `DEFECTS`, to a new folder. Raises UsageError."""
    if kind not in DEFECTS:
        raise UsageError(f"no defect is called {kind!r}", hint=f"one of {', '.join(DEFECTS)}")
    if out.exists():
        raise UsageError(f"{out} exists", hint="name a new folder")
    return DEFECTS[kind].spoil(shutil.copytree(good, out))
