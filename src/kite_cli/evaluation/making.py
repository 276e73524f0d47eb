"""The adapters of an evaluation: each checked against the base, then blended as the fleet would blend them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kite.errors import Fault, KiteError, MissingPath
from kite_arbitrator import shipped
from kite_cli.evaluation.recipes import Asked, Recipe
from kite_cli.output import count
from kite_cli.share import PPM
from kite_schemas.policy import LORA_RANKS
from kite_upcycle.base import Base
from kite_upcycle.blend import Blend, Member, combine
from kite_upcycle.verify import Limits, Report, verify

SHOWN_MAX = 5  # violations of one adapter in the message


class AdapterUnfit(KiteError):
    """Adapters do not fit the base; `reports` holds what was found, by member."""

    code: ClassVar[str] = "adapter_unfit"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, base: Path, reports: Mapping[str, Report]) -> None:
        told = [
            line
            for name, report in reports.items()
            for line in (
                f"{name} breaks the contract of {base.name}: {count(len(report.violations), 'violation')}",
                *(f"  {violation}" for violation in report.violations[:SHOWN_MAX]),
            )
        ]
        super().__init__("\n".join(told), hint="`kite adapter verify PATH --base BASE` lists every violation")
        self.reports = reports


@dataclass(frozen=True, slots=True)
class Made:
    """A blend as an adapter: its recipe, its folder, and how it was blended."""

    recipe: Recipe
    path: Path
    blend: Blend

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.blend.rank


def check(asked: Asked, base: Base, max_lora_rank: int) -> dict[str, Report]:
    """Verify every member. Raises MissingPath, and AdapterUnfit with all that do not fit."""
    for name, path in asked.members.items():
        if not path.is_dir():
            hint = f"give the folder of {name}, as PEFT's save_pretrained wrote it"
            raise MissingPath(f"adapter {path} is not a folder", hint=hint)
    limits = Limits(max_lora_rank, shipped.policy().upcycle.params_share_max_ppm)
    reports = {name: verify(path, base, limits) for name, path in asked.members.items()}
    unfit = {name: report for name, report in reports.items() if not report.accepted}
    if unfit:
        raise AdapterUnfit(base.path, unfit)
    return reports


def make(asked: Asked, reports: Mapping[str, Report], base: Base, folder: Path, max_lora_rank: int) -> tuple[Made, ...]:
    """Write every blend to a folder of its own below `folder`, of `max_lora_rank` at most.

    What does not fit is recompressed, whatever that loses: it is reported. Raises the errors of the blend.
    """
    found: list[Made] = []
    for number, recipe in enumerate(asked.recipes, 1):
        members = [_member(share.member, share.weight_ppm, asked, reports) for share in recipe.shares]
        out = folder / f"blend-{number}"
        out.mkdir()
        done = combine(members, out, base=base, max_lora_rank=max_lora_rank, residual_max_ppm=PPM)
        found.append(Made(recipe, out, done))
    return tuple(found)


def _member(name: str, weight_ppm: int, asked: Asked, reports: Mapping[str, Report]) -> Member:
    digest = reports[name].digest
    assert digest is not None  # noqa: S101 # an accepted report has one; this tells the type checker
    return Member(asked.members[name], weight_ppm, digest)


def server_rank(ranks: Sequence[int]) -> int:
    """Return the smallest `--max-lora-rank` that holds all: on CPU every LoRA costs as much as that rank would.

    >>> server_rank([4, 12])
    16
    """
    return min(allowed for allowed in LORA_RANKS if allowed >= max(ranks))
