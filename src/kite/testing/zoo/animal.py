"""What a defective adapter is: a way to spoil a sound one, and exactly the codes it must be refused with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kite.testing.zoo.samples import Edit, edit

MAX_LORA_RANK = 16
SHARE_TIMES = 2
"""The limits under which each defect has its codes and no other: this rank, this often a sound adapter's share."""


@dataclass(frozen=True)
class Defect:
    """`spoil` changes a sound adapter's folder in place, and returns the path to verify.

    `codes` are the names of kite_upcycle's violations, all of them. The adapter root is the folder's parent.
    """

    codes: frozenset[str]
    spoil: Callable[[Path], Path]


def edited(*codes: str, change: Edit) -> Defect:
    """Return a defect of tensors or configuration."""

    def spoil(folder: Path) -> Path:
        edit(folder, change)
        return folder

    return Defect(frozenset(codes), spoil)


def placed(*codes: str, change: Callable[[Path], Path | None]) -> Defect:
    """Return a defect of files; `change` returns the path to verify, None for the folder itself."""
    return Defect(frozenset(codes), lambda folder: change(folder) or folder)
