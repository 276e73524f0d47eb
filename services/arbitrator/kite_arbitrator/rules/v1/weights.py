"""The weights of a blend, in parts per million: base and members always sum to exactly one million."""

from collections.abc import Sequence

from msgspec import Struct

from kite_arbitrator.state import same_adapter
from kite_schemas.model import PPM
from kite_schemas.upcycle import InjectionRequested, Member
from kite_schemas.why import Reason


class Refused(Exception):
    """The weights that were asked for cannot be."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Weights(Struct, frozen=True, kw_only=True):
    """A full weight vector, ordered by adapter digest, and the members that lost their place."""

    members: tuple[Member, ...]
    base_ppm: int
    dropped: tuple[Member, ...] = ()


def weigh(members: Sequence[Member], request: InjectionRequested, *, decay_ppm: int, min_ppm: int) -> Weights:
    """Return the weights after an injection; the order of `members` does not matter.

    Anchors keep theirs; the others decay by `decay_ppm`, and shrink further only when what is left for them is less
    (largest remainder, ties by digest). A member below `min_ppm` leaves. Raises Refused.
    """
    kept = _kept(members, request)
    new = _new(members, request)
    anchored = _anchored(kept, new, request)
    locked = [m for m in anchored if m.anchored or m.adapter.digest == new.adapter.digest]
    room = PPM - sum(m.weight_ppm for m in locked)
    if room < 0:
        total = PPM - room
        raise Refused(Reason.ANCHORS_LEAVE_NO_ROOM, f"anchors and the new member take {total} ppm of {PPM}")
    free = [m for m in anchored if m not in locked]
    shrunk, dropped = _shrink(free, room, decay_ppm, min_ppm)
    result = sorted((*locked, *shrunk), key=_digest)
    return Weights(members=tuple(result), base_ppm=PPM - sum(m.weight_ppm for m in result), dropped=tuple(dropped))


def _kept(members: Sequence[Member], request: InjectionRequested) -> list[Member]:
    """Return the members that stay, by digest; refuse an adapter that is in the blend already."""
    kept = [m for m in members if m.adapter.name != request.replace]
    if request.replace is not None and len(kept) == len(members):
        raise Refused(Reason.MEMBER_UNKNOWN, f"the blend has no member {request.replace!r} to replace")
    if any(same_adapter(m, request.adapter) for m in kept):
        raise Refused(Reason.ADAPTER_DUPLICATE, f"the blend has a member {request.adapter.name!r}: replace it")
    return sorted(kept, key=_digest)


def _new(members: Sequence[Member], request: InjectionRequested) -> Member:
    replaced = next((m for m in members if m.adapter.name == request.replace), None)
    if request.weight_ppm is not None:
        weight = request.weight_ppm
    elif replaced is not None:
        weight = replaced.weight_ppm
    else:
        weight = PPM // (len(members) + 1)
    if weight == 0:
        raise Refused(Reason.WEIGHT_TOO_SMALL, "a member of weight 0 has no effect")
    return Member(adapter=request.adapter, weight_ppm=weight, anchored=replaced is not None and replaced.anchored)


def _anchored(kept: Sequence[Member], new: Member, request: InjectionRequested) -> list[Member]:
    members = [*kept, new]
    unknown = [name for name in request.anchors if all(m.adapter.name != name for m in members)]
    if unknown:
        raise Refused(Reason.MEMBER_UNKNOWN, f"the blend has no member {unknown[0]!r} to anchor")
    return [m.model_copy(update={"anchored": m.anchored or m.adapter.name in request.anchors}) for m in members]


def _shrink(free: Sequence[Member], room: int, decay_ppm: int, min_ppm: int) -> tuple[list[Member], list[Member]]:
    decayed = [_weighted(m, m.weight_ppm * decay_ppm // PPM) for m in free]
    dropped: list[Member] = []
    while True:
        fitted = _fit(decayed, room)
        small = [m for m in fitted if m.weight_ppm < min_ppm]
        if not small:
            return fitted, dropped
        # One leaves at a time, the smallest first: what it frees may be enough for the others.
        least = min(small, key=lambda m: (m.weight_ppm, m.adapter.digest))
        dropped.append(least)
        decayed = [m for m in decayed if m.adapter.digest != least.adapter.digest]


def _fit(members: Sequence[Member], room: int) -> list[Member]:
    """Scale the members down to fit the room exactly, if they do not fit already."""
    total = sum(m.weight_ppm for m in members)
    if total <= room:
        return list(members)
    shares = [(m, *divmod(m.weight_ppm * room, total)) for m in members]
    left = room - sum(whole for _, whole, _ in shares)
    by_remainder = sorted(shares, key=lambda share: (-share[2], share[0].adapter.digest))
    lucky = {m.adapter.digest for m, _, _ in by_remainder[:left]}
    return [_weighted(m, whole + (m.adapter.digest in lucky)) for m, whole, _ in shares]


def _weighted(member: Member, weight_ppm: int) -> Member:
    return member.model_copy(update={"weight_ppm": weight_ppm})


def _digest(member: Member) -> str:
    return member.adapter.digest
