"""What an adapter must fit: the modules of a base, read from its configuration and the headers of its weights."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Self

from kite.errors import MissingPath
from kite_upcycle import files, strict
from kite_upcycle.fields import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, Fields, UnreadableBase
from kite_upcycle.geometry import Geometry, geometry, language
from kite_upcycle.header import Entry
from kite_upcycle.reader import read_header

# The matrices that map between tokens and vectors; an adapter of them is an adapter of the vocabulary.
VOCABULARY_LEAVES = frozenset({"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "word_embeddings"})
_MATRIX_DIMENSIONS = 2
# What else than the language model a multimodal base has layers of.
_OTHER_TOWERS = ("audio", "encoder", "speech", "vision", "visual")


@dataclass(frozen=True)
class Base:
    """A base model's layout. `modules` maps the path of each linear layer to its (out, in) features.

    `names` are those by which adapters may record it; `parameters` counts tied embeddings once; `weight_names` are file
    names. Fused layers (`qkv_proj`, `query_key_value`) are modules by the names that the weights have.
    """

    path: Path
    names: frozenset[str]
    geometry: Geometry
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
        attention, text = geometry(config, path), language(Fields(config, path)).config
        _agree(path, attention, modules)
        return cls(
            path=path,
            names=frozenset(_names(path, config)),
            geometry=attention,
            modules=modules,
            parameters=_parameters(
                entries, tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))
            ),
            weight_names=weight_names,
        )

    @property
    def layers(self) -> int:
        """Return the number of decoder layers."""
        return self.geometry.layers

    @property
    def head_dim(self) -> int:
        """Return the features of one query head."""
        return self.geometry.head_dim

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


def _agree(path: Path, attention: Geometry, modules: Mapping[str, tuple[int, int]]) -> None:
    """Hold the configuration against the weights: a wrong head count in it is wrong in every check that follows."""
    if not attention.known:
        return  # read by general names; its weights may follow rules that we do not know
    q_out, k_out, v_out, hidden = attention.q_out, attention.k_out, attention.v_out, attention.hidden
    expected = {"q_proj": q_out, "k_proj": k_out, "v_proj": v_out}
    expected |= dict.fromkeys(("qkv_proj", "query_key_value"), q_out + k_out + v_out)
    for module, found in modules.items():
        parts = module.split(".")
        wanted = (expected.get(parts[-1], found[0]), hidden)
        if parts[-1] in expected and found != wanted and not any(part.startswith(_OTHER_TOWERS) for part in parts):
            heads = f"{attention.heads} and {attention.kv_heads} heads of {attention.head_dim}"
            reason = f"{CONFIG_NAME}: head_dim, heads or hidden_size ({heads}) ask for {wanted} in {module}"
            raise UnreadableBase(path, f"{reason}, the weights have {found}")


def _parameters(entries: list[Entry], *, tied: bool) -> int:
    names = {entry.name.removesuffix(".weight").rsplit(".", 1)[-1] for entry in entries}
    twice = tied and {"embed_tokens", "lm_head"} <= names
    return sum(entry.elements for entry in entries if not (twice and entry.name.endswith("lm_head.weight")))
