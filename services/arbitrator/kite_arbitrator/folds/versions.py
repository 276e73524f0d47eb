"""How a version comes to its standing: stored, promoted, retained, retired, released, deleted; lost, and made again."""

from msgspec import structs

from kite_arbitrator.records import Injection, Instance, Phase, Row, Standing, Stored, Told
from kite_arbitrator.state import State, delayed, lasting, listing, put, without
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import (
    BlendDeleted,
    BlendFailed,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    BlendUnloaded,
    DeleteFailed,
    DeleteOrdered,
    DriftObserved,
    InjectionClosed,
    LoadFailed,
    RebuildOrdered,
    ResidentsSet,
    RetireFailed,
    RetireOrdered,
    RolledBack,
)

LOOSE = frozenset({Standing.RELEASED, Standing.UNWANTED, Standing.DELETING})
"""What nothing refers to by its standing: it may be deleted, or is being."""

LEAVING = frozenset({Standing.RETAINED, Standing.RETIRING})
"""What is in the store alone as soon as no instance lists it."""

UNSOUND = frozenset({"store_damaged", "missing_path"})
"""Codes of a load that ended before the engine was asked: the version's files are not its own, or gone."""


def stored(state: State, row: Row, data: BlendStored) -> State:
    """Remember a version that the store holds now; one that comes too late, or of no injection, is unwanted."""
    known = state.versions.get(data.resident.version)
    state = _made_again(state, data)
    injection = state.injections.get(data.request)
    brings = injection is not None and injection.phase is Phase.LOADING and injection.resident == data.resident
    if known is None:
        return put(state, _new(state, row, data, injection, Standing.FRESH if brings else Standing.UNWANTED))
    again = structs.replace(known, damaged=False, size_bytes=data.size_bytes or known.size_bytes)
    if injection is None or not brings or known.standing not in LOOSE | {Standing.RETIRING}:
        return put(state, again)
    fresh = _new(state, row, data, injection, Standing.FRESH)
    kept = {"left_us": known.left_us, "quarantined": known.quarantined, "resident": known.resident}
    return put(state, structs.replace(fresh, **kept))


def _new(state: State, row: Row, data: BlendStored, injection: Injection | None, standing: Standing) -> Stored:
    blend = state.blends.get(data.resident.blend)
    base = injection.request.base if injection else blend.base if blend else ""
    return Stored(
        resident=data.resident,
        digest=data.digest,
        base=base,
        request=data.request,
        members=injection.members if injection else (),
        base_weight_ppm=injection.base_weight_ppm if injection else 0,
        standing=standing,
        since_us=row.ledger_us,
        pos=row.pos,
        size_bytes=data.size_bytes or 0,
        max_lora_rank=injection.max_lora_rank if injection else 0,
        residual_max_ppm=injection.residual_max_ppm if injection else None,
    )


def _made_again(state: State, data: BlendStored) -> State:
    """What was to be made again is not asked for again at once when something else came of it."""
    order = state.orders.get(data.order or "")
    if order is None or order.type != RebuildOrdered.TYPE:
        return state
    if order.version != data.resident.version:
        return delayed(state, order.target)
    return structs.replace(state, delays=without(state.delays, order.target))


def promoted(state: State, row: Row, data: BlendPromoted) -> State:
    """The blend's former version is retained, and the one that was retained before it leaves: one is kept, no more.

    Ask before the blend means the new version.
    """
    former, version = state.blends.get(data.blend), data.resident.version
    replaced = former is not None and former.resident.version != version
    for stored in [v for v in state.versions.values() if v.resident.blend == data.blend]:
        if stored.version == version:
            meant = _moved(stored, Standing.PROMOTED, row)
            state = put(state, structs.replace(meant, resident=data.resident, left_us=0))
        elif replaced and stored.standing is Standing.PROMOTED:
            state = put(state, structs.replace(_moved(stored, Standing.RETAINED, row), left_us=row.ledger_us))
        elif replaced and stored.standing is Standing.RETAINED:
            state = put(state, _moved(stored, Standing.RETIRING, row))
    return state


def _moved(stored: Stored, standing: Standing, row: Row) -> Stored:
    return structs.replace(stored, standing=standing, since_us=row.ledger_us)


def closed(state: State, row: Row, data: InjectionClosed) -> State:
    """What an injection brought and did not promote is unwanted, unless it was promoted some time before.

    Ask before the injection leaves the state.
    """
    injection = state.injections.get(data.request)
    stored = state.versions.get(injection.resident.version) if injection and injection.resident else None
    if stored is None or stored.standing is not Standing.FRESH or stored.request != data.request:
        return state
    return put(state, _moved(stored, Standing.RETIRING if stored.left_us else Standing.UNWANTED, row))


def load_failed(state: State, _row: Row, data: LoadFailed) -> State:
    """What was found damaged on the way to an engine is known to be, without a look at what engines hold."""
    stored = state.versions.get(data.version)
    if stored is None or not unsound(data):
        return state
    return put(state, structs.replace(stored, damaged=True))


def unsound(data: LoadFailed) -> bool:
    """Tell whether it was the version's files that kept it from being loaded."""
    return data.stage == "check" and data.code in UNSOUND


def restorable(state: State, stored: Stored) -> bool:
    """Tell whether a version can be made again from its members, whose paths and weights are known."""
    return lasting(state) and bool(stored.members)


def effect_missing(state: State, _row: Row, data: EffectMissing) -> State:
    """A version that was to become what its blend means, and has no effect, never will; not one that is it already."""
    stored = state.versions.get(data.version or "")
    if stored is None or stored.standing is Standing.PROMOTED or not _judged(state, data):
        return state
    return put(state, structs.replace(stored, quarantined=True))


def _judged(state: State, data: EffectMissing) -> bool:
    """Tell whether it is the version that is at fault: nobody has proven it, wherever it is being brought."""
    brought = [i for i in state.injections.values() if i.resident is not None and i.resident.version == data.version]
    if brought:
        return all(not i.request.partial or (i.phase is Phase.FAILING and not i.proven) for i in brought)
    return any(rollback.version == data.version for rollback in state.rollbacks.values())


def loaded(state: State, _row: Row, data: BlendLoaded) -> State:
    """Remember the engine's own number of the adapter, and how many it holds."""
    instance = state.instances.get(data.instance)
    if instance is None or (data.slot is None and data.slots_taken is None):
        return state
    slots = _slots_without(instance, data.version)
    if data.slot is not None:
        slots = (*slots, (data.version, data.slot))
    return put(state, _counted(structs.replace(instance, slots=slots), data.slots_taken))


def proven(state: State, _row: Row, data: EffectProven) -> State:
    """Keep the print of a version that is in the store."""
    stored = state.versions.get(data.version or "")
    if stored is None or stored.resident.effect_print is not None:
        return state
    resident = stored.resident.model_copy(update={"effect_print": data.effect_print})
    return put(state, structs.replace(stored, resident=resident))


def rolled_back(state: State, _row: Row, data: RolledBack) -> State:
    """Forget where the version was; whether its numbers were finite is settled with it."""
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    poisoned = tuple(version for version in instance.poisoned if version != data.version)
    gone = structs.replace(instance, slots=_slots_without(instance, data.version), poisoned=poisoned)
    return put(state, _counted(gone, data.slots_taken))


def untold(state: State, instance: str) -> State:
    """What an instance holds is about to change: what is found by what was told before says nothing any more."""
    known = state.instances.get(instance)
    if known is None or known.told is None:
        return state
    return put(state, structs.replace(known, told=None))


def retire_ordered(state: State, row: Row, data: RetireOrdered) -> State:
    state = untold(state, data.instance)
    stored = state.versions.get(data.version)
    if stored is None or stored.standing is not Standing.RETAINED:
        return state
    return put(state, _moved(stored, Standing.RETIRING, row))


def unloaded(state: State, _row: Row, data: BlendUnloaded) -> State:
    """The instance lists it no more; its slot counts as taken until the engine says otherwise."""
    instance = state.instances.get(data.instance)
    state = structs.replace(state, delays=without(state.delays, retire_target(data.version, data.instance)))
    if instance is None:
        return state
    gone = structs.replace(
        instance,
        versions=tuple(version for version in instance.versions if version != data.version),
        drifted=tuple(name for name in instance.drifted if name != data.version),
        strays=tuple(stray for stray in instance.strays if stray[0] != data.version),
        slots=_slots_without(instance, data.version),
    )
    return put(state, _counted(gone, data.slots_taken))


def _slots_without(instance: Instance, version: str) -> tuple[tuple[str, int], ...]:
    return tuple(slot for slot in instance.slots if slot[0] != version)


def _counted(instance: Instance, slots_taken: int | None) -> Instance:
    return instance if slots_taken is None else structs.replace(instance, slots_taken=slots_taken)


def retire_target(name: str, instance: str) -> str:
    """Return the target of a retirement: it has a lane of its own, and keeps no load of the instance waiting."""
    return f"retire/{name}@{instance}"


def delete_ordered(state: State, row: Row, data: DeleteOrdered) -> State:
    return put(state, _moved(state.versions[data.version], Standing.DELETING, row))


def deleted(state: State, _row: Row, data: BlendDeleted) -> State:
    """It is gone; if somebody has come to need it since the order was given up, it has to be made again."""
    stored = state.versions.get(data.version)
    if stored is None:
        return state
    if stored.standing not in LOOSE:
        return put(state, structs.replace(stored, damaged=True))
    begin = retire_target(data.version, "")
    delays = {
        target: delay
        for target, delay in state.delays.items()
        if not target.startswith(begin) and not target.endswith(f"/{data.version}")
    }
    return structs.replace(state, versions=without(state.versions, data.version), delays=delays)


def kept(state: State, row: Row, version: str) -> State:
    """A version whose deletion failed is what it was."""
    stored = state.versions.get(version)
    if stored is None or stored.standing is not Standing.DELETING:
        return state
    return put(state, resting(stored, row))


def resting(stored: Stored, row: Row) -> Stored:
    """Return a version that no instance lists: one that was promoted may be returned to, unless it has no effect."""
    wanted = stored.left_us and not stored.quarantined
    return _moved(stored, Standing.RELEASED if wanted else Standing.UNWANTED, row)


def failed(state: State, row: Row, data: RetireFailed | DeleteFailed | BlendFailed) -> State:
    """What was ordered about a version's end or repair failed: it is not ordered again at once."""
    order = state.orders.get(data.order or "")
    if isinstance(data, DeleteFailed):
        state = kept(state, row, data.version)
    return state if order is None else delayed(state, order.target)


def told(state: State, row: Row, data: ResidentsSet) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = tuple(resident.version for resident in data.residents)
    note = Told(id=row.id, endpoint=data.endpoint, versions=versions, interval_us=data.interval_us)
    return put(state, structs.replace(instance, told=note))


def drifted(state: State, row: Row, data: DriftObserved) -> State:
    """What was found is the truth, if it was held against what is expected now and nothing is being done about it."""
    instance = state.instances.get(data.instance)
    if instance is None or instance.told is None or instance.told.id != data.told:
        return state
    if any(order.instance == instance.id for order in state.orders.values()):
        return state
    found = dict.fromkeys(data.found)
    versions = tuple(name for name in found if name in state.versions)
    strange = tuple(name for name in found if name not in state.versions)
    gone = {retire_target(name, instance.id) for name in (*instance.versions, *instance.drifted) if name not in found}
    delays = {target: delay for target, delay in state.delays.items() if target not in gone}
    state = structs.replace(state, delays=delays) if len(delays) < len(state.delays) else state
    fields = {"versions": versions, "drifted": strange, "pos": row.pos, "seen_us": row.ledger_us}
    state = put(state, structs.replace(instance, **fields))
    for version in [name for name in data.missing if name in state.versions]:
        state = put(state, structs.replace(state.versions[version], damaged=True))
    return state


def released(state: State, row: Row) -> State:
    """Versions that are on their way out, and that no instance lists any more, are in the store alone."""
    for stored in [v for v in state.versions.values() if v.standing in LEAVING]:
        if not listing(state, stored.version):
            state = put(state, resting(stored, row))
    return state
