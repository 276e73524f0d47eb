"""Comparisons on request: two ready instances of one base on one node."""

from collections.abc import Iterator

from kite_arbitrator.rules.draft import Draft, seen, why, within
from kite_arbitrator.state import Instance, Row, State, claimed, current, serving
from kite_schemas.arbitration import Held
from kite_schemas.guard import ComparisonOrdered, ComparisonRequested, Side
from kite_schemas.why import Reason, Why


def compare(state: State, row: Row) -> Iterator[Draft]:
    """Order the comparison that was asked for, or hold it with the reason."""
    request = row.data
    if not isinstance(request, ComparisonRequested):
        return
    obstacle = _obstacle(state, request)
    if obstacle is not None:
        reason, detail = obstacle
        yield Draft(f"instance/{request.first}", Held(detail=detail, request=row.id, why=why(state, row, reason)))
        return
    yield _ordered(state, row, request)


def _obstacle(state: State, request: ComparisonRequested) -> tuple[Reason, str] | None:
    sides = [state.instances.get(name) for name in (request.first, request.second)]
    for name, side in zip((request.first, request.second), sides, strict=True):
        if side is None:
            return Reason.INSTANCE_UNKNOWN, f"no instance {name!r} is known"
        if not serving(side):
            return Reason.NOT_READY, f"instance {name!r} is {side.state}, not ready"
    first, second = (side for side in sides if side is not None)
    if (first.base, first.node) != (second.base, second.node):
        return Reason.INSTANCE_MISSING, f"{first.id!r} and {second.id!r} differ in base or node"
    if request.blend is not None and _model(state, request, first, second) == first.base:
        return Reason.RESIDENT_MISSING, f"blend {request.blend!r} is not on both instances"
    if claimed(state, pair(first.id, second.id)):
        return Reason.TARGET_BUSY, "the same comparison is under way"
    return None


def _model(state: State, request: ComparisonRequested, first: Instance, second: Instance) -> str:
    """Return the served name to ask: the blend that was named, or the first that both hold, or the base."""
    for name in sorted(state.blends):
        version = state.blends[name].resident.version
        wanted = request.blend in (None, name)
        if wanted and version in first.versions and version in second.versions:
            return version
    return first.base


def _ordered(state: State, row: Row, request: ComparisonRequested) -> Draft:
    first, second = state.instances[request.first], state.instances[request.second]
    account = why(state, row, Reason.ASKED, inputs=[seen(state, first), seen(state, second)])
    return ordered(state, first, second, _model(state, request, first, second), account, request=row.id)


def ordered(
    state: State, first: Instance, second: Instance, model: str, account: Why, *, request: str | None = None
) -> Draft:
    """Return the order to compare two instances on one served name."""
    return Draft(
        f"instance/{first.id}",
        ComparisonOrdered(
            node=first.node,
            target=pair(first.id, second.id),
            **within(state, current(state).expiry.compare_us),
            request=request,
            sides=(
                Side(instance=first.id, endpoint=first.endpoint),
                Side(instance=second.id, endpoint=second.endpoint),
            ),
            model=model,
            why=account,
        ),
    )


def pair(first: str, second: str) -> str:
    """Return the target of a comparison."""
    return f"pair/{first},{second}"
