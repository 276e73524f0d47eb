"""One injection, step by step: verify, admit, blend, load and prove on one instance, then on the others, promote.

Each phase has one function in PHASES; it looks at the state only, so that it does not matter which row brought the
injection there.
"""

from collections.abc import Callable, Iterator, Sequence

from kite_arbitrator.folds.injections import undo_target
from kite_arbitrator.records import Injection, Instance, Phase, Row, Standing
from kite_arbitrator.rules.draft import Draft, age, at_least, at_most, seen, why, within
from kite_arbitrator.rules.v1.admission import deferred, verified
from kite_arbitrator.rules.v1.closing import base_of, closed, reject, subject
from kite_arbitrator.rules.v1.loads import load, rollback
from kite_arbitrator.rules.v1.slots import full
from kite_arbitrator.state import (
    State,
    busy,
    claimed,
    current,
    lasting,
    lost_node,
    pools,
    reachable,
    standing_of,
    waits,
)
from kite_schemas.policy import Pool
from kite_schemas.upcycle import (
    AdapterLimits,
    BlendPromoted,
    Ending,
    RollbackOrdered,
    VerificationOrdered,
)
from kite_schemas.why import Reason, RuleValue
from kite_schemas.yoco import State as Life


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
        yield from reject(state, row, injection, *obstacle)
        return
    pool = reachable(state, request.base)[0]
    yield Draft(
        subject(injection),
        VerificationOrdered(
            node=pool.node,
            target=f"blend/{request.blend}",
            **within(state, current(state).expiry.verify_us),
            request=injection.id,
            blend=request.blend,
            adapter=request.adapter,
            base=base_of(pool),
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
    if any(rollback.request.blend == request.blend for rollback in state.rollbacks.values()):
        return Reason.BLEND_BUSY, f"a rollback of {request.blend!r} is under way"
    return None


def _loading(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """Load into one instance first: its proof gives the print that the others are held against."""
    assert injection.resident is not None  # noqa: S101 # the fold sets it with the phase
    unfit = None if injection.touched or injection.proven else _unfit(state, injection)
    if unfit is not None:
        reason, rules = unfit
        yield closed(state, row, injection, Ending.REFUSED, reason, rules=rules)
        return
    if injection.failed and _undoing(state, injection):
        yield from _undone(state, row, injection, injection.failed, injection.reason)
        return
    missing = [name for name in injection.targets if name not in (*injection.proven, *injection.failed)]
    if not missing:
        yield _promoted(state, row, injection)
        partial = Reason.PARTIAL if injection.failed else Reason.EFFECT_PROVEN
        yield closed(state, row, injection, Ending.PROMOTED, partial)
        return
    wave = missing if injection.proven else missing[:1]
    for name in wave:
        instance = state.instances[name]
        if name in injection.touched or busy(state, name):
            continue
        if full(state, instance) and injection.resident.version not in instance.versions:
            yield from _undone(state, row, injection, injection.touched, Reason.SLOTS_FULL)
            return
        yield load(state, row, instance, injection.resident, injection.id)


def _unfit(state: State, injection: Injection) -> tuple[Reason, list[RuleValue]] | None:
    """Return why what was blended is not to be loaded anywhere, None when it is."""
    assert injection.resident is not None  # noqa: S101 # the fold sets it with the phase
    limit_ppm = current(state).upcycle.blend_share_max_ppm
    if limit_ppm is not None and injection.blend_share_ppm > limit_ppm:
        return Reason.BLEND_TOO_LARGE, [at_most("upcycle.blend_share_max_ppm", injection.blend_share_ppm, limit_ppm)]
    stored = state.versions.get(injection.resident.version)
    if lasting(state) and stored is not None and stored.quarantined:
        return Reason.VERSION_QUARANTINED, []
    first = state.instances[next(name for name in injection.targets if name not in injection.failed)]
    if full(state, first) and injection.resident.version not in first.versions:
        return Reason.SLOTS_FULL, []
    return None


def _undoing(state: State, injection: Injection) -> bool:
    """Tell whether a target that was given up may still hold the version: it would be promoted there unproven."""
    assert injection.resident is not None  # noqa: S101 # the fold sets it with the phase
    version, given_up = injection.resident.version, [state.instances[name] for name in injection.failed]
    held = any(version in i.versions and i.state is Life.READY for i in given_up)
    return held or any(name in injection.touched for name in injection.failed)


def _promoted(state: State, row: Row, injection: Injection) -> Draft:
    assert injection.resident is not None  # noqa: S101 # the fold sets it with the phase
    proven = age(state, f"proof/{injection.resident.version}", injection.fact_pos, injection.fact_us)
    return Draft(
        subject(injection),
        BlendPromoted(
            request=injection.id,
            blend=injection.request.blend,
            base=injection.request.base,
            resident=injection.resident,
            members=injection.members,
            base_weight_ppm=injection.base_weight_ppm,
            instances=tuple(name for name in injection.targets if name in injection.proven),
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
    yield closed(state, row, injection, Ending.REFUSED, Reason.ADAPTER_REFUSED)


def _failing(state: State, row: Row, injection: Injection) -> Iterator[Draft]:
    """Take the version out of every instance that may hold it, each when its load has ended; then close.

    After a gap in the bus nothing is taken out until somebody has looked at it.
    """
    if state.degraded and injection.touched:
        return
    undo = [] if _kept(state, injection) else _reachable(state, injection.touched)
    yield from _undone(state, row, injection, [i.id for i in undo], injection.reason)
    under_way = any(o.request == injection.id and o.type == RollbackOrdered.TYPE for o in state.orders.values())
    if not undo and not under_way:
        yield closed(state, row, injection, injection.ending, injection.reason)


def _kept(state: State, injection: Injection) -> bool:
    """Tell whether what an injection brought is what its blend means already, or meant just before: it stays."""
    version = injection.resident.version if injection.resident else ""
    return lasting(state) and standing_of(state, version) in (Standing.PROMOTED, Standing.RETAINED)


def _reachable(state: State, names: Sequence[str]) -> list[Instance]:
    found = [state.instances[name] for name in names if name in state.instances]
    return [instance for instance in found if instance.endpoint and not lost_node(state, instance.node)]


def _undone(state: State, row: Row, injection: Injection, names: Sequence[str], reason: Reason) -> Iterator[Draft]:
    """Take the version out of instances that may hold it, each when its load has ended; nothing after a gap."""
    assert injection.resident is not None or not names  # noqa: S101 # nothing was loaded without one
    version = injection.resident.version if injection.resident else ""
    for instance in [] if state.degraded else _reachable(state, names):
        free = not claimed(state, f"load/{injection.request.blend}@{instance.id}")
        if instance.id in injection.touched and free and not waits(state, undo_target(version, instance.id)):
            account = why(state, row, reason, inputs=[seen(state, instance)])
            yield rollback(state, instance, version, injection.id, account)


def _limits(state: State, pool: Pool) -> AdapterLimits:
    share_ppm = current(state).upcycle.params_share_max_ppm
    return AdapterLimits(max_lora_rank=pool.spec.max_lora_rank, params_share_max_ppm=share_ppm)


PHASES: dict[Phase, Callable[[State, Row, Injection], Iterator[Draft]]] = {
    Phase.REQUESTED: _requested,
    Phase.VERIFIED: verified,
    Phase.DEFERRED: deferred,
    Phase.REFUSED: _refused,
    Phase.LOADING: _loading,
    Phase.FAILING: _failing,
}
