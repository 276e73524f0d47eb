"""Stamping an adapter: it is verified against its base first, and changed only where the stamp would change."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from kite.errors import Fault, KiteError
from kite_upcycle import reader, stamp
from kite_upcycle.base import Base
from kite_upcycle.layout import Serving
from kite_upcycle.lora import MAX_RANK
from kite_upcycle.rewrite import rewrite
from kite_upcycle.stamp import PREFIX, Stamp
from kite_upcycle.verify import PPM, Limits, Report, verify
from kite_upcycle.violations import clip

# A stamp says what was trained on what; how large an adapter servers take is asked when it is verified for them.
ANY_SIZE = Limits(max_lora_rank=MAX_RANK, params_share_max_ppm=PPM)
SHORT_CHARS = 12

Outcome = Literal["stamped", "unchanged", "refused"]


class StampedForAnother(KiteError):
    """The adapter has a stamp for another base."""

    code: ClassVar[str] = "stamped_for_another"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, path: Path, theirs: str, ours: str) -> None:
        super().__init__(
            f"adapter {path} is stamped for base {clip(theirs)[:SHORT_CHARS]}, this one is {ours[:SHORT_CHARS]}",
            hint="name the base that it was trained on, or --force when that base was only saved again",
        )
        self.theirs = theirs
        self.ours = ours


@dataclass(frozen=True)
class Imprint:
    """What came of it. `stamp` is what the adapter has or would have; `digest` is its digest then, None if unknown."""

    outcome: Outcome
    stamp: Stamp
    report: Report
    digest: str | None


def imprint(path: Path, base: Base, serving: Serving, *, dry_run: bool = False, force: bool = False) -> Imprint:
    """Stamp the adapter in folder `path`, unless it breaks the contract; `dry_run` only says what would happen.

    Raises StampedForAnother, UnhashableLayout, and what `rewrite` raises.
    """
    new = stamp.of(base, serving)
    before = _metadata(path)
    theirs = before.get(stamp.BASE, new.base)
    if theirs != new.base and not force:
        raise StampedForAnother(path, theirs, new.base)
    report = verify(path, base, ANY_SIZE, demand=None)
    if not report.accepted:
        return Imprint("refused", new, report, report.digest)
    if _is_stamped(before, new):
        return Imprint("unchanged", new, report, report.digest)
    if dry_run:
        return Imprint("stamped", new, report, None)
    rewrite(path, lambda metadata: stamped(metadata, new), digest=report.digest)
    return Imprint("stamped", new, report, reader.digest(path))


def stamped(metadata: Mapping[str, str], new: Stamp) -> dict[str, str]:
    """Return metadata with a stamp in the place of an earlier one."""
    return {name: text for name, text in metadata.items() if not name.startswith(PREFIX)} | new.metadata()


def _is_stamped(metadata: Mapping[str, str], new: Stamp) -> bool:
    """Say whether the same stamp is there; which version of kite wrote it does not matter."""
    tool = metadata.get(stamp.TOOL)
    return tool is not None and metadata == stamped(metadata, replace(new, tool=tool))


def _metadata(path: Path) -> Mapping[str, str]:
    """Return the metadata, empty when the file cannot be read: verifying says why."""
    with reader.examine(path) as findings:
        return findings.tensors.metadata if findings.tensors is not None else {}
