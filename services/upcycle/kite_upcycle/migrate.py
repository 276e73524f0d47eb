"""Bringing stamps of version 1 to version 2, in place, after a backup beside each adapter.

A stamp carries the record that its hash is of, so that no base is needed: whole rotary bases become float64, and the
hash is computed anew. A record that the old hash does not fit is not migrated: it would give the mistake a new hash.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kite import __version__
from kite.errors import KiteError, MissingPath, UsageError
from kite_upcycle import layout, reader, stamp
from kite_upcycle.imprint import stamped
from kite_upcycle.layout import CURRENT_VERSION, Scalar
from kite_upcycle.reader import CONFIG_NAME, MANIFEST_NAME, TENSORS_NAME
from kite_upcycle.rewrite import rewrite
from kite_upcycle.stamp import VERSION, Stamp
from kite_upcycle.violations import UnreadableAdapter, clip

# The stamps' version by that of the tool that wrote them: 3.5 is how those of version 1 are known to their users.
WRITTEN_BY: Mapping[str, int] = {"3.5": 1, "1": 1}
BACKUP_NAME = f"{TENSORS_NAME}.v1.bak"
DEPTH_MAX = 4  # folders below the one that is named

State = Literal["migrate", "current", "unstamped", "newer", "unreadable", "stored"]


@dataclass(frozen=True)
class Step:
    """What is to be done with one adapter; `why` says more where nothing can be done."""

    path: Path
    state: State
    why: str = ""


@dataclass(frozen=True)
class Migrated:
    """What was done. `error` is None when the stamp is of version 2 now; else the adapter is as it was."""

    step: Step
    error: KiteError | None


def source_version(text: str) -> int:
    """Return the version of stamps that `--from-version` means. Raises UsageError for the newest: there is no way back.

    >>> source_version("3.5")
    1
    """
    if text in WRITTEN_BY:
        return WRITTEN_BY[text]
    if text == str(CURRENT_VERSION):
        raise UsageError(
            f"stamps of version {text} are the newest, and there is no way back from them",
            hint=f"an adapter's old file lies beside it as {BACKUP_NAME}",
        )
    raise UsageError(f"no stamps of version {text!r} are known", hint="3.5 (or 1) is what can be migrated from")


def plan(path: Path, version: int) -> list[Step]:
    """Say what there is to do with the adapter at `path`, or with each below it, sorted by path. Changes nothing."""
    return [_step(folder, version) for folder in folders(path)]


def folders(path: Path) -> list[Path]:
    """Return the adapters at or below a folder, sorted: symlinks and hidden folders are not followed.

    Raises MissingPath for a folder that cannot be listed.
    """
    return sorted(_below(path, DEPTH_MAX))


def _below(path: Path, depth: int) -> Iterator[Path]:
    if (path / CONFIG_NAME).exists() or (path / TENSORS_NAME).exists():
        yield path
    elif depth:
        for child in _children(path):
            if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                yield from _below(child, depth - 1)


def _children(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError as error:
        raise MissingPath(f"{path} cannot be listed: {error.strerror}", hint="name a folder of adapters") from error


def _step(path: Path, version: int) -> Step:
    with reader.examine(path) as findings:
        if findings.violations or findings.tensors is None:
            return Step(path, "unreadable", str(findings.violations[0]) if findings.violations else "no tensors")
        return _state(path, findings.tensors.metadata, version)


def _state(path: Path, metadata: Mapping[str, str], version: int) -> Step:
    if (path / MANIFEST_NAME).exists():
        return Step(path, "stored", "its digest names it: inject its members again")
    found = metadata.get(VERSION)
    known, violations = stamp.parse(metadata)
    if found is None and not violations:
        return Step(path, "unstamped")
    if found is not None and found.isdecimal() and found.isascii() and int(found) > CURRENT_VERSION:
        return Step(path, "newer", f"version {clip(found)} is of a newer kite")
    if known is None or violations:
        return Step(path, "unreadable", str(violations[0]))
    return Step(path, "migrate" if known.version == version else "current")


def migrate(steps: Sequence[Step], on_step: Callable[[Step], None]) -> Iterator[Migrated]:
    """Do what was planned, one adapter after the other; one that fails does not keep the others."""
    for step in steps:
        if step.state != "migrate":
            continue
        on_step(step)
        try:
            rewrite(step.path, raised, backup=BACKUP_NAME)
        except KiteError as error:
            yield Migrated(step, error)
        else:
            yield Migrated(step, None)


def raised(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return metadata with its stamp at the current version; others are returned as they are.

    Raises UnreadableAdapter for a stamp that does not hold together.
    """
    old, violations = stamp.parse(metadata)
    if violations:
        raise UnreadableAdapter(TENSORS_NAME, tuple(violations))
    if old is None or old.version >= CURRENT_VERSION:
        return dict(metadata)
    return stamped(metadata, _raised(old))


def _raised(old: Stamp) -> Stamp:
    fields = {name: _theta(value) if name.endswith(".rope_theta") else value for name, value in old.layout.items()}
    digest = layout.hash_of(fields, CURRENT_VERSION)
    return replace(old, version=CURRENT_VERSION, layout_hash=digest, layout=fields, tool=__version__)


def _theta(value: Scalar) -> Scalar:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
