"""What a blend may lose and how large it may be: the policy says it, a refusal closes the injection and says why."""

import pytest

from kite_arbitrator.testing import Story
from kite_incident.timeline import detail
from kite_schemas.upcycle import (
    RECOMPRESS,
    BlendFailed,
    BlendStored,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    LoadOrdered,
)
from kite_schemas.why import Reason


def admitted(fleet: Story) -> InjectionAdmitted:
    fleet.verified(fleet.inject("credit"))
    ((_, order),) = fleet.orders(InjectionAdmitted)
    return order


def test_the_order_carries_what_the_policy_allows():
    fleet = Story().up()
    fleet.amend({"upcycle.residual_max_ppm": 20_000})
    assert admitted(fleet).residual_max_ppm == 20_000


def test_a_policy_without_the_limit_lets_nothing_be_lost():
    fleet = Story().up()
    fleet.amend({"upcycle.residual_max_ppm": None})
    assert admitted(fleet).residual_max_ppm is None


def test_a_recompressed_blend_says_its_rank_and_what_it_lost():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request)
    stored = BlendStored(
        order=request,
        done=True,
        request=request,
        resident=fleet.resident(request),
        digest="ab" * 32,
        method=RECOMPRESS,
        rank=16,
        residual_ppm=12_000,
        share_ppm=1,
        duration_us=1,
    )
    assert detail(stored).endswith("(recompressed to rank 16, residual 1.2 %)")
    assert detail(stored.model_copy(update={"method": "concatenate"})).endswith("(rank 16)")


def test_a_blend_that_would_lose_too_much_closes_the_injection_with_what_would_help():
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    failed = BlendFailed(
        order=fleet.open("blend/risk"),
        done=True,
        request=request,
        code="residual_exceeded",
        message="recompressed to rank 8 the blend loses 31.00 % (start the servers with --max-lora-rank 16)",
        duration_us=1,
    )
    fleet.tell(failed)
    (closed,) = [row.data for row in fleet.decided if isinstance(row.data, InjectionClosed)]
    assert (closed.outcome, closed.why.reason) == (Ending.ROLLED_BACK, Reason.BLEND_FAILED)
    assert "--max-lora-rank 16" in detail(failed)


@pytest.mark.parametrize(("share_ppm", "is_loaded"), [(32_000, True), (32_001, False)])
def test_a_blend_beyond_its_share_of_the_base_is_stored_and_never_loaded(share_ppm: int, is_loaded: bool):
    fleet = Story().up()
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request, share_ppm)
    assert bool(fleet.orders(LoadOrdered)) is is_loaded
    closed = [row.data for row in fleet.decided if isinstance(row.data, InjectionClosed)]
    assert [(one.outcome, one.why.reason) for one in closed] == (
        [] if is_loaded else [(Ending.REFUSED, Reason.BLEND_TOO_LARGE)]
    )
    assert [(rule.value, rule.threshold) for one in closed for rule in one.why.rules] == (
        [] if is_loaded else [(32_001, 32_000)]
    )


def test_a_policy_without_that_limit_loads_whatever_the_servers_hold():
    fleet = Story().up()
    fleet.amend({"upcycle.blend_share_max_ppm": None})
    request = fleet.inject("credit")
    fleet.verified(request)
    fleet.stored(request, 900_000)
    assert fleet.orders(LoadOrdered)
