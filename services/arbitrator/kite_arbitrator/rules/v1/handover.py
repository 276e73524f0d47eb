"""Capacity on request: one instance more, on the fastest path there is, or one less; else held with the reason."""

from collections.abc import Iterator

from kite_arbitrator.records import Instance, Row
from kite_arbitrator.rules.draft import Draft, at_least, at_most, seen, why, within
from kite_arbitrator.rules.v1.fleet import device_of, drain_order, obstacle, residents, start_order
from kite_arbitrator.rules.v1.memory import STARTABLE
from kite_arbitrator.rules.v1.paths import Way, device_busy, fastest, path_of, wake_busy, way
from kite_arbitrator.state import State, busy, current, lost_node, members, pool_of, pools, serving, spare, spares
from kite_schemas.arbitration import Held
from kite_schemas.ledger import Tick
from kite_schemas.why import Candidate, Reason, RuleValue, Why
from kite_schemas.yoco import DrainRequested, OrderRefused, OrderRequested, Path, WakeOrdered
from kite_schemas.yoco import State as Life

DEADLINE = "yoco.deadline_us"


def wake(state: State, row: Row) -> Iterator[Draft]:
    """Answer who asks for one instance more; what jitter put off is looked at again at a tick.

    What a worker refused since it would be late is looked at at once, for the others.
    """
    match row.data:
        case OrderRequested() as request:
            yield from _answer(state, row, row.id, request)
        case OrderRefused(code=Reason.DEADLINE_UNREACHABLE):
            for name, request in [*state.wanted.items()][-1:]:  # it has come back to the end of them
                if isinstance(request, OrderRequested):
                    yield from _answer(state, row, name, request)
        case Tick():
            for name, request in [*state.wanted.items()][:1]:  # one a tick: the next one's candidates depend on it
                if isinstance(request, OrderRequested):
                    yield from _answer(state, row, name, request)
        case _:
            pass


def rest(state: State, row: Row) -> Iterator[Draft]:
    """Drain the instance that somebody wants out of service, or say why not; what jitter put off follows at a tick."""
    match row.data:
        case DrainRequested() as request:
            yield _drain(state, row, row.id, request)
        case Tick():
            for name, request in [*state.wanted.items()][:1]:
                if isinstance(request, DrainRequested):
                    yield _drain(state, row, name, request)
        case _:
            pass


def _answer(state: State, row: Row, name: str, request: OrderRequested) -> Iterator[Draft]:
    deadline_us = _deadline_us(state, request)
    ways = [way(state, i, _reason(state, row, i, request)) for i in _instances(state, request)]
    free = [one for one in ways if one.reason is Reason.ASKED]
    chosen = fastest(one for one in free if one.within(deadline_us)) or (fastest(free) if request.late else None)
    candidates = [_candidate(one, chosen, deadline_us) for one in ways]
    if chosen is None:
        yield _held(state, row, name, candidates=candidates, best=fastest(free))
        return
    rules = _rules(chosen.expected_us, deadline_us)
    inputs = [seen(state, chosen.instance)] if chosen.instance.pos else []
    account = why(state, row, Reason.ASKED, rules=rules, candidates=candidates, inputs=inputs)
    granted_us = patience_us(state, chosen, deadline_us) if request.late else deadline_us
    yield ready_order(state, chosen, account, deadline_us=granted_us, request=name)


def _instances(state: State, request: OrderRequested) -> list[Instance]:
    """Return what could be asked for: the known instances of the base by id, then the spares that never were."""
    fresh = (
        Instance(id=name, node=pool.node, base=request.base, device="", standby=True, state=Life.ABSENT)
        for pool in pools(state, request.base)
        for name in spares(pool)
        if name not in state.instances
    )
    return [i for i in (*members(state, request.base), *fresh) if request.instance in (None, i.id)]


def _deadline_us(state: State, request: OrderRequested) -> int:
    asked_us = request.deadline_us
    return current(state).yoco.cold_start_deadline_us if asked_us is None else asked_us


def _reason(state: State, row: Row, instance: Instance, request: OrderRequested) -> Reason:
    """Return what stands against making an instance ready, `asked` when nothing does."""
    named = request.instance == instance.id
    wakes = instance.state is Life.ASLEEP and (instance.standby or instance.parked)
    starts = instance.state in STARTABLE and (spare(state, instance) or (instance.parked and named))
    if not (wakes or starts):
        return Reason.NO_STANDBY
    if instance.parked and not named:
        return Reason.PARKED
    if isinstance(row.data, OrderRefused) and instance.retry_us > state.now_us:
        return Reason.BACKED_OFF
    return against(state, instance) or Reason.ASKED


def against(state: State, instance: Instance) -> Reason | None:
    """Return what stands against waking an instance that sleeps, or starting one that does not run."""
    if busy(state, instance.id):
        return Reason.TARGET_BUSY
    if lost_node(state, instance.node):
        return Reason.NODE_LOST
    if instance.state is Life.ASLEEP:
        return Reason.DEVICE_BUSY if wake_busy(state, instance) else None
    pool = pool_of(state, instance.node, instance.base)
    if pool is None or instance.retry_us > state.now_us:
        return Reason.NO_STANDBY if pool is None else Reason.BACKED_OFF
    device = device_of(state, pool, instance.id)
    if device_busy(state, instance.node, device.id):
        return Reason.DEVICE_BUSY
    found = obstacle(state, pool, device, standby=instance.standby)
    return found[0] if found else None


def _candidate(one: Way, chosen: Way | None, deadline_us: int) -> Candidate:
    late = one.reason is Reason.ASKED and one is not chosen and not one.within(deadline_us)
    return one.candidate(chosen, Reason.DEADLINE_UNREACHABLE if late else None)


def _rules(expected_us: int | None, deadline_us: int) -> list[RuleValue]:
    return [] if expected_us is None else [at_most(DEADLINE, expected_us, deadline_us)]


def _held(state: State, row: Row, name: str, *, candidates: list[Candidate], best: Way | None) -> Draft:
    request, told, rules = state.wanted[name], row.data, list[RuleValue]()
    assert isinstance(request, OrderRequested)  # noqa: S101 # what is answered here asked for one more
    deadline_us = _deadline_us(state, request)
    if best is not None:
        reason, rules = Reason.DEADLINE_UNREACHABLE, _rules(best.expected_us, deadline_us)
        detail = f"{best.instance.id} is the fastest, {best.path}: {best.expected_us} us, not {deadline_us}"
    elif isinstance(told, OrderRefused):
        reason, rules = Reason.DEADLINE_UNREACHABLE, _rules(told.expected_us, deadline_us)
        detail = f"{told.instance} was refused, {told.path or 'no path'}: {told.message}"
    elif not candidates:
        reason, detail = _nobody(state, request)
    else:
        reason, detail = Reason.NO_STANDBY, f"no standby of {request.base!r} is asleep and free"
    account = why(state, row, reason, rules=rules, candidates=candidates)
    return Draft(f"base/{request.base}", Held(detail=detail, request=name, why=account))


def _nobody(state: State, request: OrderRequested) -> tuple[Reason, str]:
    if not members(state, request.base):
        return Reason.BASE_UNKNOWN, f"no instance of {request.base!r} is known"
    return Reason.INSTANCE_UNKNOWN, f"no instance {request.instance!r} of {request.base!r}"


def ready_order(state: State, one: Way, account: Why, *, deadline_us: int, request: str | None = None) -> Draft:
    """Return the order to make an instance ready: to wake it, or to start it."""
    if one.instance.state is Life.ASLEEP:
        return order(state, one.instance, account, request, deadline_us)
    pool = pool_of(state, one.instance.node, one.instance.base)
    assert pool is not None  # noqa: S101 # what has no pool has no way
    device, standby = device_of(state, pool, one.instance.id), one.instance.standby
    return start_order(
        state, pool, one.instance.id, device, account, standby=standby, request=request, deadline_us=deadline_us
    )


def patience_us(state: State, one: Way, deadline_us: int) -> int:
    """Return the time that a worker is given where being late was chosen: it refuses what it cannot do in that.

    What was promised is what the passage is counted by all the same.
    """
    unknown_us = current(state).expiry.start_us if one.path is Path.COLD else 0
    return max(deadline_us, unknown_us if one.expected_us is None else one.expected_us)


def order(state: State, instance: Instance, account: Why, request: str | None, deadline_us: int) -> Draft:
    """Return the order to wake a standby, with every promoted blend of its base as a resident."""
    return Draft(
        f"instance/{instance.id}",
        WakeOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, current(state).expiry.wake_us),
            instance=instance.id,
            request=request,
            path=path_of(instance),
            deadline_us=deadline_us,
            residents=residents(state, instance.base),
            noise_micronats=instance.noise_micronats,
            why=account,
        ),
    )


def _drain(state: State, row: Row, name: str, request: DrainRequested) -> Draft:
    instance = state.instances.get(request.instance)
    found = _unfit(state, request, instance)
    if instance is None or found is not None:
        reason, detail = found or (Reason.INSTANCE_UNKNOWN, "")
        return _undrained(state, name, why(state, row, reason), detail)
    rule = _others(state, instance)
    if rule.fired and serving(instance) and not request.force:
        account = why(state, row, Reason.LAST_INSTANCE, rules=[rule])
        return _undrained(state, name, account, f"no other instance answers for {instance.base!r}")
    account = why(state, row, Reason.ASKED, rules=[rule], inputs=[seen(state, instance)])
    return drain_order(state, instance, account, name)


def _undrained(state: State, name: str, account: Why, detail: str) -> Draft:
    request = state.wanted[name]
    return Draft(f"instance/{request.instance}", Held(detail=detail, request=name, why=account))


def _unfit(state: State, request: DrainRequested, instance: Instance | None) -> tuple[Reason, str] | None:
    """Return why an instance cannot be drained now, whoever wants it, and in words."""
    name = request.instance
    if instance is None:
        return Reason.INSTANCE_UNKNOWN, f"no instance {name!r} is known"
    if lost_node(state, instance.node):
        return Reason.NODE_LOST, f"{instance.node} is not heard"
    obstacles = (
        (instance.parked, Reason.PARKED, f"{name} is out of service already"),
        (instance.state is not Life.READY, Reason.NOT_READY, f"{name} is {instance.state}: only what is ready drains"),
        (busy(state, name) or _targeted(state, name), Reason.TARGET_BUSY, f"an order or injection is about {name} now"),
        (state.degraded, Reason.DEGRADED, "nothing is drained until the gap is acknowledged"),
    )
    return next(((reason, detail) for stands, reason, detail in obstacles if stands), None)


def _others(state: State, instance: Instance) -> RuleValue:
    """Hold against one the number of other instances that answer for the base."""
    found = (i for i in members(state, instance.base) if serving(i) and not lost_node(state, i.node))
    return at_least("fleet.serving", sum(other.id != instance.id for other in found), 1)


def _targeted(state: State, name: str) -> bool:
    """Tell whether an open injection or rollback counts on an instance."""
    return any(name in one.targets for one in (*state.injections.values(), *state.rollbacks.values()))
