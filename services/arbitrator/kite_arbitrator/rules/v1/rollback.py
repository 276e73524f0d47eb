"""A rollback that was asked for: the earlier version is loaded and proven wherever the base is served, then promoted.

It is one load away, and goes on while admissions are stopped: going back is what one does in trouble. A version whose
files are damaged is made again before it is loaded (`drift.rebuild`).
"""

from collections.abc import Iterator

from kite_arbitrator.folds.versions import restorable
from kite_arbitrator.records import Rollback, Row, Standing, Stored
from kite_arbitrator.rules.draft import Draft, age, at_least, seen, why
from kite_arbitrator.rules.v1.drift import rebuild_target
from kite_arbitrator.rules.v1.loads import load
from kite_arbitrator.rules.v1.loads import rollback as taken_out
from kite_arbitrator.rules.v1.slots import crowded, full, overfull
from kite_arbitrator.state import State, busy, claimed, lost_node, targets_of, waits
from kite_schemas.upcycle import BlendPromoted, RetireOrdered, Return, RollbackClosed
from kite_schemas.why import Reason

RETURNABLE = frozenset({Standing.RETAINED, Standing.RETIRING, Standing.RELEASED})
"""What was promoted before, and is in the store still."""

Obstacle = tuple[Reason, str]


def advance(state: State, row: Row) -> Iterator[Draft]:
    """Move every open rollback on as far as the state allows."""
    for rollback in sorted(state.rollbacks.values(), key=lambda r: r.pos):
        if rollback.failed:
            yield from _failing(state, row, rollback)
        elif rollback.targets:
            yield from _returning(state, row, rollback, rollback.targets)
        else:
            yield from _requested(state, row, rollback)


def _requested(state: State, row: Row, rollback: Rollback) -> Iterator[Draft]:
    found = _obstacle(state, rollback)
    if found is not None:
        yield _closed(state, row, rollback, Return.REJECTED, found)
        return
    targets = targets_of(state, state.versions[rollback.version].base)
    if rollback.request.dry_run:
        lack = sum(rollback.version not in i.versions for i in targets)
        detail = f"would prove {rollback.version} on {len(targets)} instances, and load it on {lack} of them"
        yield _closed(state, row, rollback, Return.DRY_RUN, (Reason.DRY_RUN, detail))
    elif not _leaving(state, rollback.version):
        yield from _returning(state, row, rollback, tuple(i.id for i in targets))


def _obstacle(state: State, rollback: Rollback) -> Obstacle | None:
    """Return why a blend cannot mean that version again, or None."""
    blend, stored = state.blends.get(rollback.request.blend), state.versions.get(rollback.version)
    name = rollback.request.blend
    if blend is None:
        return Reason.VERSION_UNKNOWN, f"no blend {name!r} was ever promoted"
    if any(i.request.blend == name for i in state.injections.values()):
        return Reason.BLEND_BUSY, f"an injection into {name!r} is under way"
    if any(r.request.blend == name and r.pos < rollback.pos for r in state.rollbacks.values()):
        return Reason.BLEND_BUSY, f"another rollback of {name!r} is under way"
    if not rollback.version:
        return Reason.NO_FORMER, f"the store holds no version that {name!r} meant before {blend.resident.version}"
    return _unfit(state, rollback, stored) or _unloadable(state, rollback, blend.base)


def _unfit(state: State, rollback: Rollback, stored: Stored | None) -> Obstacle | None:
    name = rollback.request.blend
    if stored is None or stored.resident.blend != name:
        return Reason.VERSION_UNKNOWN, f"the store holds no {rollback.version} of {name!r}"
    if stored.quarantined:
        return Reason.VERSION_QUARANTINED, f"{stored.version} had no effect when it was proven last"
    if stored.standing is Standing.PROMOTED:
        return Reason.PROMOTED, f"{name!r} means {stored.version} already"
    if stored.standing not in RETURNABLE:
        return Reason.VERSION_UNKNOWN, f"{stored.version} is {stored.standing}: {name!r} cannot return to it"
    return _broken(state, stored) if stored.damaged else None


def _broken(state: State, stored: Stored) -> Obstacle | None:
    """Return why a version whose files are damaged is not made again now, None when it is."""
    if not restorable(state, stored):
        return Reason.DAMAGED, f"the files of {stored.version} are damaged, and its members are not known"
    if waits(state, rebuild_target(stored)):
        return Reason.DAMAGED, f"the files of {stored.version} are damaged, and could not be made again just now"
    return None


def _unloadable(state: State, rollback: Rollback, base: str) -> Obstacle | None:
    targets = targets_of(state, base)
    if not targets:
        return Reason.NO_READY_INSTANCE, f"no instance of {base!r} is ready"
    tight = [i for i in targets if crowded(state, i, rollback.version)]
    if tight:
        return Reason.SLOTS_FULL, overfull(state, tight, rollback.request.blend, rollback.version)
    return None


def _leaving(state: State, version: str) -> bool:
    """Tell whether the version is being taken from an instance: it is loaded again after that."""
    return any(o.type == RetireOrdered.TYPE and o.version == version for o in state.orders.values())


def _returning(state: State, row: Row, rollback: Rollback, targets: tuple[str, ...]) -> Iterator[Draft]:
    """Load and prove the version on every target, also where it is loaded still; then promote it."""
    missing = [name for name in targets if name not in rollback.proven]
    if not missing:
        yield _promoted(state, row, rollback)
        yield _closed(state, row, rollback, Return.DONE, (Reason.ROLLED_BACK, ""))
        return
    stored = state.versions[rollback.version]
    for name in [] if stored.damaged else missing:
        instance = state.instances[name]
        if name in rollback.touched or busy(state, name):
            continue
        if stored.version in instance.versions or not full(state, instance):
            yield load(state, row, instance, stored.resident, rollback.id, reason=Reason.ASKED)


def _promoted(state: State, row: Row, rollback: Rollback) -> Draft:
    stored = state.versions[rollback.version]
    return Draft(
        f"blend/{rollback.request.blend}",
        BlendPromoted(
            request=rollback.id,
            blend=rollback.request.blend,
            base=stored.base,
            resident=stored.resident,
            members=stored.members,
            base_weight_ppm=stored.base_weight_ppm,
            instances=rollback.targets,
            why=why(
                state,
                row,
                Reason.ROLLED_BACK,
                rules=[at_least("blend.instances_proven", len(rollback.proven), len(rollback.targets))],
                inputs=[age(state, f"version/{stored.version}", stored.pos, stored.since_us)],
            ),
        ),
    )


def _failing(state: State, row: Row, rollback: Rollback) -> Iterator[Draft]:
    """Take the version out again where it was loaded for this, each when its load has ended; then close.

    After a gap in the bus nothing is taken out until somebody has looked at it.
    """
    undo = [state.instances[name] for name in rollback.brought]
    undo = [i for i in undo if i.endpoint and not lost_node(state, i.node)]
    if undo and state.degraded:
        return
    for instance in undo:
        if not claimed(state, f"load/{rollback.request.blend}@{instance.id}"):
            account = why(state, row, rollback.reason, inputs=[seen(state, instance)])
            yield taken_out(state, instance, rollback.version, rollback.id, account)
    under_way = any(o.request == rollback.id for o in state.orders.values())
    if not undo and not under_way:
        yield _closed(state, row, rollback, Return.FAILED, (rollback.reason, rollback.failed))


def _closed(state: State, row: Row, rollback: Rollback, outcome: Return, found: Obstacle) -> Draft:
    reason, detail = found
    return Draft(
        f"blend/{rollback.request.blend}",
        RollbackClosed(
            request=rollback.id,
            blend=rollback.request.blend,
            outcome=outcome,
            version=rollback.version or None,
            former=rollback.former or None,
            detail=detail,
            why=why(state, row, reason),
        ),
    )
