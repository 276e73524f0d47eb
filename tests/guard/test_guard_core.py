"""What a measurement means, and what it is called when there is none."""

import pytest

from kite.engine import EngineAnswer, EngineError, EngineLate, EngineRefused, EngineUnreachable, Refusal
from kite.events import new_id
from kite.proof import Comparison
from kite.testing.orders import ASKED
from kite_guard import core
from kite_guard.service import measure_s
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, Side
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
WIDE = Comparison(kl_micronats=1_200_000, p99_micronats=2_000_000, covered_ppm=800_000, positions=8)


def test_a_divergence_is_reported_with_what_it_rests_on() -> None:
    fact = core.verdict(ORDER, WIDE, 42)
    assert isinstance(fact, Compared)
    assert (fact.first, fact.second, fact.model, fact.request) == ("a", "b", "tiny", ORDER.request)
    assert (fact.kl_micronats, fact.p99_micronats) == (1_200_000, 2_000_000)
    assert (fact.covered_ppm, fact.positions, fact.duration_us) == (800_000, 8, 42)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (Comparison(0, 0, covered_ppm=799_999, positions=17), "too_little_covered"),
        (Comparison(0, 0, covered_ppm=1_000_000, positions=7), "too_few_positions"),
    ],
)
def test_what_says_too_little_is_not_agreement(found: Comparison, code: str) -> None:
    fact = core.verdict(ORDER, found, 42)
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
