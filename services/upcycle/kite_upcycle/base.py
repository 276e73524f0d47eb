"""What an adapter must fit: the modules of a base, read from its configuration and the headers of its weights."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import ClassVar, Self

from kite.errors import Fault, KiteError, MissingPath
from kite_upcycle import files, strict
from kite_upcycle.header import Entry
from kite_upcycle.reader import read_header
from kite_upcycle.violations import layer_number

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# The matrices that map between tokens and vectors; an adapter of them is an adapter of the vocabulary.
VOCABULARY_LEAVES = frozenset({"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "word_embeddings"})
_MATRIX_DIMENSIONS = 2


class UnreadableBase(KiteError):
    """The base folder is not a Hugging Face checkpoint in safetensors."""

    code: ClassVar[str] = "unreadable_base"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"base {path} cannot be read: {reason}",
            hint=f"a base is a folder with {CONFIG_NAME} and {SINGLE_NAME}, or shards with {INDEX_NAME}",
        )
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class Base:
    """A base model's layout. `modules` maps the path of each linear layer to its (out, in) features.

    `names` are those by which adapters may record it; `head_dim` is 0 when unknown; `parameters` counts tied embeddings
    once; `weight_names` are file names.
    """

    path: Path
    names: frozenset[str]
    layers: int
    head_dim: int
    modules: Mapping[str, tuple[int, int]]
    parameters: int
    weight_names: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read configuration and headers. Raises MissingPath or UnreadableBase."""
        if not path.is_dir():
            raise MissingPath(f"base {path} is not a folder", hint="give the folder that the servers are started with")
        config = _object(path, CONFIG_NAME)
        weight_names = _weight_names(path)
        entries = [entry for name in weight_names for entry in _entries(path, name)]
        modules = dict(_matrices(entries))
        if not modules:
            raise UnreadableBase(path, "no two-dimensional weights (packed quantised bases are not supported)")
        text = config.get("text_config")
        inner = text if isinstance(text, dict) else config
        return cls(
            path=path,
            names=frozenset(_names(path, config)),
            layers=_layers(inner, modules),
            head_dim=_head_dim(inner),
            modules=modules,
            parameters=_parameters(entries, tied=bool(inner.get("tie_word_embeddings"))),
            weight_names=weight_names,
        )

    @cached_property
    def digest(self) -> str:
        """Hex sha256 over configuration and weights, framed with names. Reads all weights (0.2 s for 270 MB)."""
        with ExitStack() as stack:
            named = [
                (name, stack.enter_context(FileIO(self.path / name))) for name in (CONFIG_NAME, *self.weight_names)
            ]
            return files.frame(named)


def _object(path: Path, name: str) -> dict[str, strict.JSON]:
    """Read a JSON object of the operator's own: what others write there (infinities, say) is let through."""
    try:
        document: strict.JSON = json.loads((path / name).read_bytes())
    except (OSError, ValueError) as error:
        raise UnreadableBase(path, f"{name}: {error}") from error
    if not isinstance(document, dict):
        raise UnreadableBase(path, f"{name} holds no object")
    return document


def _weight_names(path: Path) -> tuple[str, ...]:
    if (path / SINGLE_NAME).is_file():
        return (SINGLE_NAME,)
    weight_map = _object(path, INDEX_NAME).get("weight_map")
    names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    if not names or any("/" in name or name.startswith(".") for name in names):
        raise UnreadableBase(path, f"{INDEX_NAME} names no files of this folder")
    return tuple(names)


def _entries(path: Path, name: str) -> list[Entry]:
    try:
        with FileIO(path / name) as file:
            found, violations = read_header(file)
    except OSError as error:
        raise UnreadableBase(path, f"{name}: {error.strerror}") from error
    if found is None or violations:
        raise UnreadableBase(path, f"{name}: {violations[0]}")
    return list(found.entries.values())


def _matrices(entries: list[Entry]) -> Iterator[tuple[str, tuple[int, int]]]:
    for entry in entries:
        if entry.name.endswith(".weight") and len(entry.shape) == _MATRIX_DIMENSIONS:
            yield entry.name.removesuffix(".weight"), (entry.shape[0], entry.shape[1])


def _names(path: Path, config: dict[str, strict.JSON]) -> Iterator[str]:
    yield path.resolve().name
    recorded = config.get("_name_or_path")
    if isinstance(recorded, str) and recorded:
        yield recorded.rstrip("/").rsplit("/", 1)[-1]


def _layers(config: dict[str, strict.JSON], modules: dict[str, tuple[int, int]]) -> int:
    recorded = config.get("num_hidden_layers")
    if isinstance(recorded, int):
        return recorded
    return 1 + max((number for number in map(layer_number, modules) if number is not None), default=-1)


def _head_dim(config: dict[str, strict.JSON]) -> int:
    """Return the width of one attention head, 0 when the configuration does not say."""
    recorded, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0


def _parameters(entries: list[Entry], *, tied: bool) -> int:
    names = {entry.name.removesuffix(".weight").rsplit(".", 1)[-1] for entry in entries}
    twice = tied and {"embed_tokens", "lm_head"} <= names
    return sum(entry.elements for entry in entries if not (twice and entry.name.endswith("lm_head.weight")))
