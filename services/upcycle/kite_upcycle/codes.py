"""The table of violation codes, with an example of each that the zoo gives: `docs/adapter-codes.md`.

`python -m kite_upcycle.codes` writes it below the current folder; with `--check` it only tells whether it differs.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kite.testing import zoo
from kite.testing.zoo.hostile import edit_header
from kite.testing.zoo.stamps import texts
from kite_schemas.generate import run
from kite_upcycle import stamp
from kite_upcycle.base import Base
from kite_upcycle.layout import Serving
from kite_upcycle.stamp import Demand
from kite_upcycle.verify import PPM, Limits, Report, verify
from kite_upcycle.violations import Code, Violation

PAGE = Path("docs/adapter-codes.md")

MEANINGS: Mapping[Code, str] = {
    Code.OUTSIDE_ROOT: "the path leads out of the adapter root",
    Code.PATH_NAME: "a name in the path is not of letters, digits and `._@+-`, or begins with one of the marks",
    Code.SYMLINK: "the folder, one above it or a file in it is a symbolic link",
    Code.MISSING_FILE: "the folder, `adapter_config.json` or `adapter_model.safetensors` is not there",
    Code.NOT_A_FILE: "a pipe, a socket, a device or a folder stands where a file should",
    Code.FILE_SIZE: "a file is larger than its bound",
    Code.FILE_CHANGED: "a file was written to while it was read",
    Code.PICKLE_FILE: "there is a pickle, which runs code when it is loaded; it is refused beside safetensors as well",
    Code.HEADER_SIZE: "the tensors' file cannot have a header of the length it names: it is cut, or no safetensors",
    Code.HEADER_JSON: "the header is no JSON object that every parser reads alike, or its metadata is not of texts",
    Code.TENSOR_COUNT: "the header names more tensors than the bound",
    Code.TENSOR_ENTRY: "a tensor's name, type, shape and place do not make sense together",
    Code.TENSOR_OVERLAP: "two tensors share bytes",
    Code.TENSOR_GAP: "there are bytes between two tensors that belong to none",
    Code.DATA_SIZE: "the data is shorter or longer than the header says",
    Code.STAMP_MISSING: "strict: the adapter has no stamp",
    Code.STAMP_VERSION: "the stamp is of a version that is unknown or, strict, not the current one",
    Code.STAMP_FIELD: "a field of the stamp is absent, malformed, or does not fit its own hash",
    Code.KV_CACHE_LAYOUT_HASH: "keys and values are cached in another layout than where it was trained",
    Code.NORM_EPS: "the base's layer norm has another epsilon; compared exactly",
    Code.ROPE_THETA: "the base has another rotary base, for a kind of layer; compared exactly",
    Code.BASE_IDENTITY: "strict: it was trained on a base of other bytes",
    Code.CONFIG_JSON: "the configuration is no JSON object that every parser reads alike",
    Code.CONFIG_FIELD: "a field that the arithmetic needs is absent, malformed, or a pattern that could take for ever",
    Code.PEFT_TYPE: "it is no LoRA",
    Code.TASK_TYPE: "it is for another task than causal language modelling",
    Code.UNSUPPORTED_FIELD: "a field changes what the tensors mean in a way that is not carried: DoRA, bias, PiSSA …",
    Code.UNKNOWN_FIELD: "a field that PEFT does not have, or not yet, is set",
    Code.KEY_PATTERN: "a tensor's name is not one that PEFT saves for LoRA",
    Code.UNKNOWN_MODULE: "a tensor is for a module that the base does not have: vLLM would serve the base",
    Code.LAYER_RANGE: "a tensor is for a layer beyond the base's last",
    Code.VOCABULARY: "there are tensors for the embeddings or the output head",
    Code.MISSING_PAIR: "a module has A without B, or B without A",
    Code.TARGET_WITHOUT_TENSORS: "a target of the configuration that the base has got no tensors: half of it is lost",
    Code.OUTSIDE_TARGETS: "a tensor is for a module outside `target_modules`: PEFT drops it, vLLM serves it",
    Code.SHAPE: "a tensor has not the shape that the base and the rank give",
    Code.ATTENTION_HEADS: "the same, by a whole number of attention heads: the KV cache would not line up",
    Code.RANK: "a tensor has another rank than the configuration promises: the change is served at another strength",
    Code.RANK_LIMIT: "the rank is above the servers' `max_lora_rank`",
    Code.DTYPE: "a tensor is not of bfloat16, float16 or float32",
    Code.NOT_FINITE: "a tensor has NaN or infinity: one poisons the answers of others through the KV cache",
    Code.ZERO_MODULE: "A or B of a module is all zero",
    Code.NO_EFFECT: "there is no tensor, or every module is without effect, as before training",
    Code.PARAMS_SHARE: "it has more parameters than one injection may bring, as share of the base's",
    Code.MORE: "there are more violations than the report lists",
}


@dataclass(frozen=True)
class Stage:
    """Where the animals of the zoo are shown: a base, and sound adapters to spoil."""

    base: Base
    plain: Path
    stamped: Path
    limits: Limits

    @classmethod
    def build(cls, folder: Path) -> Self:
        """Write base and adapters below a folder."""
        base = Base.load(zoo.write_base(folder / "base"))
        plain, stamped = (zoo.write_adapter(folder / name) for name in ("plain", "stamped"))
        metadata = stamp.of(base, Serving()).metadata()
        edit_header(stamped, lambda header: texts(header).update(metadata))
        share_ppm = verify(plain, base, Limits(zoo.MAX_LORA_RANK, PPM)).share_ppm
        return cls(base, plain, stamped, Limits(zoo.MAX_LORA_RANK, zoo.SHARE_TIMES * share_ppm))

    def show(self, name: str, root: Path) -> Report:
        """Verify one defective animal, in a new folder."""
        strict = name in zoo.STAMPS
        folder = shutil.copytree(self.stamped if strict else self.plain, root / "adapter")
        path = zoo.ANIMALS[name].spoil(folder)
        return verify(path, self.base, self.limits, root=root, demand=Demand(strict=strict))


def examples() -> Iterator[tuple[Code, Violation]]:
    """Yield each code that an animal has, with a violation of it: of an animal with this code alone, if there is."""
    with tempfile.TemporaryDirectory() as scratch:
        stage = Stage.build(Path(scratch) / "stage")
        for code in filter(_animal, Code):
            report = stage.show(_animal(code), Path(scratch) / code)
            yield code, next(found for found in report.violations if found.code == code)


def _animal(code: Code) -> str:
    """Return the name of the simplest animal that has a code; empty for what no file at rest can show."""
    bearing = [name for name, animal in zoo.ANIMALS.items() if code in animal.codes]
    return min(bearing, key=lambda name: len(zoo.ANIMALS[name].codes), default="")


def page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# What can be wrong with an adapter",
        "",
        "Generated by `python -m kite_upcycle.codes`. `kite adapter verify` and the event `adapter_refused` list every",
        "violation at once; a code is stable, the texts are for people. The examples are those of the zoo",
        "(`kite.testing.zoo`), which has a defective adapter for each code that files at rest can show.",
        "",
        "| code | meaning | at | expected | found |",
        "|---|---|---|---|---|",
        *_rows(),
    ]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[str]:
    shown = dict(examples())
    for code in Code:
        yield f"| `{code}` | {MEANINGS[code]} | {_cells(shown[code]) if code in shown else '| |'} |"


def _cells(example: Violation) -> str:
    texts = (example.where, example.expected, example.found)
    return " | ".join(f"`{text.replace('|', '¦')}`" for text in texts)


if __name__ == "__main__":
    sys.exit(run({PAGE: page()}, sys.argv[1:]))
