"""Weights of a blend: exact sums, locked anchors, no dependence on the order in which members are listed."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite_arbitrator.rules.v1.weights import Refused, weigh
from kite_arbitrator.testing import adapter
from kite_schemas.model import PPM
from kite_schemas.upcycle import InjectionRequested, Member
from kite_schemas.why import Reason

DECAY_PPM, MIN_PPM = 930_000, 10_000


def request(
    name: str = "new", *, weight_ppm: int | None = None, anchors: tuple[str, ...] = (), replace: str | None = None
):
    return InjectionRequested(
        actor="test",
        blend="risk",
        adapter=adapter(name),
        base="tiny",
        weight_ppm=weight_ppm,
        anchors=anchors,
        replace=replace,
    )


def member(name: str, weight_ppm: int, *, anchored: bool = False) -> Member:
    return Member(adapter=adapter(name), weight_ppm=weight_ppm, anchored=anchored)


def by_name(members: tuple[Member, ...]) -> dict[str, int]:
    return {m.adapter.name: m.weight_ppm for m in members}


@st.composite
def blends(draw: st.DrawFn) -> list[Member]:
    """Blends as the arbitrator leaves them: members that sum to at most one million."""
    shares = draw(st.lists(st.integers(MIN_PPM, PPM), min_size=0, max_size=6))
    total = max(PPM, sum(shares))
    locked = draw(st.lists(st.booleans(), min_size=len(shares), max_size=len(shares)))
    return [
        member(f"m{n}", share * PPM // total, anchored=anchored)
        for n, (share, anchored) in enumerate(zip(shares, locked, strict=True))
    ]


@given(blends(), st.none() | st.integers(1, PPM), st.randoms())
def test_base_and_members_sum_to_one_million_whatever_order_they_come_in(
    members: list[Member], weight_ppm: int | None, random: Random
):
    wanted = request(weight_ppm=weight_ppm)
    try:
        weights = weigh(members, wanted, decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    except Refused:
        return  # anchors and the new one take more than there is
    assert weights.base_ppm + sum(m.weight_ppm for m in weights.members) == PPM
    assert weights.base_ppm >= 0
    shuffled = list(members)
    random.shuffle(shuffled)
    assert weigh(shuffled, wanted, decay_ppm=DECAY_PPM, min_ppm=MIN_PPM) == weights


@given(blends(), st.integers(1, PPM))
def test_anchors_keep_their_weight_and_the_others_never_gain(members: list[Member], weight_ppm: int):
    try:
        weights = weigh(members, request(weight_ppm=weight_ppm), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    except Refused:
        return
    after = by_name(weights.members)
    assert after["new"] == weight_ppm
    for before in members:
        if before.anchored:
            assert after[before.adapter.name] == before.weight_ppm
        else:
            assert after.get(before.adapter.name, 0) <= before.weight_ppm * DECAY_PPM // PPM


@given(blends(), st.integers(MIN_PPM, PPM))
def test_who_is_below_the_minimum_leaves_and_nobody_else(members: list[Member], weight_ppm: int):
    try:
        weights = weigh(members, request(weight_ppm=weight_ppm), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    except Refused:
        return
    assert all(m.weight_ppm >= MIN_PPM or m.anchored for m in weights.members)
    names = {m.adapter.name for m in (*weights.members, *weights.dropped)}
    assert names == {m.adapter.name for m in members} | {"new"}


def test_the_first_member_takes_everything_and_the_next_an_equal_share():
    first = weigh([], request("a"), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    assert by_name(first.members) == {"a": PPM}
    second = weigh(first.members, request("b"), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    assert by_name(second.members) == {"a": 500_000, "b": 500_000}


@pytest.mark.parametrize(("decay_ppm", "kept"), [(930_000, 465_000), (710_000, 355_000)])
def test_decay_really_changes_shares_when_there_is_room(decay_ppm: int, kept: int):
    weights = weigh([member("a", 500_000)], request(weight_ppm=300_000), decay_ppm=decay_ppm, min_ppm=MIN_PPM)
    assert by_name(weights.members) == {"a": kept, "new": 300_000}
    assert weights.base_ppm == PPM - kept - 300_000


def test_a_replacement_takes_the_place_the_weight_and_the_lock():
    members = [member("a", 600_000, anchored=True), member("b", 300_000)]
    weights = weigh(members, request("a2", replace="a"), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    assert by_name(weights.members) == {"a2": 600_000, "b": 279_000}
    assert [m.anchored for m in weights.members if m.adapter.name == "a2"] == [True]


@pytest.mark.parametrize(
    ("members", "wanted", "reason"),
    [
        ([member("a", 700_000, anchored=True)], request(weight_ppm=300_001), Reason.ANCHORS_LEAVE_NO_ROOM),
        ([member("new", 500_000)], request(), Reason.ADAPTER_DUPLICATE),
        ([member("a", 500_000)], request(replace="b"), Reason.MEMBER_UNKNOWN),
        ([member("a", 500_000)], request(anchors=("b",)), Reason.MEMBER_UNKNOWN),
        ([], request(weight_ppm=0), Reason.WEIGHT_TOO_SMALL),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(members: list[Member], wanted: InjectionRequested, reason: Reason):
    with pytest.raises(Refused) as refused:
        weigh(members, wanted, decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    assert refused.value.reason is reason


def test_anchors_that_fit_to_the_last_part_leave_nothing_for_the_base():
    weights = weigh(
        [member("a", 700_000, anchored=True)], request(weight_ppm=300_000), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM
    )
    assert weights.base_ppm == 0


@given(blends(), st.integers(1, PPM), st.integers(0, PPM - 1))
def test_decay_shrinks_every_free_member_by_its_factor_unless_the_room_is_less(
    members: list[Member], weight_ppm: int, decay_ppm: int
):
    """The order of the design: decay first, to the part; scale down only when that is still more than the room."""
    try:
        weights = weigh(members, request(weight_ppm=weight_ppm), decay_ppm=decay_ppm, min_ppm=0)
    except Refused:
        return
    after = by_name(weights.members)
    decayed = {m.adapter.name: m.weight_ppm * decay_ppm // PPM for m in members if not m.anchored}
    room = PPM - weight_ppm - sum(m.weight_ppm for m in members if m.anchored)
    if sum(decayed.values()) <= room:
        assert {name: after[name] for name in decayed} == decayed
    else:
        assert sum(after[name] for name in decayed) == room
        for name, share in decayed.items():
            assert abs(after[name] * sum(decayed.values()) - share * room) < sum(decayed.values())


@given(blends(), st.integers(1, PPM))
def test_no_decay_and_enough_room_leave_everyone_alone(members: list[Member], weight_ppm: int):
    if sum(m.weight_ppm for m in members) + weight_ppm > PPM:
        return
    weights = weigh(members, request(weight_ppm=weight_ppm), decay_ppm=PPM, min_ppm=0)
    assert by_name(weights.members) == {m.adapter.name: m.weight_ppm for m in members} | {"new": weight_ppm}


@given(blends(), st.data())
def test_an_anchor_set_now_holds_now_and_at_the_next_injection(members: list[Member], data: st.DataObject):
    if not members:
        return
    chosen = data.draw(st.sampled_from(members))
    wanted = request(weight_ppm=MIN_PPM, anchors=(chosen.adapter.name,))
    locked = sum(m.weight_ppm for m in members if m.anchored or m == chosen)
    if locked + MIN_PPM > PPM:
        return
    weights = weigh(members, wanted, decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    later = weigh(weights.members, request("later", weight_ppm=PPM - locked), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    assert by_name(weights.members)[chosen.adapter.name] == chosen.weight_ppm
    assert by_name(later.members)[chosen.adapter.name] == chosen.weight_ppm
    assert later.base_ppm == 0


@given(blends(), st.data())
def test_a_replacement_changes_nobody_else_more_than_an_injection_would(members: list[Member], data: st.DataObject):
    """The version is swapped at its weight: the others decay, and nobody is squeezed, for the room is the same."""
    if not members:
        return
    old = data.draw(st.sampled_from(members))
    weights = weigh(members, request("next", replace=old.adapter.name), decay_ppm=DECAY_PPM, min_ppm=0)
    after = by_name(weights.members)
    assert after["next"] == old.weight_ppm
    assert old.adapter.name not in after
    for other in members:
        if other.adapter.name != old.adapter.name:
            kept = other.weight_ppm if other.anchored else other.weight_ppm * DECAY_PPM // PPM
            assert after[other.adapter.name] == kept


def test_equal_remainders_go_to_the_lowest_digest():
    members = [member(name, 250_000) for name in ("a", "b", "c")]
    weights = weigh(members, request(weight_ppm=500_000), decay_ppm=PPM, min_ppm=MIN_PPM)
    shares = {m.adapter.digest: m.weight_ppm for m in weights.members if m.adapter.name != "new"}
    assert sorted(shares.values()) == [166_666, 166_667, 166_667]
    assert shares[max(shares)] == 166_666
    assert weights.base_ppm == 0


def test_who_falls_below_the_minimum_frees_room_for_the_others():
    members = [member("big", 700_000), member("small", 10_500)]
    weights = weigh(members, request(weight_ppm=300_000), decay_ppm=DECAY_PPM, min_ppm=MIN_PPM)
    assert [(m.adapter.name, m.weight_ppm) for m in weights.dropped] == [("small", 9_765)]
    assert by_name(weights.members) == {"big": 651_000, "new": 300_000}
    assert weights.base_ppm == 49_000
