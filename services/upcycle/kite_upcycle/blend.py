"""Blending by concatenation: one ordinary LoRA adapter whose B·A is exactly Σ wᵢ sᵢ BᵢAᵢ (ADR 0006).

Per module, A is the members' A stacked by rows and B the members' wᵢ sᵢ B side by side; ranks add up. Scaling is folded
into B, `lora_alpha` equals `r`, and modules of lower rank are padded with zeros, so that one rank holds for all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar

from kite.clock import mono_us
from kite.errors import Fault, KiteError, UsageError
from kite_upcycle import header, lora, verify
from kite_upcycle.base import Base
from kite_upcycle.header import DTYPE_BYTES, Entry
from kite_upcycle.lora import Lora
from kite_upcycle.reader import CONFIG_NAME, SUPPORTED_DTYPES, TENSORS_NAME, Adapter, one_thread, read
from kite_upcycle.store import MAX_MEMBERS, Manifest, MemberRecord
from kite_upcycle.verify import PPM, Pair

if TYPE_CHECKING:
    import torch

METHOD = "concatenate"
SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM accepts as --max-lora-rank
# Half precision rounds to 2^-12 of a value (its root mean square over a binade: 2e-4), down to steps of 2^-24 for small
# ones. In a row whose root mean square is at least 2^-14 those steps (2^-24/√12 each) add 3e-4 at most, so that a
# product stays within 1e-3; one row below sends the whole blend to single precision.
_F16_RMS_MIN = 2.0**-14
_F16_MAX = 65_504.0
_MAX_SHIFT = 100  # single precision has exponents to 127


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
    """The ranks of the members add up to more than the servers hold."""

    code: ClassVar[str] = "rank_exceeded"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, rank: int, max_lora_rank: int) -> None:
        enough = next((allowed for allowed in SERVER_RANKS if allowed >= rank), None)
        larger = "" if enough is None else f"start the servers with --max-lora-rank {enough}, or "
        super().__init__(
            f"the blend needs rank {rank}, the servers hold {max_lora_rank}", hint=f"{larger}blend fewer members"
        )
        self.rank = rank
        self.max_lora_rank = max_lora_rank


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
    """The outcome. `residual_ppm` is what the method loses, rounding apart: nothing. `parameters` includes padding."""

    members: tuple[Member, ...]
    rank: int
    residual_ppm: int
    parameters: int
    share_ppm: int
    modules: int
    duration_us: int

    def manifest(self, base_digest: str) -> Manifest:
        """Return the record that the store keeps beside the tensors."""
        return Manifest(
            members=tuple(MemberRecord(digest=member.digest, weight_ppm=member.weight_ppm) for member in self.members),
            method=METHOD,
            rank=self.rank,
            residual_ppm=self.residual_ppm,
            parameters=self.parameters,
            base=base_digest,
            tool=f"kite {version('kite-control-plane')}",
        )


@dataclass(frozen=True)
class Part:
    """An opened member: where its tensors are, and by how much each module counts."""

    adapter: Adapter
    settings: Lora
    pairs: Mapping[str, Pair]
    weight_ppm: int

    def rank_of(self, module: str) -> int:
        """Return the rank of a module that this member has."""
        a = self.pairs[module].a
        assert a is not None  # noqa: S101 - `_part` refuses single sides; this tells the type checker
        return a.shape[0]

    def factors(self, module: str) -> "tuple[torch.Tensor, torch.Tensor]":
        """Load A (rank, in) and w·s·Bᵀ (rank, out) in single precision: each row is one component of the sum."""
        import torch

        a = self.adapter.tensors.load(_key(module, "A")).float()
        b = self.adapter.tensors.load(_key(module, "B")).t()
        rows = b.to(torch.float32, memory_format=torch.contiguous_format)  # reducing over rows is 15 times faster
        return a, rows.mul(self.weight_ppm / PPM * self.settings.scale_of(module))


@dataclass(frozen=True)
class Plan:
    """What is written: the modules in order of their paths, each with the same rank."""

    parts: tuple[Part, ...]
    modules: tuple[str, ...]
    rank: int
    base: Base

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors, padding included."""
        return self.rank * sum(sum(self.base.modules[module]) for module in self.modules)

    def parts_of(self, module: str) -> list[Part]:
        """Return the members that have a module, in their order."""
        return [part for part in self.parts if module in part.pairs]


def concatenate(
    members: Sequence[Member], out_dir: Path, *, base: Base, max_lora_rank: int, root: Path | None = None
) -> Blend:
    """Blend verified members into an adapter in the existing folder `out_dir`; their order does not matter.

    The same members, weights and base layout give the same bytes. One module is in memory at a time. Raises UsageError
    for impossible weights, UnreadableAdapter, MemberChanged, RankExceeded, or Unblendable.
    """
    started_us = mono_us()
    ordered = _ordered(members)
    with one_thread(), ExitStack() as stack:
        parts = tuple(_part(stack.enter_context(read(member.path, root=root)), member, base) for member in ordered)
        plan = _plan(parts, base)
        if plan.rank > max_lora_rank:
            raise RankExceeded(plan.rank, max_lora_rank)
        _write(plan, out_dir)
    return Blend(
        members=ordered,
        rank=plan.rank,
        residual_ppm=0,
        parameters=plan.parameters,
        share_ppm=verify.share_ppm(plan.parameters, base),
        modules=len(plan.modules),
        duration_us=mono_us() - started_us,
    )


def _plan(parts: tuple[Part, ...], base: Base) -> Plan:
    modules = tuple(sorted({module for part in parts for module in part.pairs}))
    rank = max(sum(part.rank_of(module) for part in parts if module in part.pairs) for module in modules)
    return Plan(parts, modules, rank, base)


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


def _write(plan: Plan, out_dir: Path) -> None:
    """Write tensors in half precision, or in single precision when their range does not fit; then the configuration."""
    if not any(_write_tensors(plan, out_dir / TENSORS_NAME, dtype) for dtype in ("F16", "F32")):
        raise Unblendable("the blend has no finite single-precision form", hint="lower lora_alpha, or train again")
    text = json.dumps(_config(plan), sort_keys=True, indent=2) + "\n"
    (out_dir / CONFIG_NAME).write_text(text, encoding="ascii")


def _write_tensors(plan: Plan, path: Path, dtype: str) -> bool:
    with path.open("wb") as file:
        file.write(header.build(list(_entries(plan, dtype))))
        return all(_write_module(plan, module, file, dtype) for module in plan.modules)


def _entries(plan: Plan, dtype: str) -> Iterator[Entry]:
    start = 0
    for module in plan.modules:
        out_features, in_features = plan.base.modules[module]
        for side, shape in (("A", (plan.rank, in_features)), ("B", (out_features, plan.rank))):
            stop = start + shape[0] * shape[1] * DTYPE_BYTES[dtype]
            yield Entry(_key(module, side), dtype, shape, start, stop)
            start = stop


def _key(module: str, side: str) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def _write_module(plan: Plan, module: str, file: BinaryIO, dtype: str) -> bool:
    """Write A and B of one module; false when `dtype` cannot hold them."""
    import torch

    out_features, in_features = plan.base.modules[module]
    stored = torch.float16 if dtype == "F16" else torch.float32
    # Plain buffers seen as tensors: torch fills them and the file takes them, without numpy and without a copy.
    raw_a = bytearray(plan.rank * in_features * DTYPE_BYTES[dtype])
    raw_b = bytearray(out_features * plan.rank * DTYPE_BYTES[dtype])
    stacked_a = torch.frombuffer(raw_a, dtype=stored).reshape(plan.rank, in_features)
    stacked_b = torch.frombuffer(raw_b, dtype=stored).reshape(out_features, plan.rank)
    at = 0
    for part in plan.parts_of(module):
        a, b = _balance(*part.factors(module))
        if not (_fits(a, dtype) and _fits(b, dtype)):
            return False
        stacked_a[at : at + a.shape[0]] = a
        stacked_b[:, at : at + a.shape[0]] = b.t()
        at += a.shape[0]
    file.write(raw_a)
    file.write(raw_b)
    return True


def _balance(a: "torch.Tensor", b: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Move powers of two between each row of A and of Bᵀ until both have the same magnitude.

    Exact, and their product is unchanged: it brings both into the range where half precision is fine.
    """
    import torch

    height_a, height_b = a.abs().amax(dim=1), b.abs().amax(dim=1)
    shift = torch.div(torch.frexp(height_a).exponent - torch.frexp(height_b).exponent, 2, rounding_mode="floor")
    shift = torch.where((height_a > 0) & (height_b > 0), shift, 0).clamp(-_MAX_SHIFT, _MAX_SHIFT)
    return a * _power_of_two(-shift).unsqueeze(1), b * _power_of_two(shift).unsqueeze(1)


def _power_of_two(exponent: "torch.Tensor") -> "torch.Tensor":
    """Return 2^exponent in single precision, built from its bits: `exp2` and `pow` may be off by the last one."""
    import torch

    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _fits(rows: "torch.Tensor", dtype: str) -> bool:
    """Say whether a dtype holds every row without more than its ordinary rounding."""
    height = rows.abs().amax(dim=1)
    if dtype == "F32":
        return bool(height.isfinite().all())
    rms = rows.square().mean(dim=1).sqrt()
    fine = (height <= _F16_MAX) & ((rms >= _F16_RMS_MIN) | (height == 0))
    return bool(fine.all())


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
