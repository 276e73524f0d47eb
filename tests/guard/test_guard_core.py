"""What a measurement means, and what it is called when there is none."""

import pytest

from kite import probes
from kite.engine import EngineAnswer, EngineError, EngineLate, EngineRefused, EngineUnreachable, Refusal
from kite.events import new_id
from kite.proof import Comparison
from kite.testing.orders import ASKED
from kite_guard import core
from kite_guard.service import measure_s
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, Logprobs, MeasurementOrdered, Side
from kite_schemas.model import TEXT_MAX_CHARS

ORDER = ComparisonOrdered(
    node="n1",
    target="pair/a,b",
    expires_us=1,
    ttl_us=1,
    request=new_id(),
    sides=(Side(instance="a", endpoint="http://127.0.0.1:1"), Side(instance="b", endpoint="http://127.0.0.1:2")),
    model="tiny",
    why=ASKED,
)
MEASUREMENT = MeasurementOrdered(
    node="n1",
    target="pair/a,b",
    expires_us=1,
    ttl_us=1,
    first="a",
    second="b",
    side=Side(instance="b", endpoint="http://127.0.0.1:2"),
    model="tiny",
    why=ASKED,
)
PROBES = "ab" * 32
WIDE = Comparison(kl_micronats=1_200_000, p99_micronats=2_000_000, covered_ppm=800_000, positions=8)


def test_a_divergence_is_reported_with_what_it_rests_on() -> None:
    fact = core.verdict(ORDER, WIDE, PROBES, 42)
    assert isinstance(fact, Compared)
    assert (fact.first, fact.second, fact.model, fact.request) == ("a", "b", "tiny", ORDER.request)
    assert (fact.kl_micronats, fact.p99_micronats) == (1_200_000, 2_000_000)
    assert (fact.covered_ppm, fact.positions, fact.duration_us, fact.probes) == (800_000, 8, 42, PROBES)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (Comparison(0, 0, covered_ppm=799_999, positions=17), "too_little_covered"),
        (Comparison(0, 0, covered_ppm=1_000_000, positions=7), "too_few_positions"),
    ],
)
def test_what_says_too_little_is_not_agreement(found: Comparison, code: str) -> None:
    fact = core.verdict(ORDER, found, PROBES, 42)
    assert isinstance(fact, ComparisonFailed)
    assert (fact.code, fact.first, fact.second) == (code, "a", "b")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineLate("one token", 1), "timeout"),
        (EngineUnreachable("nobody"), "unreachable"),
        (EngineRefused("one token", Refusal.NOT_FINITE, "", 500), "not_finite"),
        (EngineRefused("one token", Refusal.MODEL_UNKNOWN, "", 404), "model_unknown"),
        (EngineAnswer("no JSON"), "unreadable"),
    ],
)
def test_every_error_of_an_engine_has_a_code(error: EngineError, code: str) -> None:
    assert core.reason(error) == code


def test_a_long_message_is_cut() -> None:
    assert len(core.failure(ORDER, core.GONE, "x" * 9_999).message) == TEXT_MAX_CHARS


def test_the_answer_leaves_before_the_order_expires() -> None:
    """A deadline is 1 s after the time of the order."""
    assert measure_s(deadline_us=31_000_000, now_us=0) == pytest.approx(27)
    assert measure_s(deadline_us=31_000_000, now_us=31_000_000) == 0


def test_a_measurement_that_failed_names_both_sides() -> None:
    fact = core.failure(MEASUREMENT, core.LATE, "")
    assert (fact.first, fact.second, fact.code) == ("a", "b", "timeout")


def test_what_the_other_side_was_asked_has_to_fit_the_probes() -> None:
    shipped, one = probes.default(), Logprobs(tokens=(1,), logprobs_micronats=(0,))
    count = len(shipped.prompts)
    core.check(ORDER, shipped)
    core.check(MEASUREMENT, shipped)
    core.check(ORDER.model_copy(update={"measured": (one,) * count}), shipped)
    with pytest.raises(core.ProbesDiffer, match="16 probes, the set has 17"):
        core.check(ORDER.model_copy(update={"measured": (one,) * (count - 1)}), shipped)
    with pytest.raises(core.ProbesDiffer, match="18 probes"):
        core.check(MEASUREMENT.model_copy(update={"tokens": ((1,),) * (count + 1)}), shipped)
