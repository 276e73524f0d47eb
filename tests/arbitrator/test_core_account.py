"""What old versions take: by the hour, on average over 7 days, and what is deleted when that is too much."""

from random import Random

import pytest

from kite_arbitrator.folds.accounts import HOUR_US, METADATA_BYTES, WEEK_HOURS, WEEK_S, limit_bytes, mean_bytes
from kite_arbitrator.records import Standing
from kite_arbitrator.testing import BASE, NODE, SECOND_US, Story, digest_of
from kite_schemas.upcycle import DeleteOrdered
from kite_schemas.why import Reason

FIRST = f"{NODE}-{BASE}-0"
DAYS, PER_DAY = 7, 17
SIZE_BYTES = 120_000_000
DAY_US = 24 * HOUR_US


def version(request: str, blend: str = "risk") -> str:
    return f"{blend}@{digest_of(request)[:12]}"


def retained(fleet: Story) -> int:
    account = fleet.state.accounts.get(NODE)
    return account.retained_bytes if account else 0


def settle(fleet: Story) -> None:
    """Let the retention pass, and what was ordered about old versions be done."""
    fleet.wait(121 * SECOND_US)
    for instance in list(fleet.state.instances.values()):
        for name in instance.versions:
            if any(order.target == f"retire/{name}@{instance.id}" for order in fleet.state.orders.values()):
                fleet.unloads(name, instance.id)


def released(sizes: list[int]) -> Story:
    """Release versions of these sizes, the first one first."""
    fleet = Story().up()
    for number, size_bytes in enumerate([*sizes, 0]):
        fleet.promote(f"adapter{number}", replace=f"adapter{number - 1}" if number else None, size_bytes=size_bytes)
        settle(fleet)
    return fleet


def test_a_released_version_counts_with_its_metadata_from_then_on():
    fleet = released([1_000])
    account = fleet.state.accounts[NODE]
    assert account.retained_bytes == 1_000 + METADATA_BYTES
    assert mean_bytes(account, account.since_us + 1_000 * SECOND_US) == (1_000 + METADATA_BYTES) * 1_000 // WEEK_S


def test_a_version_counts_on_every_node_that_serves_its_base():
    fleet = Story().up(nodes=("n1", "n2"))
    for adapter in ("credit", "mood"):
        fleet.promote(adapter, size_bytes=5)
    settle(fleet)
    assert {node: account.retained_bytes for node, account in fleet.state.accounts.items()} == dict.fromkeys(
        ("n1", "n2"), 5 + METADATA_BYTES
    )


def test_one_that_is_returned_to_counts_no_more():
    fleet = released([1_000])
    fleet.rollback()
    name = next(r.version for r in fleet.state.rollbacks.values())
    fleet.proves(name, FIRST)
    assert retained(fleet) == 0
    assert fleet.state.accounts[NODE].hours, "what it took counts for a week"


def test_the_limit_is_a_share_of_the_memory_of_the_nodes_devices():
    fleet = Story().up()
    assert limit_bytes(fleet.state, NODE) == 2 * (1 << 34) * 18 // 100
    assert limit_bytes(fleet.state, "nobody") is None
    fleet.amend({"upcycle.retained_share_max_ppm": None})
    assert limit_bytes(fleet.state, NODE) is None


def test_the_mean_is_that_of_its_definition():
    """Held against a sum over every second of the week, whatever happens when."""
    rng = Random(7)  # noqa: S311 # a test's numbers have to be known, not secret
    fleet, levels = released([1_000]), list[tuple[int, int]]()
    fleet.amend({"upcycle.retained_share_max_ppm": None})
    for number in range(30):
        levels.append((fleet.now_us // SECOND_US, retained(fleet)))
        fleet.wait(rng.randrange(12 * HOUR_US))
        fleet.promote(f"adapter{number + 2}", replace=f"adapter{number + 1}", size_bytes=rng.randrange(10**9))
        settle(fleet)
    now_us = fleet.now_us
    first_s = (now_us // HOUR_US - WEEK_HOURS + 1) * HOUR_US // SECOND_US
    ends = [at_s for at_s, _ in levels[1:]] + [now_us // SECOND_US]
    total = sum(level * max(0, end - max(at_s, first_s)) for (at_s, level), end in zip(levels, ends, strict=True))
    # a level changes at some moment of a settlement, which takes two minutes, and not at its end
    assert mean_bytes(fleet.state.accounts[NODE], now_us) == pytest.approx(total / WEEK_S, rel=0.02)


def test_a_week_of_17_injections_a_day_cleans_up_oldest_first_when_the_mean_crosses_the_limit():
    fleet = Story().up()
    began_us, order_of_birth = fleet.now_us, list[str]()
    crossed: list[DeleteOrdered] = []
    deleted: list[str] = []
    limit = limit_bytes(fleet.state, NODE)
    assert limit is not None
    for number in range(DAYS * PER_DAY):
        former = f"adapter{number - 1}" if number else None
        order_of_birth.append(version(fleet.promote(f"adapter{number}", replace=former, size_bytes=SIZE_BYTES)))
        settle(fleet)
        while fleet.now_us < began_us + (number + 1) * DAY_US // PER_DAY:
            before, mean = retained(fleet), mean_bytes(fleet.state.accounts[NODE], fleet.now_us) if number else 0
            fleet.wait(min(HOUR_US // 4, began_us + (number + 1) * DAY_US // PER_DAY - fleet.now_us + 1))
            orders = [order for _, order in fleet.orders(DeleteOrdered)]
            if not orders:
                continue
            assert mean <= limit or crossed, "in the quarter of an hour in which the mean crossed it"
            crossed = crossed or orders
            assert limit < before
            assert retained(fleet) <= limit < retained(fleet) + SIZE_BYTES + METADATA_BYTES, "and no more than needed"
            for order in orders:
                deleted.append(order.version)
                fleet.deletes(order.version)
    assert 10 < len(deleted) < DAYS * PER_DAY
    assert deleted == order_of_birth[: len(deleted)], "oldest first"
    assert {order.why.reason for order in crossed} == {Reason.RETENTION_CROSSED}
    mean, current = crossed[0].why.rules
    assert (mean.id, current.id) == ("upcycle.retained_mean_bytes", "upcycle.retained_bytes")
    assert mean.threshold == current.threshold == limit
    assert limit < mean.value < current.value
    assert mean.fired
    account = fleet.state.accounts[NODE]
    assert 24 * (DAYS - 1) < len(account.hours) <= WEEK_HOURS + 1
    held = [v for v in fleet.state.versions.values() if v.standing is Standing.RELEASED]
    assert account.retained_bytes == len(held) * (SIZE_BYTES + METADATA_BYTES)
    assert len(fleet.state.versions) == DAYS * PER_DAY - len(deleted)


def test_above_the_limit_now_is_not_enough():
    fleet = released([7_000_000_000])
    fleet.wait(DAY_US)
    assert fleet.orders(DeleteOrdered) == [], "one day of seven"
    assert retained(fleet) > (limit_bytes(fleet.state, NODE) or 0)
    fleet.wait(DAY_US * 6)
    assert len(fleet.orders(DeleteOrdered)) == 1


def test_a_version_that_somebody_wants_back_is_not_deleted():
    fleet = released([7_000_000_000])
    fleet.wait(DAY_US)
    fleet.rollback()
    fleet.wait(DAY_US * 6)
    assert fleet.orders(DeleteOrdered) == []
