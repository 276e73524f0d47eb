"""Exact recompression: the best approximation of rank k of a product B·A, without forming it.

With A = L·Q (the rows of Q orthonormal), B·A has the singular values of B·L, and its right singular vectors are those
of B·L turned by Q. Keeping V, the first k of them, gives B·L·V and Vᵀ·Q: the optimum of a dense SVD (Eckart and Young,
1936) for the price of two Gram matrices of R by R. B enters only through Lᵀ(BᵀB)L and may be of any condition; A's Gram
matrix is factored, and where its condition does not allow that, A and B go through QR instead.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from kite_upcycle.factors import Factors, Scratch

if TYPE_CHECKING:
    import torch

# Least eigenvalue of A's Gram matrix, its rows normalised: the inverse square of A's condition number. A relative error
# of 2^-53 in the Gram matrix grows by that square, one of 2^-24 in the last products by the number itself; both stay
# below 1e-5.
_GRAM_MIN = 1e-8
_SINGLE_MIN = 1e-4
# Where A's condition is as good as this, single precision does for its Gram matrix too: its error changes singular
# values by that share of each (Ostrowski), 1e-5 here, and not by a share of the largest one, as that of B's would.
_SINGLE_GRAM_MIN = 0.1
# Singular values below this share of the members' own magnitude are what rounding makes of zero: w·s·B was rounded to
# single precision (2^-24 of a value).
_NOTHING = 2.0**-22
_BLOCK = 512  # rows of a Gram matrix's operand at a time: 256 KB at R = 64


@dataclass(frozen=True)
class Spectrum:
    """Squared singular values of a module, largest first: what every rank would keep of it, and lose."""

    energies: tuple[float, ...]

    @property
    def total(self) -> float:
        """The squared Frobenius norm."""
        return sum(self.energies)

    def lost(self, rank: int) -> float:
        """Return the part of the squared norm that the best approximation of a rank loses."""
        return sum(self.energies[rank:])


class _Linalg(Protocol):
    """What is used of `torch.linalg`, which carries no types."""

    def cholesky(self, matrix: "torch.Tensor") -> "torch.Tensor": ...
    def eigh(self, matrix: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]": ...
    def eigvalsh(self, matrix: "torch.Tensor") -> "torch.Tensor": ...
    def qr(self, matrix: "torch.Tensor", mode: str = ...) -> "tuple[torch.Tensor, torch.Tensor]": ...
    def solve_triangular(self, left: "torch.Tensor", right: "torch.Tensor", *, upper: bool) -> "torch.Tensor": ...
    def svd(self, matrix: "torch.Tensor", full_matrices: bool) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]": ...


def _linalg() -> _Linalg:
    import torch

    return cast("_Linalg", torch.linalg)


def residual(spectra: Iterable[Spectrum], rank: int) -> float:
    """Return the relative Frobenius error of the best approximation of a rank, over all modules; 0 for zeros."""
    lost = total = 0.0
    for spectrum in spectra:
        lost += spectrum.lost(rank)
        total += spectrum.total
    return math.sqrt(lost / total) if total else 0.0


def whole(factors: Factors, scratch: Scratch) -> Spectrum:
    """Return the spectrum of a product that loses nothing: its energy as if it had one singular value."""
    return Spectrum((max(0.0, float((_gram(factors.a.t(), scratch) * _gram(factors.b, scratch)).sum())),))


def recompress(factors: Factors, rank: int, scratch: Scratch) -> tuple[Factors, Spectrum]:
    """Return the best factors of at most `rank` in single precision, and the spectrum of the product.

    Both have the same magnitude in each component. The factors must be finite; they may be on any device, and what is
    returned is there too.
    """
    import torch

    a, b = scratch.cast("single_a", factors.a, torch.float32), factors.b
    norms, gram, least = _normalised((a @ a.t()).double())
    if least < _SINGLE_GRAM_MIN:
        norms, gram, least = _normalised(_gram(factors.a.t(), scratch))
    energy = _gram(factors.b, scratch) * torch.outer(norms, norms)
    nothing = float(_NOTHING**2 * energy.trace())
    if least < _SINGLE_MIN:
        a, b = factors.a.double(), factors.b.double()
    if least < _GRAM_MIN:
        return _by_qr(a / norms.unsqueeze(1), b * norms, rank, nothing)
    lower = _linalg().cholesky(gram)
    values, vectors = _linalg().eigh(lower.t() @ energy @ lower)
    lead = _lead(values.flip(0), vectors.flip(1), rank, nothing)
    for_a = _linalg().solve_triangular(lower.t(), lead.vectors, upper=True) / norms.unsqueeze(1)
    for_b = (lower @ lead.vectors) * norms.unsqueeze(1)
    return lead.applied(for_a.t(), a, b, for_b)


def _normalised(gram: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, float]":
    """Return the norms of A's rows, the Gram matrix of the rows so normalised, and its least eigenvalue.

    A row of zeros has norm 1, and makes the least eigenvalue 0; so do rows whose squares are beyond the precision.
    """
    import torch

    if not bool(gram.isfinite().all()):
        return gram.diagonal(), gram, 0.0
    norms = gram.diagonal().sqrt()
    norms = torch.where(norms > 0, norms, 1.0)
    gram = gram / torch.outer(norms, norms)
    return norms, gram, float(_linalg().eigvalsh(gram)[0])


def _gram(columns: "torch.Tensor", scratch: Scratch) -> "torch.Tensor":
    """Return XᵀX of an (n, R) matrix in double precision; a block at a time, so that what is converted stays cached."""
    import torch

    count = columns.shape[1]
    total = torch.zeros(count, count, dtype=torch.float64, device=columns.device)
    for start in range(0, columns.shape[0], _BLOCK):
        doubled = scratch.cast("block", columns[start : start + _BLOCK], torch.float64)
        total.addmm_(doubled.t(), doubled)
    return total


def _by_qr(a: "torch.Tensor", b: "torch.Tensor", rank: int, nothing: float) -> tuple[Factors, Spectrum]:
    """The same from A's and B's QR: three times slower, and of any condition (equal members, members of zeros)."""
    q, lower_t = _linalg().qr(a.t())
    lower = lower_t.t()
    core = _linalg().qr(b, mode="r")[1] @ lower
    _, values, vectors_t = _linalg().svd(core, full_matrices=False)
    lead = _lead(values.square(), vectors_t.t(), rank, nothing)
    return lead.applied(lead.vectors.t(), q.t(), b, lower @ lead.vectors)


@dataclass(frozen=True)
class _Lead:
    """The first singular vectors (R, k), their singular values, and the whole spectrum."""

    vectors: "torch.Tensor"
    values: "torch.Tensor"
    spectrum: Spectrum

    def applied(
        self, for_a: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", for_b: "torch.Tensor"
    ) -> tuple[Factors, Spectrum]:
        """Return for_a·A, whose rows are orthonormal, and B·for_b, the singular values shared out evenly on both."""
        import torch

        share = (self.values * math.sqrt(a.shape[1] / b.shape[0])).sqrt()
        share = torch.where(share > 0, share, 1.0)
        made_a = (for_a * share.unsqueeze(1)).to(a.dtype) @ a
        made_b = b @ (for_b / share).to(b.dtype)
        weights = (self.values / self.values[0]).nan_to_num().float()
        return Factors(made_a.float(), made_b.float(), weights), self.spectrum


def _lead(energies: "torch.Tensor", vectors: "torch.Tensor", rank: int, nothing: float) -> _Lead:
    """Keep `rank` vectors; those of nothing become zeros. A vector and its opposite are the same: one is chosen."""
    import torch

    energies = torch.where(energies > nothing, energies, 0.0)
    missing = max(0, rank - energies.shape[0])
    leading = torch.nn.functional.pad(energies, (0, missing))[:rank]
    kept = torch.nn.functional.pad(vectors, (0, missing))[:, :rank] * (leading > 0)
    largest = kept.gather(0, kept.abs().argmax(dim=0, keepdim=True))
    spectrum = Spectrum(tuple(float(energy) for energy in energies.cpu()))
    return _Lead(torch.where(largest < 0, -kept, kept), leading.sqrt(), spectrum)
