"""What one adapter is, told without a base: sizes, arithmetic, stamp."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kite_upcycle import lora, reader, stamp
from kite_upcycle.header import Entry
from kite_upcycle.lora import Lora
from kite_upcycle.reader import TENSORS_NAME, Findings
from kite_upcycle.stamp import Stamp
from kite_upcycle.verify import KEY
from kite_upcycle.violations import Violation


@dataclass(frozen=True)
class Card:
    """One adapter. `size_bytes` is of its tensors' file; `rank` the highest; `dtypes` in order of first occurrence.

    `settings` is None when the configuration cannot be read, `violations` hold why.
    """

    path: Path
    digest: str | None
    settings: Lora | None
    rank: int
    modules: int
    parameters: int
    dtypes: tuple[str, ...]
    size_bytes: int
    base_name: str | None
    stamp: Stamp | None
    violations: tuple[Violation, ...]


def card(path: Path) -> Card:
    """Read an adapter folder; bad content never raises."""
    with reader.examine(path) as findings:
        return _card(path, findings)


def _card(path: Path, findings: Findings) -> Card:
    settings, wrong = (None, []) if findings.config is None else lora.parse(findings.config)
    tensors = findings.tensors
    entries: Mapping[str, Entry] = {} if tensors is None else tensors.entries
    modules = {match["module"] for match in map(KEY.fullmatch, entries) if match}
    known, unsound = stamp.parse({} if tensors is None else tensors.metadata)
    recorded = (findings.config or {}).get("base_model_name_or_path")
    ranks = [settings.rank_of(module) for module in modules] or [settings.rank] if settings else []
    return Card(
        path=path,
        digest=findings.digest,
        settings=settings,
        rank=max(ranks, default=0),
        modules=len(modules),
        parameters=sum(entry.elements for entry in entries.values()),
        dtypes=tuple(dict.fromkeys(entry.dtype for entry in entries.values())),
        size_bytes=_size(path),
        base_name=recorded if isinstance(recorded, str) else None,
        stamp=known,
        violations=(*findings.violations, *wrong, *unsound),
    )


def _size(path: Path) -> int:
    """Return the size of the tensors' file, 0 when there is none."""
    try:
        return (path / TENSORS_NAME).lstat().st_size
    except OSError:
        return 0
