"""How reports and decisions change injections and blends."""

from msgspec import structs

from kite_arbitrator.folds import rollbacks
from kite_arbitrator.records import Blend, Injection, Instance, OpenOrder, Phase, Row, Standing
from kite_arbitrator.state import State, backed_off, delayed, put, quarantined, standing_of, without
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendFailed,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    InjectionDeferred,
    InjectionRequested,
    LoadFailed,
    LoadOrdered,
    RollbackFailed,
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
)
from kite_schemas.why import Reason
from kite_schemas.yoco import State as Life

UNREACHABLE = "engine_unreachable"
"""Code of an order whose engine did not answer: it is gone, or will answer again."""


def requested(state: State, row: Row, data: InjectionRequested) -> State:
    return put(state, Injection(id=row.id, pos=row.pos, request=data))


def verifying(state: State, _row: Row, data: VerificationOrdered) -> State:
    return _advanced(state, data.request, phase=Phase.VERIFYING)


def verified(state: State, row: Row, data: AdapterVerified) -> State:
    return _advanced(
        state,
        data.request,
        when=Phase.VERIFYING,
        phase=Phase.VERIFIED,
        share_ppm=data.share_ppm,
        fact_pos=row.pos,
        fact_us=row.ledger_us,
    )


def deferred(state: State, _row: Row, data: InjectionDeferred) -> State:
    return _advanced(state, data.request, phase=Phase.DEFERRED)


def refused(state: State, row: Row, data: AdapterRefused) -> State:
    return _advanced(
        state,
        data.request,
        when=Phase.VERIFYING,
        phase=Phase.REFUSED,
        ending=Ending.REFUSED,
        reason=Reason.ADAPTER_REFUSED,
        fact_pos=row.pos,
        fact_us=row.ledger_us,
    )


def admitted(state: State, _row: Row, data: InjectionAdmitted) -> State:
    return _advanced(
        state,
        data.request,
        phase=Phase.BLENDING,
        members=data.members,
        base_weight_ppm=data.base_weight_ppm,
        targets=data.instances,
        max_lora_rank=data.max_lora_rank,
        residual_max_ppm=data.residual_max_ppm,
    )


def stored(state: State, row: Row, data: BlendStored) -> State:
    return _advanced(
        state,
        data.request,
        when=Phase.BLENDING,
        phase=Phase.LOADING,
        resident=data.resident,
        blend_share_ppm=data.share_ppm,
        fact_pos=row.pos,
        fact_us=row.ledger_us,
    )


def blend_failed(state: State, _row: Row, data: BlendFailed) -> State:
    injection = state.injections.get(data.request)
    return state if injection is None else put(state, _failing(injection, Reason.BLEND_FAILED))


def load_ordered(state: State, _row: Row, data: LoadOrdered) -> State:
    injection = loading(state, data.resident.version)
    if injection is None:
        return state
    return put(state, structs.replace(injection, touched=added(injection.touched, data.instance)))


def loaded(state: State, row: Row, data: BlendLoaded) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = added(instance.versions, data.version)
    holder = structs.replace(instance, versions=versions, pos=row.pos, seen_us=row.ledger_us)
    return put(state, _strayed(state, data, holder))


def _strayed(state: State, data: BlendLoaded | EffectProven, instance: Instance) -> Instance:
    """Mark a version that came by an order which was given up: nobody waits for it, so that it is taken out again."""
    order = state.given_up.get(data.order or "")
    if order is None or order.request is None or _wanted(state, data.version, instance.id):
        return instance
    mark = (data.version, order.request)
    return instance if mark in instance.strays else structs.replace(instance, strays=(*instance.strays, mark))


def _wanted(state: State, version: str, instance: str) -> bool:
    """Tell whether somebody wants this version in this instance: a blend, an injection, or a rollback."""
    injection = loading(state, version)
    if injection is not None and injection.phase is not Phase.FAILING and instance not in injection.failed:
        return True
    if standing_of(state, version) is Standing.RETAINED or promoted_version(state, version):
        return True
    return any(r.version == version and not r.failed and instance in r.targets for r in state.rollbacks.values())


def promoted_version(state: State, version: str) -> bool:
    """Tell whether a blend means this version now."""
    return any(blend.resident.version == version for blend in state.blends.values())


def _settled(state: State, name: str, version: str) -> State:
    """The version is no stray in the instance: it is on its way out, out, or wanted again."""
    instance = state.instances.get(name)
    if instance is None or not instance.strays:
        return state
    return put(state, structs.replace(instance, strays=tuple(s for s in instance.strays if s[0] != version)))


def proven(state: State, row: Row, data: EffectProven) -> State:
    instance = state.instances.get(data.instance)
    if instance is not None and data.version in instance.versions:
        state = put(state, _strayed(state, data, instance))
    injection = loading(state, data.version)
    if injection is None or injection.resident is None:
        return state
    resident = injection.resident.model_copy(update={"effect_print": data.effect_print})
    proven = added(injection.proven, data.instance)
    return put(
        state,
        structs.replace(injection, resident=resident, proven=proven, fact_pos=row.pos, fact_us=row.ledger_us),
    )


def load_failed(state: State, _row: Row, data: LoadFailed) -> State:
    injection, instance = loading(state, data.version), state.instances.get(data.instance)
    if injection is not None and not _partial(injection):
        return put(state, _failing(injection, Reason.LOAD_FAILED))
    if instance is not None and not _brings(state, data.version):
        state = put(state, backed_off(state, instance))
    return state if injection is None else put(state, _given_up(injection, data.instance, Reason.LOAD_FAILED))


def _brings(state: State, version: str) -> bool:
    """Tell whether a rollback is bringing this version: then its failure says nothing of the instance."""
    return any(rollback.version == version for rollback in state.rollbacks.values())


def effect_missing(state: State, _row: Row, data: EffectMissing) -> State:
    """A new version is at fault itself, also after its injection; when an already proven one fails, the instance is."""
    instance = state.instances.get(data.instance)
    if instance is not None and data.code is Missing.NOT_FINITE:
        poisoned = added(instance.poisoned, data.version)
        state = put(state, instance := structs.replace(instance, poisoned=poisoned))
    injection = loading(state, data.version)
    if injection is not None:
        if instance is not None and _partial(injection):
            state = put(state, backed_off(state, instance))
        return put(state, _given_up(injection, data.instance, Reason.EFFECT_MISSING))
    unproven = data.order in state.given_up and not promoted_version(state, data.version)
    if instance is None or unproven or _brings(state, data.version):
        return state
    return lost(put(state, quarantined(state, instance)), instance.id)


def rolled_back(state: State, _row: Row, data: RolledBack) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = tuple(version for version in instance.versions if version != data.version)
    state = _settled(put(state, structs.replace(instance, versions=versions)), data.instance, data.version)
    if data.healed is not False or instance.state is not Life.READY:
        return state
    return lost(put(state, quarantined(state, state.instances[instance.id])), instance.id)


def rollback_ordered(state: State, _row: Row, data: RollbackOrdered) -> State:
    """Once is enough: a version that stays after that is left where it is. An injection that is undone has failed."""
    state = _settled(state, data.instance, data.version)
    injection = state.injections.get(data.request)
    if injection is None:
        return state
    touched = tuple(name for name in injection.touched if name != data.instance)
    injection = structs.replace(injection, touched=touched)
    whole = injection.phase is Phase.LOADING and data.instance not in injection.failed
    return put(state, _failing(injection, data.why.reason) if whole else injection)


def rollback_failed(state: State, _row: Row, data: RollbackFailed) -> State:
    """An engine that is gone holds nothing: its node will say so, and one that answers again is asked once more."""
    injection, instance = state.injections.get(data.request), state.instances.get(data.instance)
    if injection is None or instance is None or instance.state is not Life.READY:
        return state
    target = undo_target(data.version, data.instance)
    if data.code != UNREACHABLE or target in state.delays or data.instance not in injection.failed:
        return stuck(state, data.request, data.instance)
    again = structs.replace(injection, touched=added(injection.touched, data.instance))
    return put(delayed(state, target), again)


def undo_target(version: str, instance: str) -> str:
    """Return what is put off when an engine could not be asked to let go of a version."""
    return f"undo/{version}@{instance}"


def stuck(state: State, request: str, instance: str) -> State:
    """What cannot be undone on a target that was given up would be promoted there unproven: all of it has failed."""
    injection = state.injections.get(request)
    if injection is None or instance not in injection.failed:
        return state
    return put(state, _failing(injection, Reason.LOAD_FAILED))


def promoted(state: State, row: Row, data: BlendPromoted) -> State:
    for name in state.instances:
        state = _settled(state, name, data.resident.version)
    return put(
        state,
        Blend(
            name=data.blend,
            base=data.base,
            resident=data.resident,
            members=data.members,
            base_weight_ppm=data.base_weight_ppm,
            pos=row.pos,
        ),
    )


def closed(state: State, _row: Row, data: InjectionClosed) -> State:
    injection = state.injections.get(data.request)
    if injection is not None and injection.resident is not None:
        done = {undo_target(injection.resident.version, name) for name in injection.failed}
        delays = {target: delay for target, delay in state.delays.items() if target not in done}
        state = structs.replace(state, delays=delays) if len(delays) < len(state.delays) else state
    return structs.replace(state, injections=without(state.injections, data.request))


def loading(state: State, version: str) -> Injection | None:
    """Return the injection that is bringing this version, if one is."""
    for injection in state.injections.values():
        if injection.resident is not None and injection.resident.version == version:
            return injection
    return None


def _failing(injection: Injection, reason: Reason) -> Injection:
    """The first failure counts: what follows while it is undone changes neither the reason nor the phase."""
    if injection.phase is Phase.FAILING:
        return injection
    return structs.replace(injection, phase=Phase.FAILING, reason=reason)


def _partial(injection: Injection) -> bool:
    return injection.request.partial and injection.phase in (Phase.BLENDING, Phase.LOADING)


def _given_up(injection: Injection, instance: str, reason: Reason) -> Injection:
    """Give up one target of what may be partial while there are others; else all of it has failed."""
    if not _partial(injection) or instance not in injection.targets:
        return _failing(injection, reason)
    proven = tuple(name for name in injection.proven if name != instance)
    injection = structs.replace(injection, failed=added(injection.failed, instance), proven=proven)
    return _failing(injection, reason) if set(injection.failed) >= set(injection.targets) else injection


def _advanced(state: State, request: str, *, when: Phase | None = None, **changes: object) -> State:
    """Move an injection on; a fact that comes too late, after its order was given up, changes nothing."""
    injection = state.injections.get(request)
    if injection is None or (when is not None and injection.phase is not when):
        return state
    return put(state, structs.replace(injection, **changes))


def added(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return names if name in names else (*names, name)


def lost(state: State, instance: str) -> State:
    """An instance that stops being ready fails the injections that were to be loaded into it; a rollback needs it less.

    What it held is gone with it, or is what it wakes with.
    """
    for injection in list(state.injections.values()):
        if injection.phase in (Phase.BLENDING, Phase.LOADING) and instance in injection.targets:
            touched = tuple(name for name in injection.touched if name != instance)
            shorter = structs.replace(injection, touched=touched)
            state = put(state, _given_up(shorter, instance, Reason.INSTANCE_LOST))
    for rollback in list(state.rollbacks.values()):
        if instance in rollback.targets:
            state = put(state, rollbacks.dropped(rollback, instance))
    return state


def injection_expired(state: State, order: OpenOrder, reason: Reason) -> State:
    """The injection or rollback that an order was given for has failed there."""
    rollback = state.rollbacks.get(order.request or "")
    if rollback is not None:
        return put(state, rollbacks.failing(rollback, reason, f"{order.instance} did not answer in time"))
    injection = state.injections.get(order.request or "")
    if injection is None or injection.phase not in (Phase.VERIFYING, Phase.BLENDING, Phase.LOADING):
        return state
    moved = _given_up(injection, order.instance or "", reason)
    return put(state, structs.replace(moved, ending=Ending.EXPIRED) if moved.phase is Phase.FAILING else moved)
