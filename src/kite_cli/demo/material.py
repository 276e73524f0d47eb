"""What the demo works on: a base, two good adapters, two defective ones, and prompts the good ones were made for."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kite import probes
from kite.errors import Fault, KiteError, MissingPath
from kite.testing import adapters, bases, zoo
from kite_cli.place import FLEET_FILE

BaseKind = Literal["smollm2", "tiny"]

EXAMPLES = Path("examples/adapters")
ANCHOR, SECOND = "credit", "laundering"
DEFECTS = ("nan", "wrong_base")
TASK_PROMPTS = 8
"""How many held-out prompts of each task are read."""

TINY_RANK, TINY_ALPHA = 4, 8


class NotADemo(KiteError):
    """The folder holds something that no demo wrote."""

    code = "not_a_demo"
    fault = Fault.USER

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} exists and no demo wrote it", hint="name another folder by --dir")
        self.directory = directory


@dataclass(frozen=True, slots=True)
class Material:
    """Where everything is; adapters by name, defective ones by the kind of defect."""

    base: Path
    good: Mapping[str, Path]
    bad: Mapping[str, Path]
    prompts: Sequence[str]


def fresh(directory: Path) -> Path:
    """Return an empty folder of this name, in place of what an earlier demo left. Raises NotADemo."""
    material = directory / "material"
    if directory.exists() and any(directory.iterdir()):
        if not material.is_dir() and not (directory / FLEET_FILE).is_file():
            raise NotADemo(directory)
        shutil.rmtree(directory)
    material.mkdir(parents=True)
    return directory


def prepare(kind: BaseKind, examples: Path, target: Path) -> Material:
    """Make or find the base, the adapters and their defective copies. Raises MissingPath and NoBase."""
    if kind == "tiny":
        base = bases.tiny(bases.cache())
        good = {name: _random(base, target / name, seed) for seed, name in enumerate((ANCHOR, SECOND))}
        prompts = probes.default().prompts[: 2 * TASK_PROMPTS]
    else:
        base = bases.smollm2(bases.cache())
        good = {name: _committed(examples / name) for name in (ANCHOR, SECOND)}
        prompts = [prompt for name in good for prompt in _prompts(examples / f"{name}.jsonl")]
    bad = {kind: zoo.defective(good[SECOND], target / f"defective-{kind.replace('_', '-')}", kind) for kind in DEFECTS}
    return Material(base, good, bad, prompts)


def _random(base: Path, path: Path, seed: int) -> Path:
    return adapters.adapter(path, base, rank=TINY_RANK, alpha=TINY_ALPHA, seed=seed)


def _committed(path: Path) -> Path:
    if not path.is_dir():
        raise MissingPath(f"no adapter {path}", hint="run the demo in KITE's checkout, or name --examples")
    return path


def _prompts(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()[:TASK_PROMPTS]
    return [json.loads(line)["prompt"] for line in lines]
