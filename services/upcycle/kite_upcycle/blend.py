"""Blending: one ordinary LoRA adapter whose B·A is Σ wᵢ sᵢ BᵢAᵢ (ADR 0006).

Per module, A is the members' A stacked by rows and B the members' wᵢ sᵢ B side by side; ranks add up. What is more than
the servers hold is recompressed to their rank, exactly, and the blend says what that loses. Scaling is folded into B,
`lora_alpha` equals `r`, and modules of lower rank are padded with zeros, so that one rank holds for all.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

from kite.clock import mono_us
from kite.errors import Fault, KiteError, UsageError
from kite_schemas.policy import LORA_RANKS
from kite_upcycle import factors, lora, verify
from kite_upcycle.base import Base
from kite_upcycle.factors import Factors, Part, Scratch
from kite_upcycle.reader import CONFIG_NAME, SUPPORTED_DTYPES, TENSORS_NAME, Adapter, one_thread, read
from kite_upcycle.recompress import Spectrum, recompress, residual, whole
from kite_upcycle.store import MAX_MEMBERS, Manifest, MemberRecord, Method
from kite_upcycle.verify import PPM, Pair
from kite_upcycle.writer import Writer

Device = Literal["cpu", "cuda"]
RESIDUALS_MAX = 1_024  # modules whose residual a manifest lists, the largest first
_PRECISE_MAX = 2.0**-11  # a module that loses less is stored in single precision: half would add as much again


class MemberChanged(KiteError):
    """A member's files are not those that were verified."""

    code: ClassVar[str] = "member_changed"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__(
            f"adapter {path} has digest {found}, not {expected}", hint="an adapter must not change: inject it again"
        )
        self.expected = expected
        self.found = found


class RankExceeded(KiteError):
    """The ranks of the members add up to more than the servers hold, and nothing may be lost."""

    code: ClassVar[str] = "rank_exceeded"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, rank: int, max_lora_rank: int) -> None:
        super().__init__(
            f"the blend needs rank {rank}, the servers hold {max_lora_rank}",
            hint=f"{_servers(_allowed(rank))}blend fewer members, or set upcycle.residual_max_ppm: what it may lose",
        )
        self.rank = rank
        self.max_lora_rank = max_lora_rank


class ResidualExceeded(KiteError):
    """Recompressed to the rank that the servers hold, the blend would lose more than it may."""

    code: ClassVar[str] = "residual_exceeded"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, rank: int, residual_ppm: int, residual_max_ppm: int, enough: int | None) -> None:
        super().__init__(
            f"recompressed to rank {rank} the blend loses {_percent(residual_ppm)}, it may lose"
            f" {_percent(residual_max_ppm)}",
            hint=f"{_servers(enough)}blend fewer members, or raise upcycle.residual_max_ppm to {residual_ppm}",
        )
        self.rank = rank
        self.residual_ppm = residual_ppm
        self.residual_max_ppm = residual_max_ppm
        self.enough = enough


class DeviceAbsent(KiteError):
    """Blending was to run on a device that this process does not see."""

    code: ClassVar[str] = "device_absent"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, device: str) -> None:
        super().__init__(f"there is no {device} device here", hint="blend on the CPU, or give the process the device")
        self.device = device


def _percent(ppm: int) -> str:
    return f"{ppm / 10_000:.2f} %"


def _allowed(rank: int) -> int | None:
    """Return the smallest --max-lora-rank that holds a rank."""
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), None)


def _servers(rank: int | None) -> str:
    return "" if rank is None else f"start the servers with --max-lora-rank {rank}, "


class Unblendable(KiteError):
    """The members cannot be combined: one of them does not keep the contract, or numbers overflow."""

    code: ClassVar[str] = "unblendable"
    fault: ClassVar[Fault] = Fault.USER


@dataclass(frozen=True)
class Member:
    """One adapter of a blend: its folder, its weight in ppm, and the digest under which it was verified."""

    path: Path
    weight_ppm: int
    digest: str


@dataclass(frozen=True)
class Blend:
    """The outcome. `residual_ppm` is what recompressing loses, rounding apart, over all modules: relative Frobenius.

    `residuals` holds it per module, of recompressed ones. `parameters` includes padding.
    """

    members: tuple[Member, ...]
    method: Method
    rank: int
    residual_ppm: int
    parameters: int
    share_ppm: int
    modules: int
    duration_us: int
    residuals: Mapping[str, int] = field(default_factory=dict[str, int])

    def manifest(self, base_digest: str) -> Manifest:
        """Return the record that the store keeps beside the tensors."""
        listed = sorted(self.residuals.items(), key=lambda found: (-found[1], found[0]))[:RESIDUALS_MAX]
        return Manifest(
            members=tuple(MemberRecord(digest=member.digest, weight_ppm=member.weight_ppm) for member in self.members),
            method=self.method,
            rank=self.rank,
            residual_ppm=self.residual_ppm,
            residuals=dict(listed),
            parameters=self.parameters,
            base=base_digest,
            tool=f"kite {version('kite-control-plane')}",
        )


@dataclass(frozen=True)
class Plan:
    """What is written: the modules in order of their paths, each with the same rank, which the servers hold."""

    parts: tuple[Part, ...]
    modules: tuple[str, ...]
    full_rank: int
    rank: int
    base: Base
    device: Device

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors, padding included."""
        return self.rank * sum(sum(self.base.modules[module]) for module in self.modules)

    @property
    def method(self) -> Method:
        """How the members become one."""
        return "concatenate" if self.full_rank <= self.rank else "recompress"

    def parts_of(self, module: str) -> list[Part]:
        """Return the members that have a module, in their order."""
        return [part for part in self.parts if module in part.pairs]

    def rank_of(self, module: str) -> int:
        """Return the sum of the ranks of a module: what it needs to be exact."""
        return sum(part.rank_of(module) for part in self.parts_of(module))


def combine(
    members: Sequence[Member],
    out_dir: Path,
    *,
    base: Base,
    max_lora_rank: int,
    residual_max_ppm: int | None = None,
    root: Path | None = None,
    device: Device = "cpu",
) -> Blend:
    """Blend verified members into an adapter in the existing folder `out_dir`; their order does not matter.

    Concatenated when the ranks sum to `max_lora_rank` at most, else recompressed to it, which may lose
    `residual_max_ppm` (absent: nothing may be lost). The same members, weights and base layout give the same bytes on
    the same machine. One module is in memory at a time. Raises UsageError for impossible weights, DeviceAbsent,
    UnreadableAdapter, MemberChanged, RankExceeded, ResidualExceeded, or Unblendable.
    """
    started_us = mono_us()
    ordered = _ordered(members)
    _check_device(device)
    with one_thread(), ExitStack() as stack:
        parts = tuple(_part(stack.enter_context(read(member.path, root=root)), member, base) for member in ordered)
        plan = _plan(parts, base, max_lora_rank, device)
        if plan.method == "recompress" and residual_max_ppm is None:
            raise RankExceeded(plan.full_rank, max_lora_rank)
        spectra = _write(plan, out_dir)
        _check_unchanged(plan)
    lost_ppm = _ppm(residual(spectra.values(), plan.rank))
    if residual_max_ppm is not None and lost_ppm > residual_max_ppm:
        raise ResidualExceeded(plan.rank, lost_ppm, residual_max_ppm, _enough(spectra, plan.rank, residual_max_ppm))
    return Blend(
        members=ordered,
        method=plan.method,
        rank=plan.rank,
        residual_ppm=lost_ppm,
        residuals={
            module: _ppm(residual([spectrum], plan.rank))
            for module, spectrum in spectra.items()
            if len(spectrum.energies) > 1
        },
        parameters=plan.parameters,
        share_ppm=verify.share_ppm(plan.parameters, base),
        modules=len(plan.modules),
        duration_us=mono_us() - started_us,
    )


def _check_unchanged(plan: Plan) -> None:
    """What was read is what was hashed, unless a file was written to in between."""
    for part in plan.parts:
        for found in part.adapter.tensors.changed():
            raise MemberChanged(part.adapter.path, part.adapter.digest, found.found)


def _check_device(device: Device) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceAbsent(device)


def _ppm(share: float) -> int:
    return min(PPM, round(share * PPM))


def _enough(spectra: Mapping[str, Spectrum], rank: int, residual_max_ppm: int) -> int | None:
    """Return the next --max-lora-rank at which the blend would lose no more than it may."""
    higher = (allowed for allowed in LORA_RANKS if allowed > rank)
    return next((allowed for allowed in higher if _ppm(residual(spectra.values(), allowed)) <= residual_max_ppm), None)


def _plan(parts: tuple[Part, ...], base: Base, max_lora_rank: int, device: Device) -> Plan:
    modules = tuple(sorted({module for part in parts for module in part.pairs}))
    rank = max(sum(part.rank_of(module) for part in parts if module in part.pairs) for module in modules)
    return Plan(parts, modules, rank, min(rank, max_lora_rank), base, device)


def _ordered(members: Sequence[Member]) -> tuple[Member, ...]:
    if not 1 <= len(members) <= MAX_MEMBERS:
        raise UsageError(f"a blend has 1 to {MAX_MEMBERS} members, not {len(members)}")
    if len({member.digest for member in members}) < len(members):
        raise UsageError("a member is listed twice", hint="give it once, with the sum of its weights")
    weights = [member.weight_ppm for member in members]
    if min(weights) < 1 or sum(weights) > PPM:
        raise UsageError(f"weights {weights} ppm: each must be positive and their sum at most {PPM}")
    return tuple(sorted(members, key=lambda member: member.digest))


def _part(adapter: Adapter, member: Member, base: Base) -> Part:
    if adapter.digest != member.digest:
        raise MemberChanged(member.path, member.digest, adapter.digest)
    settings, violations = lora.parse(adapter.config)
    pairs, named = verify.resolve(adapter.tensors.entries, base)
    violations += named
    if violations or settings is None or not pairs:
        raise Unblendable(f"adapter {member.path}: {violations[0] if violations else 'no tensors'}")
    for pair in pairs:
        _check_shapes(pair, base, member.path)
    return Part(adapter, settings, {pair.module: pair for pair in pairs}, member.weight_ppm)


def _check_shapes(pair: Pair, base: Base, path: Path) -> None:
    """The verified contract once more, as far as the arithmetic below relies on it."""
    out_features, in_features = base.modules[pair.module]
    if pair.a is not None and pair.b is not None and pair.a.shape:
        rank = pair.a.shape[0]
        fits = (pair.a.shape, pair.b.shape) == ((rank, in_features), (out_features, rank)) and rank > 0
        if fits and {pair.a.dtype, pair.b.dtype} <= set(SUPPORTED_DTYPES):
            return
    raise Unblendable(f"adapter {path}: {pair.module} does not fit the base", hint="run `kite adapter verify` on it")


def _write(plan: Plan, out_dir: Path) -> dict[str, Spectrum]:
    """Write tensors and configuration; return what every module holds (nothing of it when all is concatenated)."""
    keys = [factors.key(module, side) for module in plan.modules for side in "AB"]
    spectra: dict[str, Spectrum] = {}
    scratch = Scratch()
    with Writer(out_dir / TENSORS_NAME, keys, plan.parameters) as file:
        for module in plan.modules:
            made, spectrum = _module(plan, module, scratch)
            if spectrum is not None:
                spectra[module] = spectrum
            precise = spectrum is not None and made.weights is not None and _is_close(spectrum, plan.rank)
            stored = factors.store(made, scratch, precise=precise)
            if stored is None:
                raise _endless(module)
            for side, tensor in zip("AB", stored, strict=True):
                file.write(factors.key(module, side), tensor)
    text = json.dumps(_config(plan), sort_keys=True, indent=2) + "\n"
    (out_dir / CONFIG_NAME).write_text(text, encoding="ascii")
    return spectra


def _module(plan: Plan, module: str, scratch: Scratch) -> tuple[Factors, Spectrum | None]:
    """Return the factors of one module at the blend's rank, with their spectrum where something may be lost."""
    rank = plan.rank_of(module)
    stacked = factors.stack(plan.parts_of(module), module, plan.base.modules[module], max(rank, plan.rank), scratch)
    if plan.method == "concatenate":
        return stacked, None
    if not factors.is_finite(stacked):
        raise _endless(module)
    stacked = stacked.to(plan.device)
    if rank <= plan.rank:
        return stacked.to("cpu"), whole(stacked, scratch)
    made, spectrum = recompress(stacked, plan.rank, scratch)
    return made.to("cpu"), spectrum


def _endless(module: str) -> Unblendable:
    return Unblendable(f"{module} has no finite single-precision form", hint="lower lora_alpha, or train again")


def _is_close(spectrum: Spectrum, rank: int) -> bool:
    """Say whether a module loses so little that rounding to half precision would be seen beside it."""
    return spectrum.total > 0 and residual([spectrum], rank) < _PRECISE_MAX


def _config(plan: Plan) -> dict[str, object]:
    return {
        "alpha_pattern": {},
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": plan.rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": plan.rank,
        "rank_pattern": {},
        "target_modules": _targets(plan.modules, plan.base),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(modules: tuple[str, ...], base: Base) -> list[str]:
    """Return the short names where they select exactly these modules of the base, else the full paths."""
    leaves = {module.rsplit(".", 1)[-1] for module in modules}
    selected = tuple(module for module in sorted(base.modules) if module.rsplit(".", 1)[-1] in leaves)
    return sorted(leaves) if selected == modules else list(modules)
