"""The members of a blend as two factors a module: A stacked by rows, w·s·B side by side; and how they are stored.

Bᵀ is never formed: the rows of B lie in a file as they are wanted here, one for each output, R numbers long.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kite_upcycle import files
from kite_upcycle.lora import Lora
from kite_upcycle.reader import Adapter
from kite_upcycle.verify import PPM, Pair

if TYPE_CHECKING:
    import torch

# Half precision rounds to 2^-12 of a value (its root mean square over a binade: 2e-4), down to steps of 2^-24 for small
# ones. In a component whose mean magnitude is at least 2^-14 those steps (2^-24/√12 each) add 3e-4 at most, so that a
# product stays within 1e-3; one component below sends its module to single precision.
_F16_MEAN_MIN = 2.0**-14
_F16_MAX = 65_504.0
_MAX_SHIFT = 100  # single precision has exponents to 127


class Scratch:
    """Memory that is used again for every module: fresh memory costs more than what is computed in it (page faults)."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def empty(
        self, use: str, shape: Sequence[int], dtype: "torch.dtype", device: "torch.device | str" = "cpu"
    ) -> "torch.Tensor":
        """Return uninitialised memory; what was returned for this use and dtype before is overwritten by it."""
        import torch

        key, size = (use, dtype, torch.device(device)), math.prod(shape)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            kept = self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size].view(*shape)

    def cast(self, use: str, values: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
        """Return the values in another dtype, contiguous; themselves when it is theirs already."""
        if values.dtype == dtype:
            return values
        return self.empty(use, values.shape, dtype, values.device).copy_(values)


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
        assert a is not None  # noqa: S101 - `blend` refuses single sides; this tells the type checker
        return a.shape[0]

    def scale_of(self, module: str) -> float:
        """Return w·s: the weight of the member times the scale of the module."""
        return self.weight_ppm / PPM * self.settings.scale_of(module)

    def dtype_of(self, module: str, side: str) -> "torch.dtype":
        """Return how A or B is stored."""
        return _dtype(self.adapter.tensors.entries[key(module, side)].dtype)

    def load(self, module: str, side: str, into: "torch.Tensor") -> None:
        """Read A (rank, in) or B (out, rank) into contiguous memory of its shape and dtype. Raises EOFError."""
        tensors = self.adapter.tensors
        entry = tensors.entries[key(module, side)]
        wanted = entry.stop - entry.start
        if files.read_at(tensors.file, tensors.data_start + entry.start, bytes_of(into)) < wanted:
            msg = f"{entry.name}: the file became shorter while it was read"
            raise EOFError(msg)


@dataclass(frozen=True)
class Factors:
    """One module of a blend: B·A is its part of the sum. `a` is (R, in) of any supported dtype, `b` (out, R) float32.

    `weights` says how much each of the R components counts beside the largest one (at most 1), None for all alike.
    """

    a: "torch.Tensor"
    b: "torch.Tensor"
    weights: "torch.Tensor | None" = None

    def to(self, device: str) -> "Factors":
        """Return the same factors on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        return Factors(self.a.to(device), self.b.to(device), weights)


def bytes_of(tensor: "torch.Tensor") -> memoryview:
    """Return the memory of a contiguous tensor."""
    import torch

    return tensor.view(torch.uint8).numpy().data.cast("B")


def _dtype(name: str) -> "torch.dtype":
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]


def key(module: str, side: str) -> str:
    """Return the name of a tensor of an adapter; `side` is A or B."""
    return f"base_model.model.{module}.lora_{side}.weight"


def stack(parts: Sequence[Part], module: str, features: tuple[int, int], rank: int, scratch: Scratch) -> Factors:
    """Load the factors of a module of all members that have it, in their order; zeros fill them up to `rank`.

    `features` are the module's (out, in). The factors lie in the scratch.
    """
    import torch

    out_features, in_features = features
    a = scratch.empty("a", (rank, in_features), _common({part.dtype_of(module, "A") for part in parts}))
    b = scratch.empty("b", (out_features, rank), torch.float32)
    scales = torch.zeros(rank, dtype=torch.float64)
    at = 0
    for part in parts:
        until = at + part.rank_of(module)
        _read_a(part, module, a[at:until], scratch)
        raw = scratch.empty("raw", (out_features, until - at), part.dtype_of(module, "B"))
        part.load(module, "B", raw)
        b[:, at:until] = raw
        scales[at:until] = part.scale_of(module)
        at = until
    a[at:] = 0
    b[:, at:] = 0
    return Factors(a, b.mul_(scales.float()))


def _read_a(part: Part, module: str, rows: "torch.Tensor", scratch: Scratch) -> None:
    dtype = part.dtype_of(module, "A")
    if dtype == rows.dtype:
        part.load(module, "A", rows)
        return
    raw = scratch.empty("raw", rows.shape, dtype)
    part.load(module, "A", raw)
    rows.copy_(raw)


def _common(dtypes: "set[torch.dtype]") -> "torch.dtype":
    """Return the dtype that holds what all of these hold."""
    import torch

    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def store(factors: Factors, scratch: Scratch, *, precise: bool) -> "tuple[torch.Tensor, torch.Tensor] | None":
    """Return A and B as they are written, or None when no dtype holds them.

    A of half precision stays as it is where B alone can carry the scale: nothing is rounded but w·s·B. Else powers of
    two are moved between them. What half precision cannot hold then, or must be `precise`, is of single precision.
    """
    if not precise and _is_storable(factors, scratch):
        return _halved(factors, scratch)
    a, b = _balance(factors.a.float(), factors.b)
    balanced = Factors(a, b, factors.weights)
    if not precise and _is_storable(balanced, scratch):
        return _halved(balanced, scratch)
    return (a, b) if is_finite(balanced) else None


def _is_storable(factors: Factors, scratch: Scratch) -> bool:
    """Say whether half precision holds both: A may be any number when it is of half precision itself."""
    import torch

    if factors.a.dtype == torch.float32:
        fits_a = _fits(factors.a, 1, factors.weights, scratch)
    else:
        fits_a = _are_finite(factors.a)
    return fits_a and _fits(factors.b, 0, factors.weights, scratch)


def _halved(factors: Factors, scratch: Scratch) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    a = factors.a if factors.a.dtype == torch.bfloat16 else scratch.cast("half_a", factors.a, torch.float16)
    return a, scratch.cast("half_b", factors.b, torch.float16)


def is_finite(factors: Factors) -> bool:
    """Say whether all values are numbers."""
    return _are_finite(factors.a) and _are_finite(factors.b)


def _are_finite(values: "torch.Tensor") -> bool:
    """Say so of a matrix: its extremes tell (a NaN is both)."""
    import torch

    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(values))


def _fits(values: "torch.Tensor", dim: int, weights: "torch.Tensor | None", scratch: Scratch) -> bool:
    """Say whether half precision holds every component without more than its ordinary rounding.

    A component that counts for less may be rounded to coarser steps: what it adds to the whole shrinks with it.
    """
    import torch

    heights = torch.abs(values, out=scratch.empty("heights", values.shape, values.dtype, values.device))
    total = heights.sum(dim)  # not less than the largest, and it does not underflow as squares would
    least = _F16_MEAN_MIN if weights is None else _F16_MEAN_MIN * weights.sqrt()
    fine = (total <= _F16_MAX) & ((total >= least * values.shape[dim]) | (total == 0))
    return bool(fine.all())


def _balance(a: "torch.Tensor", b: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Move powers of two between each row of A and its column of B until both have the same magnitude.

    Exact, and their product is unchanged: it brings both into the range where half precision is fine.
    """
    import torch

    height_a, height_b = a.abs().amax(dim=1), b.abs().amax(dim=0)
    shift = torch.div(torch.frexp(height_a).exponent - torch.frexp(height_b).exponent, 2, rounding_mode="floor")
    shift = torch.where((height_a > 0) & (height_b > 0), shift, 0).clamp(-_MAX_SHIFT, _MAX_SHIFT)
    return a * _power_of_two(-shift).unsqueeze(1), b * _power_of_two(shift)


def _power_of_two(exponent: "torch.Tensor") -> "torch.Tensor":
    """Return 2^exponent in single precision, built from its bits: `exp2` and `pow` may be off by the last one."""
    import torch

    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
