"""How reports and decisions change injections and blends."""

from msgspec import structs

from kite_arbitrator.state import (
    Blend,
    Injection,
    Instance,
    OpenOrder,
    Phase,
    Row,
    State,
    backed_off,
    put,
    without,
)
from kite_schemas.proof import EffectMissing, EffectProven
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
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
)
from kite_schemas.why import Reason
from kite_schemas.yoco import State as Life


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
    injection = _loading(state, data.resident.version)
    if injection is None:
        return state
    return put(state, structs.replace(injection, touched=_added(injection.touched, data.instance)))


def loaded(state: State, row: Row, data: BlendLoaded) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = _added(instance.versions, data.version)
    holder = structs.replace(instance, versions=versions, pos=row.pos, seen_us=row.ledger_us)
    return put(state, _strayed(state, data, holder))


def _strayed(state: State, data: BlendLoaded | EffectProven, instance: Instance) -> Instance:
    """Mark a version that came by an order which was given up: nobody waits for it, so that it is taken out again."""
    order, injection = state.given_up.get(data.order or ""), _loading(state, data.version)
    wanted = injection is not None and injection.phase is not Phase.FAILING
    if order is None or order.request is None or wanted or promoted_version(state, data.version):
        return instance
    mark = (data.version, order.request)
    return instance if mark in instance.strays else structs.replace(instance, strays=(*instance.strays, mark))


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
    injection = _loading(state, data.version)
    if injection is None or injection.resident is None:
        return state
    resident = injection.resident.model_copy(update={"effect_print": data.effect_print})
    proven = _added(injection.proven, data.instance)
    return put(
        state,
        structs.replace(injection, resident=resident, proven=proven, fact_pos=row.pos, fact_us=row.ledger_us),
    )


def load_failed(state: State, _row: Row, data: LoadFailed) -> State:
    injection = _loading(state, data.version)
    if injection is not None:
        return put(state, _failing(injection, Reason.LOAD_FAILED))
    instance = state.instances.get(data.instance)
    return state if instance is None else put(state, backed_off(state, instance))


def effect_missing(state: State, _row: Row, data: EffectMissing) -> State:
    """A new version is at fault itself, also after its injection; when an already proven one fails, the instance is."""
    injection = _loading(state, data.version)
    if injection is not None:
        return put(state, _failing(injection, Reason.EFFECT_MISSING))
    instance = state.instances.get(data.instance)
    if instance is None or (data.order in state.given_up and not promoted_version(state, data.version)):
        return state
    return lost(put(state, structs.replace(instance, state=Life.QUARANTINED)), instance.id)


def rolled_back(state: State, _row: Row, data: RolledBack) -> State:
    instance = state.instances.get(data.instance)
    if instance is None:
        return state
    versions = tuple(version for version in instance.versions if version != data.version)
    return _settled(put(state, structs.replace(instance, versions=versions)), data.instance, data.version)


def rollback_ordered(state: State, _row: Row, data: RollbackOrdered) -> State:
    """Once is enough: a version that stays after that is left where it is."""
    state = _settled(state, data.instance, data.version)
    injection = state.injections.get(data.request)
    if injection is None:
        return state
    touched = tuple(name for name in injection.touched if name != data.instance)
    return put(state, structs.replace(injection, touched=touched))


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
    return structs.replace(state, injections=without(state.injections, data.request))


def _loading(state: State, version: str) -> Injection | None:
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


def _advanced(state: State, request: str, *, when: Phase | None = None, **changes: object) -> State:
    """Move an injection on; a fact that comes too late, after its order was given up, changes nothing."""
    injection = state.injections.get(request)
    if injection is None or (when is not None and injection.phase is not when):
        return state
    return put(state, structs.replace(injection, **changes))


def _added(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return names if name in names else (*names, name)


def lost(state: State, instance: str) -> State:
    """An instance that stops being ready fails the injections that were to be loaded into it."""
    for injection in list(state.injections.values()):
        if injection.phase in (Phase.BLENDING, Phase.LOADING) and instance in injection.targets:
            touched = tuple(name for name in injection.touched if name != instance)
            state = put(state, _failing(structs.replace(injection, touched=touched), Reason.INSTANCE_LOST))
    return state


def injection_expired(state: State, order: OpenOrder, reason: Reason) -> State:
    injection = state.injections.get(order.request or "")
    if injection is None or injection.phase not in (Phase.VERIFYING, Phase.BLENDING, Phase.LOADING):
        return state
    return put(state, structs.replace(_failing(injection, reason), ending=Ending.EXPIRED))
