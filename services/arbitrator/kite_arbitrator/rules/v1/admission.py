"""What a verified injection is admitted with, or why it is not, or not yet: weights, gates, slots, instances."""

from collections.abc import Iterator, Sequence

from kite_arbitrator.records import Injection, Instance, Phase, Row
from kite_arbitrator.rules.draft import Draft, age, at_least, at_most, seen, why, within
from kite_arbitrator.rules.v1.closing import base_of, closed, reject, subject
from kite_arbitrator.rules.v1.pressure import shedding
from kite_arbitrator.rules.v1.slots import crowded, overfull
from kite_arbitrator.rules.v1.weights import Refused, Weights, weigh
from kite_arbitrator.state import State, current, decay_of, lost_node, members, reachable, serving
from kite_schemas.upcycle import (
    DeleteOrdered,
    Ending,
    InjectionAdmitted,
    InjectionDeferred,
    MemberDropped,
)
from kite_schemas.why import Candidate, Reason, RuleValue, Why


def verified(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """Admit what keeps the contract, with its weights; else say why not, or that it has to wait."""
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
        yield from reject(state, row, injection, refused.reason, str(refused))
        return
    if closed_gate(state, injection) and not injection.request.dry_run:
        yield _defer(state, row, injection)
        return
    if injection.request.dry_run:
        yield closed(state, row, injection, Ending.DRY_RUN, Reason.DRY_RUN, weights=weights)
        return
    yield from _admit(state, row, injection, weights)


def closed_gate(state: State, injection: Injection) -> bool:
    """Tell whether admissions of the base are stopped: by a freeze, or because a node of it sheds."""
    return state.freeze is not None or shedding(state, injection.request.base)


def _defer(state: State, row: Row, injection: Injection) -> Draft:
    """Say until when at least: a freeze has an end, shedding lasts as long as its cause."""
    until_us = state.freeze.until_us if state.freeze else state.now_us
    rules = [at_most("upcycle.frozen_until_us", until_us, state.now_us)] if state.freeze else []
    account = why(state, row, Reason.FROZEN if state.freeze else Reason.SHEDDING, rules=rules)
    data = InjectionDeferred(request=injection.id, blend=injection.request.blend, until_us=until_us, why=account)
    return Draft(subject(injection), data)


def deferred(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """A verified injection waits until admissions go on; that it does was said when it began to."""
    if not closed_gate(state, injection):
        yield from verified(state, row, injection)


def _admit(state: State, row: Row, injection: Injection, weights: Weights) -> Iterator[Draft]:
    request = injection.request
    if any(order.type == DeleteOrdered.TYPE for order in state.orders.values()):
        return  # what is deleted now might be what it brings
    found = members(state, request.base)
    ready = [i for i in found if _chosen(state, i)]
    targets = [i for i in ready if not crowded(state, i)]
    if len(targets) < len(ready) and not (request.partial and targets):
        detail = overfull(state, [i for i in ready if i not in targets], request.blend)
        yield from reject(state, row, injection, Reason.SLOTS_FULL, detail)
        return
    if not targets:
        yield from reject(state, row, injection, Reason.NO_READY_INSTANCE, f"no instance of {request.base!r} is ready")
        return
    for member in weights.dropped:
        yield _dropped(state, row, injection, weights, member.adapter.digest)
    pool = reachable(state, request.base)[0]
    yield Draft(
        subject(injection),
        InjectionAdmitted(
            node=targets[0].node,
            target=f"blend/{request.blend}",
            **within(state, current(state).expiry.blend_us),
            request=injection.id,
            blend=request.blend,
            base=base_of(pool),
            members=weights.members,
            base_weight_ppm=weights.base_ppm,
            instances=tuple(i.id for i in targets),
            max_lora_rank=pool.spec.max_lora_rank,
            residual_max_ppm=current(state).upcycle.residual_max_ppm,
            why=_admission(state, row, injection, weights, found=found, targets=targets),
        ),
    )


def admissible(state: State, injection: Injection) -> bool:
    """Tell whether an injection is about to be admitted, or was and has not come to its end."""
    waiting = injection.phase is Phase.DEFERRED and not closed_gate(state, injection)
    return waiting or injection.phase in UNDER_WAY


UNDER_WAY = frozenset({Phase.VERIFIED, Phase.BLENDING, Phase.LOADING, Phase.FAILING})


def _admission(
    state: State,
    row: Row,
    injection: Injection,
    weights: Weights,
    *,
    found: Sequence[Instance],
    targets: Sequence[Instance],
) -> Why:
    verified = age(state, f"adapter/{injection.request.adapter.name}", injection.fact_pos, injection.fact_us)
    return why(
        state,
        row,
        Reason.VERIFIED,
        rules=_weight_rules(state, injection, weights),
        candidates=[_candidate(state, i, targets) for i in found],
        inputs=[verified, *(seen(state, i) for i in targets)],
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


def _candidate(state: State, instance: Instance, targets: Sequence[Instance]) -> Candidate:
    if instance in targets:
        return Candidate(id=instance.id, chosen=True, reason=Reason.VERIFIED)
    if _chosen(state, instance):
        return Candidate(id=instance.id, chosen=False, reason=Reason.SLOTS_FULL)
    reason = Reason.NODE_LOST if lost_node(state, instance.node) else Reason.NOT_READY
    return Candidate(id=instance.id, chosen=False, reason=reason)


def _dropped(state: State, row: Row, injection: Injection, weights: Weights, digest: str) -> Draft:
    member = next(m for m in weights.dropped if m.adapter.digest == digest)
    rule = at_least("upcycle.weight_min_ppm", member.weight_ppm, current(state).upcycle.weight_min_ppm)
    return Draft(
        subject(injection),
        MemberDropped(
            request=injection.id,
            blend=injection.request.blend,
            member=member.adapter,
            weight_ppm=member.weight_ppm,
            why=why(state, row, Reason.WEIGHT_TOO_SMALL, rules=[rule]),
        ),
    )
