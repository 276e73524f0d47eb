"""Verdicts of a comparison: pure, from what was measured to the fact that says it. The guard decides nothing else."""

from kite.engine import EngineError, EngineLate, EngineRefused, EngineUnreachable
from kite.proof import Comparison
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered
from kite_schemas.model import TEXT_MAX_CHARS

COVERED_MIN_PPM = 800_000
"""Mean probability that the compared tokens must have: below it, the lower bound says too little about the rest."""

POSITIONS_MIN = 8  # a mean over fewer depends on the choice of probes

LATE = "timeout"
GONE = "unreachable"
UNREADABLE = "unreadable"
UNCOVERED = "too_little_covered"
FEW = "too_few_positions"


def verdict(order: ComparisonOrdered, found: Comparison, duration_us: int) -> Compared | ComparisonFailed:
    """Return what a measurement means: a divergence, or no verdict, which is never agreement."""
    if found.positions < POSITIONS_MIN:
        return failure(order, FEW, f"{found.positions} positions, at least {POSITIONS_MIN} are needed")
    if found.covered_ppm < COVERED_MIN_PPM:
        text = f"the compared tokens cover {found.covered_ppm} ppm of the mass, at least {COVERED_MIN_PPM} are needed"
        return failure(order, UNCOVERED, f"{text}; KL so far {found.kl_micronats} micronats")
    first, second = order.sides
    return Compared(
        request=order.request,
        first=first.instance,
        second=second.instance,
        model=order.model,
        kl_micronats=found.kl_micronats,
        p99_micronats=found.p99_micronats,
        covered_ppm=found.covered_ppm,
        positions=found.positions,
        duration_us=duration_us,
    )


def failure(order: ComparisonOrdered, code: str, message: str) -> ComparisonFailed:
    """Return the fact that no verdict was reached."""
    first, second = order.sides
    return ComparisonFailed(
        request=order.request,
        first=first.instance,
        second=second.instance,
        code=code,
        message=message[:TEXT_MAX_CHARS],
    )


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
