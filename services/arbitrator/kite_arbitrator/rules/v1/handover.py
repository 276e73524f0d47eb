"""Capacity on request: one standby is woken per request, or the request is held with the reason."""

from collections.abc import Iterator

from kite_arbitrator.rules.draft import Draft, seen, why, within
from kite_arbitrator.state import Instance, Row, State, busy, current, lost_node, members
from kite_schemas.arbitration import Held
from kite_schemas.ledger import Tick
from kite_schemas.why import Candidate, Reason, Why
from kite_schemas.yoco import OrderRequested, WakeOrdered
from kite_schemas.yoco import Path as WakePath
from kite_schemas.yoco import State as Life


def wake(state: State, row: Row) -> Iterator[Draft]:
    """Wake the lowest standby that can be, when one is asked for; what jitter put off is looked at again at a tick."""
    match row.data:
        case OrderRequested() as request:
            yield from _answer(state, row, row.id, request)
        case Tick():
            for name, request in [*state.wanted.items()][:1]:  # one a tick: the next one's candidates depend on it
                yield from _answer(state, row, name, request)
        case _:
            pass


def _answer(state: State, row: Row, name: str, request: OrderRequested) -> Iterator[Draft]:
    found = [i for i in members(state, request.base) if request.instance in (None, i.id)]
    candidates = [_candidate(state, instance) for instance in found]
    able = [instance for instance, c in zip(found, candidates, strict=True) if c.reason is Reason.ASKED]
    if not able:
        yield _held(state, row, name, request, candidates)
        return
    chosen = [c.model_copy(update={"chosen": c.id == able[0].id}) for c in candidates]
    account = why(state, row, Reason.ASKED, candidates=chosen, inputs=[seen(state, able[0])])
    yield order(state, able[0], account, name)


def _candidate(state: State, instance: Instance) -> Candidate:
    if not instance.standby or instance.state is not Life.ASLEEP:
        reason = Reason.NO_STANDBY
    elif busy(state, instance.id):
        reason = Reason.TARGET_BUSY
    elif lost_node(state, instance.node):
        reason = Reason.NODE_LOST
    else:
        reason = Reason.ASKED
    return Candidate(id=instance.id, chosen=False, reason=reason)


def _held(state: State, row: Row, name: str, request: OrderRequested, candidates: list[Candidate]) -> Draft:
    if not members(state, request.base):
        reason, detail = Reason.BASE_UNKNOWN, f"no instance of {request.base!r} is known"
    elif not candidates:
        reason, detail = Reason.INSTANCE_UNKNOWN, f"no instance {request.instance!r} of {request.base!r}"
    else:
        reason, detail = Reason.NO_STANDBY, f"no standby of {request.base!r} is asleep and free"
    account = why(state, row, reason, candidates=candidates)
    return Draft(f"base/{request.base}", Held(detail=detail, request=name, why=account))


def order(state: State, instance: Instance, account: Why, request: str | None = None) -> Draft:
    """Return the order to wake a standby, with every promoted blend of its base as a resident."""
    policy = current(state)
    residents = [blend.resident for blend in state.blends.values() if blend.base == instance.base]
    return Draft(
        f"instance/{instance.id}",
        WakeOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, policy.expiry.wake_us),
            instance=instance.id,
            request=request,
            path=WakePath.HOT,
            deadline_us=policy.yoco.cold_start_deadline_us,
            residents=tuple(sorted(residents, key=lambda resident: resident.blend)),
            noise_micronats=instance.noise_micronats,
            why=account,
        ),
    )
