"""One injection, step by step: verify, admit, blend, load and prove on one instance, then on the others, promote.

Each phase has one function in PHASES; it looks at the state only, so that it does not matter which row brought the
injection there.
"""

from collections.abc import Callable, Iterator, Sequence

from kite_arbitrator.rules.draft import Draft, age, at_least, at_most, seen, why, within
from kite_arbitrator.rules.v1.pressure import shedding
from kite_arbitrator.rules.v1.weights import Refused, Weights, weigh
from kite_arbitrator.state import (
    Injection,
    Instance,
    Phase,
    Row,
    State,
    busy,
    claimed,
    current,
    decay_of,
    lost_node,
    members,
    pools,
    reachable,
    serving,
)
from kite_schemas.policy import Pool
from kite_schemas.upcycle import (
    AdapterLimits,
    BaseRef,
    BlendPromoted,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    InjectionDeferred,
    InjectionRejected,
    LoadOrdered,
    MemberDropped,
    Resident,
    RollbackOrdered,
    VerificationOrdered,
)
from kite_schemas.why import Candidate, Reason, RuleValue, Why


def advance(state: State, row: Row) -> Iterator[Draft]:
    """Move every open injection on as far as the state allows."""
    for injection in sorted(state.injections.values(), key=lambda i: i.pos):
        phase = PHASES.get(injection.phase)
        if phase is not None:
            yield from phase(state, row, injection)


def _requested(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    request = injection.request
    obstacle = _obstacle(state, injection)
    if obstacle is not None:
        yield from _reject(state, row, injection, *obstacle)
        return
    pool = reachable(state, request.base)[0]
    yield Draft(
        _subject(injection),
        VerificationOrdered(
            node=pool.node,
            target=f"blend/{request.blend}",
            **within(state, current(state).expiry.verify_us),
            request=injection.id,
            blend=request.blend,
            adapter=request.adapter,
            base=_base(pool),
            limits=_limits(state, pool),
            why=why(state, row, Reason.ASKED),
        ),
    )


def _obstacle(state: State, injection: Injection) -> tuple[Reason, str] | None:
    """Return why an injection cannot even be looked at, or None."""
    request = injection.request
    blend = state.blends.get(request.blend)
    if not pools(state, request.base):
        return Reason.BASE_UNKNOWN, f"no pool of the fleet serves {request.base!r}"
    if not reachable(state, request.base):
        return Reason.NODE_LOST, f"no node that serves {request.base!r} is heard"
    if blend is not None and blend.base != request.base:
        return Reason.BLEND_OF_OTHER_BASE, f"blend {request.blend!r} belongs to base {blend.base!r}"
    others = (i for i in state.injections.values() if i.id != injection.id)
    if claimed(state, f"blend/{request.blend}") or any(i.request.blend == request.blend for i in others):
        return Reason.BLEND_BUSY, f"another injection into {request.blend!r} is under way"
    return None


def _verified(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    upcycle = current(state).upcycle
    blend = state.blends.get(injection.request.blend)
    try:
        weights = weigh(
            blend.members if blend else (),
            injection.request,
            decay_ppm=decay_of(state, injection.request.base),
            min_ppm=upcycle.weight_min_ppm,
        )
    except Refused as refused:
        yield from _reject(state, row, injection, refused.reason, str(refused))
        return
    if _closed_gate(state, injection) and not injection.request.dry_run:
        yield _defer(state, row, injection)
        return
    if injection.request.dry_run:
        yield _closed(state, row, injection, Ending.DRY_RUN, Reason.DRY_RUN, weights=weights)
        return
    yield from _admit(state, row, injection, weights)


def _closed_gate(state: State, injection: Injection) -> bool:
    """Tell whether admissions of the base are stopped: by a freeze, or because a node of it sheds."""
    return state.freeze is not None or shedding(state, injection.request.base)


def _defer(state: State, row: Row, injection: Injection) -> Draft:
    """Say until when at least: a freeze has an end, shedding lasts as long as its cause."""
    until_us = state.freeze.until_us if state.freeze else state.now_us
    rules = [at_most("upcycle.frozen_until_us", until_us, state.now_us)] if state.freeze else []
    account = why(state, row, Reason.FROZEN if state.freeze else Reason.SHEDDING, rules=rules)
    data = InjectionDeferred(request=injection.id, blend=injection.request.blend, until_us=until_us, why=account)
    return Draft(_subject(injection), data)


def _deferred(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """A verified injection waits until admissions go on; that it does was said when it began to."""
    if not _closed_gate(state, injection):
        yield from _verified(state, row, injection)


def _admit(state: State, row: Row, injection: Injection, weights: Weights) -> Iterator[Draft]:
    request = injection.request
    found = members(state, request.base)
    targets = [i for i in found if _chosen(state, i)]
    if not targets:
        yield from _reject(state, row, injection, Reason.NO_READY_INSTANCE, f"no instance of {request.base!r} is ready")
        return
    for member in weights.dropped:
        yield _dropped(state, row, injection, weights, member.adapter.digest)
    pool = reachable(state, request.base)[0]
    yield Draft(
        _subject(injection),
        InjectionAdmitted(
            node=targets[0].node,
            target=f"blend/{request.blend}",
            **within(state, current(state).expiry.blend_us),
            request=injection.id,
            blend=request.blend,
            base=_base(pool),
            members=weights.members,
            base_weight_ppm=weights.base_ppm,
            instances=tuple(i.id for i in targets),
            max_lora_rank=pool.spec.max_lora_rank,
            residual_max_ppm=current(state).upcycle.residual_max_ppm,
            why=_admission(state, row, injection, weights, found),
        ),
    )


def _admission(state: State, row: Row, injection: Injection, weights: Weights, found: list[Instance]) -> Why:
    verified = age(state, f"adapter/{injection.request.adapter.name}", injection.fact_pos, injection.fact_us)
    return why(
        state,
        row,
        Reason.VERIFIED,
        rules=_weight_rules(state, injection, weights),
        candidates=[_candidate(state, i) for i in found],
        inputs=[verified, *(seen(state, i) for i in found if _chosen(state, i))],
    )


def _weight_rules(state: State, injection: Injection, weights: Weights) -> list[RuleValue]:
    upcycle = current(state).upcycle
    least = min(m.weight_ppm for m in weights.members)
    taken = sum(m.weight_ppm for m in weights.members)
    decay_ppm = decay_of(state, injection.request.base)
    decay = at_least("upcycle.weight_decay_ppm", decay_ppm, upcycle.weight_decay_ppm)
    return [
        *([decay] if decay.fired else []),
        at_most("upcycle.params_share_max_ppm", injection.share_ppm, upcycle.params_share_max_ppm),
        at_least("upcycle.weight_min_ppm", least, upcycle.weight_min_ppm),
        at_most("blend.weights_ppm", taken, 1_000_000),
    ]


def _chosen(state: State, instance: Instance) -> bool:
    return serving(instance) and not lost_node(state, instance.node)


def _candidate(state: State, instance: Instance) -> Candidate:
    if _chosen(state, instance):
        return Candidate(id=instance.id, chosen=True, reason=Reason.VERIFIED)
    reason = Reason.NODE_LOST if lost_node(state, instance.node) else Reason.NOT_READY
    return Candidate(id=instance.id, chosen=False, reason=reason)


def _dropped(state: State, row: Row, injection: Injection, weights: Weights, digest: str) -> Draft:
    member = next(m for m in weights.dropped if m.adapter.digest == digest)
    rule = at_least("upcycle.weight_min_ppm", member.weight_ppm, current(state).upcycle.weight_min_ppm)
    return Draft(
        _subject(injection),
        MemberDropped(
            request=injection.id,
            blend=injection.request.blend,
            member=member.adapter,
            weight_ppm=member.weight_ppm,
            why=why(state, row, Reason.WEIGHT_TOO_SMALL, rules=[rule]),
        ),
    )


def _loading(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """Load into one instance first: its proof gives the print that the others are held against."""
    assert injection.resident is not None  # noqa: S101 # the fold sets it with the phase
    limit_ppm = current(state).upcycle.blend_share_max_ppm
    if limit_ppm is not None and injection.blend_share_ppm > limit_ppm and not injection.touched:
        rule = at_most("upcycle.blend_share_max_ppm", injection.blend_share_ppm, limit_ppm)
        yield _closed(state, row, injection, Ending.REFUSED, Reason.BLEND_TOO_LARGE, rules=[rule])
        return
    missing = [name for name in injection.targets if name not in injection.proven]
    if not missing:
        yield _promoted(state, row, injection)
        yield _closed(state, row, injection, Ending.PROMOTED, Reason.EFFECT_PROVEN)
        return
    wave = missing if injection.proven else missing[:1]
    for name in wave:
        if name not in injection.touched and not busy(state, name):
            yield load(state, row, state.instances[name], injection.resident, injection.id)


def load(state: State, row: Row, instance: Instance, resident: Resident, request: str | None) -> Draft:
    """Return the order to load one version into one instance and prove it; without a request it is a repair."""
    reason = Reason.RESIDENT_MISSING if request is None else Reason.VERIFIED
    return Draft(
        f"instance/{instance.id}",
        LoadOrdered(
            node=instance.node,
            target=f"load/{resident.blend}@{instance.id}",
            **within(state, current(state).expiry.load_us),
            request=request,
            instance=instance.id,
            endpoint=instance.endpoint,
            base=instance.base,
            resident=resident,
            noise_micronats=instance.noise_micronats,
            why=why(state, row, reason, inputs=[seen(state, instance)]),
        ),
    )


def _promoted(state: State, row: Row, injection: Injection) -> Draft:
    assert injection.resident is not None  # noqa: S101 # the fold sets it with the phase
    proven = age(state, f"proof/{injection.resident.version}", injection.fact_pos, injection.fact_us)
    return Draft(
        _subject(injection),
        BlendPromoted(
            request=injection.id,
            blend=injection.request.blend,
            base=injection.request.base,
            resident=injection.resident,
            members=injection.members,
            base_weight_ppm=injection.base_weight_ppm,
            instances=injection.targets,
            why=why(
                state,
                row,
                Reason.EFFECT_PROVEN,
                rules=[at_least("blend.instances_proven", len(injection.proven), len(injection.targets))],
                inputs=[proven],
            ),
        ),
    )


def _refused(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    yield _closed(state, row, injection, Ending.REFUSED, Reason.ADAPTER_REFUSED)


def _failing(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """Take the version out of every instance that may hold it, each when its load has ended; then close.

    After a gap in the bus nothing is taken out until somebody has looked at it.
    """
    if state.degraded and injection.touched:
        return
    undo = [state.instances[name] for name in injection.touched if name in state.instances]
    undo = [instance for instance in undo if instance.endpoint and not lost_node(state, instance.node)]
    for instance in undo:
        if not claimed(state, _target(injection, instance)):
            yield _rollback(state, row, injection, instance)
    under_way = any(o.request == injection.id and o.type == RollbackOrdered.TYPE for o in state.orders.values())
    if not undo and not under_way:
        yield _closed(state, row, injection, injection.ending, injection.reason)


def _target(injection: Injection, instance: Instance) -> str:
    return f"load/{injection.request.blend}@{instance.id}"


def _rollback(state: State, row: Row, injection: Injection, instance: Instance) -> Draft:
    assert injection.resident is not None  # noqa: S101 # nothing was loaded without one
    account = why(state, row, injection.reason, inputs=[seen(state, instance)])
    return rollback(state, instance, injection.resident.version, injection.id, account)


def rollback(state: State, instance: Instance, version: str, request: str, account: Why) -> Draft:
    """Return the order to take a version that was not promoted out of one instance again."""
    blend = version.partition("@")[0]
    return Draft(
        f"instance/{instance.id}",
        RollbackOrdered(
            node=instance.node,
            target=f"load/{blend}@{instance.id}",
            **within(state, current(state).expiry.load_us),
            request=request,
            instance=instance.id,
            endpoint=instance.endpoint,
            version=version,
            why=account,
        ),
    )


def _reject(state: State, row: Row, injection: Injection, reason: Reason, detail: str) -> Iterator[Draft]:
    request = injection.request
    data = InjectionRejected(request=injection.id, blend=request.blend, detail=detail, why=why(state, row, reason))
    yield Draft(_subject(injection), data)
    yield _closed(state, row, injection, Ending.REJECTED, reason)


def _closed(
    state: State,
    row: Row,
    injection: Injection,
    ending: Ending,
    reason: Reason,
    *,
    weights: Weights | None = None,
    rules: Sequence[RuleValue] = (),
) -> Draft:
    return Draft(
        _subject(injection),
        InjectionClosed(
            request=injection.id,
            blend=injection.request.blend,
            outcome=ending,
            members=weights.members if weights else injection.members,
            base_weight_ppm=weights.base_ppm if weights else injection.base_weight_ppm,
            version=injection.resident.version if injection.resident and ending is Ending.PROMOTED else None,
            why=why(state, row, reason, rules=rules),
        ),
    )


def _subject(injection: Injection) -> str:
    return f"blend/{injection.request.blend}"


def _base(pool: Pool) -> BaseRef:
    return BaseRef(name=pool.spec.served_name, path=pool.base_path, digest=pool.base_digest)


def _limits(state: State, pool: Pool) -> AdapterLimits:
    share_ppm = current(state).upcycle.params_share_max_ppm
    return AdapterLimits(max_lora_rank=pool.spec.max_lora_rank, params_share_max_ppm=share_ppm)


PHASES: dict[Phase, Callable[[State, Row, Injection], Iterator[Draft]]] = {
    Phase.REQUESTED: _requested,
    Phase.VERIFIED: _verified,
    Phase.DEFERRED: _deferred,
    Phase.REFUSED: _refused,
    Phase.LOADING: _loading,
    Phase.FAILING: _failing,
}
