"""Blends and their versions as they are now: who holds what, until when, and what old versions take."""

from collections.abc import Iterator, Sequence

from kite.errors import Fault, KiteError, UsageError
from kite_arbitrator.folds.accounts import limit_bytes, mean_bytes
from kite_arbitrator.records import Account, Blend, Standing, Stored
from kite_arbitrator.state import State, current, holders, listing, members, serving
from kite_cli.output import Record, duration, percent, size
from kite_schemas.upcycle import Member

BLENDS = ("BLEND", "BASE", "VERSION", "MEMBERS", "HELD BY", "CHANNEL", "THE ONE BEFORE")
VERSIONS = ("VERSION", "STANDING", "FOR", "SIZE", "MEMBERS", "HELD BY", "")
ACCOUNTS = ("NODE", "OLD VERSIONS TAKE", "MEAN OF 7 DAYS", "LIMIT")
ANCHOR = "*"
AGING = frozenset({"lasted_us", "left_us", "age_us", "mean_bytes"})
"""What grows or shrinks by itself: a live view is not drawn again for it alone."""

Part = tuple[Record, tuple[str, ...]]
"""One thing as JSON, and as the cells of a table."""


class NoSuchBlend(KiteError):
    """No blend of that name was ever promoted."""

    code = "no_such_blend"
    fault = Fault.USER

    def __init__(self, name: str, known: Sequence[str]) -> None:
        hint = f"there is {', '.join(known)}" if known else "none was promoted yet: `kite upcycle inject`"
        super().__init__(f"no blend {name!r}", hint=hint)
        self.name = name


class NoSuchVersion(KiteError):
    """The store holds no version of the blend that is called so."""

    code = "no_such_version"
    fault = Fault.USER

    def __init__(self, blend: str, name: str, known: Sequence[str]) -> None:
        hint = f"the store holds {', '.join(known)}" if known else "the store holds none of its versions"
        super().__init__(f"{blend} has no version {name!r}", hint=hint)
        self.blend = blend
        self.name = name


def blend_of(state: State, name: str) -> Blend:
    """Return a blend by name. Raises NoSuchBlend."""
    found = state.blends.get(name)
    if found is None:
        raise NoSuchBlend(name, sorted(state.blends))
    return found


def version_of(state: State, blend: str, name: str) -> str:
    """Return the version of a blend that is called so: in full, by its digest, or by how either begins.

    Raises UsageError for a version of another blend, and NoSuchVersion when it is none of the store's or not one only.
    """
    other, mark, _ = name.partition("@")
    if mark and other != blend:
        raise UsageError(f"{name} is no version of {blend}", hint="a version is called BLEND@DIGEST")
    known = [stored.version for stored in versions_of(state, blend)]
    begins = name if mark else f"{blend}@{name}"
    found = [version for version in known if name and version.startswith(begins)]
    if len(found) != 1:
        raise NoSuchVersion(blend, name, known)
    return found[0]


def versions_of(state: State, blend: str | None = None) -> list[Stored]:
    """Return what the store holds, of one blend or of all: by blend, the newest first."""
    found = [one for one in state.versions.values() if blend in (None, one.resident.blend)]
    return sorted(found, key=lambda one: (one.resident.blend, -one.pos))


def retained(state: State, blend: str) -> Stored | None:
    """Return the version that a blend meant before, while it is kept loaded."""
    kept = (one for one in versions_of(state, blend) if one.standing is Standing.RETAINED)
    return next(kept, None)


def left_us(state: State, stored: Stored) -> int | None:
    """Return how long a version is still retained, in ledger time; None when its retention does not end."""
    retention_us = current(state).upcycle.retention_us
    return None if retention_us is None else max(0, stored.since_us + retention_us - state.now_us)


def names_of(state: State, version: str) -> list[str]:
    """Return the instances that hold a version, sleeping ones too, by id."""
    return [one.id for one in listing(state, version)]


def blends(state: State) -> list[Part]:
    """Return every blend, by name."""
    return [_blend(state, state.blends[name]) for name in sorted(state.blends)]


def _blend(state: State, blend: Blend) -> Part:
    found = blend_record(state, blend)
    selected, before = state.channels.get(blend.name), retained(state, blend.name)
    cells = (
        blend.name,
        blend.base,
        blend.resident.version,
        shares(blend.members, blend.base_weight_ppm),
        f"{len(holders(state, blend))}/{len(_serving(state, blend.base))}",
        f"{selected.channel} for {duration(state.now_us - selected.since_us)}" if selected else "",
        "" if before is None else f"{before.version}, {_left(state, before)}",
    )
    return found, cells


def blend_record(state: State, blend: Blend) -> dict[str, object]:
    """Return one blend as JSON: what it means, who of those that serve holds it, and the version before."""
    selected, before = state.channels.get(blend.name), retained(state, blend.name)
    return {
        "kind": "blend",
        "blend": blend.name,
        "base": blend.base,
        "version": blend.resident.version,
        "path": blend.resident.path,
        "members": [member.model_dump(mode="json") for member in blend.members],
        "base_weight_ppm": blend.base_weight_ppm,
        "channel": selected.channel if selected else None,
        "lasted_us": state.now_us - selected.since_us if selected else None,
        "instances": names_of(state, blend.resident.version),
        "serving": [one.id for one in holders(state, blend)],
        "serving_total": len(_serving(state, blend.base)),
        "retained": before.version if before else None,
        "left_us": left_us(state, before) if before else None,
        "pos": blend.pos,
    }


def _serving(state: State, base: str) -> list[str]:
    return [one.id for one in members(state, base) if serving(one)]


def _left(state: State, stored: Stored) -> str:
    us = left_us(state, stored)
    return "kept" if us is None else f"{duration(us)} left"


def shares(of: Sequence[Member], base_weight_ppm: int) -> str:
    """Return members with their weights in one line; an anchored one has a star.

    What remains is the base's, and is told when it is not nothing.
    """
    told = [f"{m.adapter.name} {percent(m.weight_ppm)}{ANCHOR if m.anchored else ''}" for m in of]
    return ", ".join([*told, f"base {percent(base_weight_ppm)}"] if base_weight_ppm else told)


def account_of(state: State, blend: Blend) -> Iterator[str]:
    """Yield what a blend means now and where, and which version it meant before, a line each."""
    held = names_of(state, blend.resident.version)
    where = f"on {', '.join(held) or 'no instance'}"
    yield f"{blend.resident.version} of {blend.base}, {where}; promoted at position {blend.pos}"
    before = retained(state, blend.name)
    if before is not None:
        yield f"before it {before.version}, {_left(state, before)}: `kite upcycle rollback {blend.name}` returns to it"


def versions(state: State, blend: str | None = None) -> list[Part]:
    """Return every version in the store, of one blend or of all: by blend, the newest first."""
    return [_version(state, one) for one in versions_of(state, blend)]


def _version(state: State, stored: Stored) -> Part:
    held, age_us = names_of(state, stored.version), state.now_us - stored.since_us
    is_retained = stored.standing is Standing.RETAINED
    record = {
        "kind": "version",
        "blend": stored.resident.blend,
        "version": stored.version,
        "base": stored.base,
        "standing": stored.standing,
        "age_us": age_us,
        "left_us": left_us(state, stored) if is_retained else None,
        "size_bytes": stored.size_bytes,
        "members": [member.model_dump(mode="json") for member in stored.members],
        "base_weight_ppm": stored.base_weight_ppm,
        "instances": held,
        "quarantined": stored.quarantined,
        "damaged": stored.damaged,
        "path": stored.resident.path,
        "pos": stored.pos,
    }
    marks = (("effect was missing", stored.quarantined), ("files damaged", stored.damaged))
    said = [mark for mark, holds in marks if holds]
    cells = (
        stored.version,
        f"{stored.standing}, {_left(state, stored)}" if is_retained else str(stored.standing),
        duration(age_us),
        size(stored.size_bytes) if stored.size_bytes else "",
        shares(stored.members, stored.base_weight_ppm),
        ", ".join(held),
        ", ".join(said),
    )
    return record, cells


def store_bytes(state: State) -> int:
    """Return what the versions in the store take together, as far as they told their size."""
    return sum(one.size_bytes for one in state.versions.values())


def accounts(state: State) -> list[Part]:
    """Return what old versions take, node by node."""
    return [_account(state, state.accounts[node]) for node in sorted(state.accounts)]


def _account(state: State, account: Account) -> Part:
    mean, limit = mean_bytes(account, state.now_us), limit_bytes(state, account.node)
    record = {
        "kind": "account",
        "node": account.node,
        "retained_bytes": account.retained_bytes,
        "mean_bytes": mean,
        "limit_bytes": limit,
    }
    cells = (account.node, size(account.retained_bytes), size(mean), "none" if limit is None else size(limit))
    return record, cells


def signature(parts: Sequence[Part]) -> list[object]:
    """Return what is to be drawn again when it changes, without what runs by itself."""
    return [{key: value for key, value in record.items() if key not in AGING} for record, _ in parts]


def notes(state: State) -> Iterator[str]:
    """Yield what a list of blends or versions leaves out: what its star means, what the store takes, what is open."""
    made = (*state.blends.values(), *state.versions.values())
    if any(member.anchored for one in made for member in one.members):
        yield f"{ANCHOR} the member's weight is locked"
    number = len(state.versions)
    yield f"the store holds {number} version{'' if number == 1 else 's'}, {size(store_bytes(state))}"
    for one in state.injections.values():
        yield f"an injection into {one.request.blend} is open since position {one.pos}"
    for one in state.rollbacks.values():
        yield f"a rollback of {one.request.blend} is open since position {one.pos}"
