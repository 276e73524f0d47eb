"""Verdicts of a comparison: pure, from what was measured to the fact that says it. The guard decides nothing else."""

from typing import ClassVar

from kite.engine import EngineError, EngineLate, EngineRefused, EngineUnreachable
from kite.errors import Fault, KiteError
from kite.probes import Probes
from kite.proof import Comparison
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, MeasurementOrdered
from kite_schemas.model import TEXT_MAX_CHARS

COVERED_MIN_PPM = 800_000
"""Mean probability that the compared tokens must have: below it, the lower bound says too little about the rest."""

POSITIONS_MIN = 8  # a mean over fewer depends on the choice of probes

LATE = "timeout"
GONE = "unreachable"
UNREADABLE = "unreadable"
UNCOVERED = "too_little_covered"
FEW = "too_few_positions"

Wanted = ComparisonOrdered | MeasurementOrdered
"""An order of the guard: to compare two instances, or to measure one of them for that."""


def verdict(order: ComparisonOrdered, found: Comparison, probes: str, duration_us: int) -> Compared | ComparisonFailed:
    """Return what a measurement with a set of probes means: a divergence, or no verdict, which is never agreement."""
    if found.positions < POSITIONS_MIN:
        return failure(order, FEW, f"{found.positions} positions, at least {POSITIONS_MIN} are needed")
    if found.covered_ppm < COVERED_MIN_PPM:
        text = f"the compared tokens cover {found.covered_ppm} ppm of the mass, at least {COVERED_MIN_PPM} are needed"
        return failure(order, UNCOVERED, f"{text}; KL so far {found.kl_micronats} micronats")
    first, second = pair(order)
    return Compared(
        request=order.request,
        first=first,
        second=second,
        model=order.model,
        kl_micronats=found.kl_micronats,
        p99_micronats=found.p99_micronats,
        covered_ppm=found.covered_ppm,
        positions=found.positions,
        duration_us=duration_us,
        probes=probes,
    )


def failure(order: Wanted, code: str, message: str) -> ComparisonFailed:
    """Return the fact that no verdict was reached."""
    first, second = pair(order)
    return ComparisonFailed(
        request=order.request, first=first, second=second, code=code, message=message[:TEXT_MAX_CHARS]
    )


def pair(order: Wanted) -> tuple[str, str]:
    """Return the instances that an order is about."""
    match order:
        case ComparisonOrdered(sides=(first, second)):
            return first.instance, second.instance
        case MeasurementOrdered(first=first, second=second):
            return first, second


class ProbesDiffer(KiteError):
    """The other side was asked another number of probes than the set has that both name."""

    code: ClassVar[str] = "probes_differ"
    fault: ClassVar[Fault] = Fault.KITE

    def __init__(self, other: int, own: int) -> None:
        super().__init__(f"the other side was asked {other} probes, the set has {own}")
        self.other = other
        self.own = own


def check(order: Wanted, chosen: Probes) -> None:
    """Make sure that what was measured on the other side fits the probes. Raises ProbesDiffer."""
    other = order.measured if isinstance(order, ComparisonOrdered) else order.tokens
    if other is not None and len(other) != len(chosen.prompts):
        raise ProbesDiffer(len(other), len(chosen.prompts))


def reason(error: EngineError) -> str:
    """Return the code of a comparison that an engine's error ended."""
    match error:
        case EngineLate():
            return LATE
        case EngineUnreachable():
            return GONE
        case EngineRefused():
            return error.reason.value  # `not_finite`, `model_unknown`, `dead`, …
        case _:
            return UNREADABLE
