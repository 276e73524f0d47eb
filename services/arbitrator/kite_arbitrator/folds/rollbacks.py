"""How a rollback that was asked for comes to its end."""

from msgspec import structs

from kite_arbitrator.folds.versions import restorable, unsound
from kite_arbitrator.records import Rollback, Row
from kite_arbitrator.state import State, former_of, put, targets_of, without
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import LoadFailed, LoadOrdered, RollbackClosed, RollbackOrdered, RollbackRequested
from kite_schemas.why import Reason


def requested(state: State, row: Row, data: RollbackRequested) -> State:
    """Remember what the blend means now, and which version it is to mean again."""
    blend, former = state.blends.get(data.blend), former_of(state, data.blend)
    version = data.version or (former.version if former else "")
    meant = blend.resident.version if blend else ""
    return put(state, Rollback(id=row.id, pos=row.pos, request=data, version=version, former=meant))


def load_ordered(state: State, _row: Row, data: LoadOrdered) -> State:
    """With its first load a rollback has its targets: the instances that answer for the base at that moment."""
    rollback = state.rollbacks.get(data.request or "")
    if rollback is None:
        return state
    targets = rollback.targets or tuple(i.id for i in targets_of(state, data.base))
    lacked = data.resident.version not in state.instances[data.instance].versions
    return put(
        state,
        structs.replace(
            rollback,
            targets=targets,
            touched=(*rollback.touched, data.instance),
            brought=(*rollback.brought, data.instance) if lacked else rollback.brought,
        ),
    )


def proven(state: State, _row: Row, data: EffectProven) -> State:
    for rollback in [r for r in state.rollbacks.values() if r.version == data.version and data.instance in r.touched]:
        if data.instance not in rollback.proven:
            state = put(state, structs.replace(rollback, proven=(*rollback.proven, data.instance)))
    return state


def missed(state: State, _row: Row, data: LoadFailed | EffectMissing) -> State:
    """The version cannot be returned to: it was not loaded, or has no effect. Damaged files are made again first."""
    reason = Reason.LOAD_FAILED if isinstance(data, LoadFailed) else Reason.EFFECT_MISSING
    for rollback in [r for r in state.rollbacks.values() if r.version == data.version and data.instance in r.targets]:
        if isinstance(data, LoadFailed) and unsound(data) and _restored(state, rollback):
            state = put(state, structs.replace(_untouched(rollback, data.instance), rebuilt=True))
        else:
            state = put(state, failing(rollback, reason, f"{data.instance}: {data.code}"))
    return state


def _restored(state: State, rollback: Rollback) -> bool:
    """Tell whether its version is made again, or is yet to be: once, for a disk that damages it at once does not heal.

    Ask before the version is known to be damaged: other targets may have found it so at the same time.
    """
    stored = state.versions.get(rollback.version)
    return stored is not None and restorable(state, stored) and (stored.damaged or not rollback.rebuilt)


def _untouched(rollback: Rollback, instance: str) -> Rollback:
    """Return a rollback as it was before an instance was given its load."""
    return structs.replace(
        rollback, touched=_without(rollback.touched, instance), brought=_without(rollback.brought, instance)
    )


def not_restored(state: State, version: str, detail: str) -> State:
    """What cannot be made again cannot be returned to."""
    for rollback in [r for r in state.rollbacks.values() if r.version == version]:
        state = put(state, failing(rollback, Reason.DAMAGED, f"{version} cannot be made again: {detail}"))
    return state


def failing(rollback: Rollback, reason: Reason, detail: str) -> Rollback:
    """Return a rollback that cannot be done; the first failure counts."""
    return rollback if rollback.failed else structs.replace(rollback, failed=detail, reason=reason)


def dropped(rollback: Rollback, instance: str) -> Rollback:
    """Return a rollback without a target that answers no more; without any it has failed."""
    left = structs.replace(
        _untouched(rollback, instance),
        targets=_without(rollback.targets, instance),
        proven=_without(rollback.proven, instance),
    )
    return left if left.targets else failing(left, Reason.INSTANCE_LOST, f"{instance} stopped, and was the last target")


def _without(names: tuple[str, ...], instance: str) -> tuple[str, ...]:
    return tuple(name for name in names if name != instance)


def undone(state: State, _row: Row, data: RollbackOrdered) -> State:
    """Once is enough: what stays after that is retired."""
    rollback = state.rollbacks.get(data.request)
    if rollback is None:
        return state
    return put(state, structs.replace(rollback, brought=_without(rollback.brought, data.instance)))


def closed(state: State, _row: Row, data: RollbackClosed) -> State:
    return structs.replace(state, rollbacks=without(state.rollbacks, data.request))
