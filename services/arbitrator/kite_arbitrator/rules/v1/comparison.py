"""Comparisons: two ready instances of one base, with one order on one node, and with three across two nodes."""

from collections.abc import Iterator

from msgspec import Struct

from kite_arbitrator.folds.guard import blend_of, pair
from kite_arbitrator.records import Instance, Row
from kite_arbitrator.rules.draft import Draft, seen, why, within
from kite_arbitrator.state import State, claimed, current, lost_node, serving, watch_of
from kite_schemas.arbitration import Held
from kite_schemas.guard import (
    ASKED_TOKENS_MAX,
    ComparisonOrdered,
    ComparisonRequested,
    DistributionMeasured,
    Logprobs,
    MeasurementOrdered,
    Side,
)
from kite_schemas.why import Reason, Why


class Pair(Struct, frozen=True, kw_only=True):
    """What is compared: two instances, on one served name, with one set of probes (None: the shipped one)."""

    first: Instance
    second: Instance
    model: str
    probes: str | None
    request: str | None = None


def compare(state: State, row: Row) -> Iterator[Draft]:
    """Order the comparison that was asked for, or the next step of one across nodes, or hold it with the reason."""
    match row.data:
        case ComparisonRequested() as request:
            yield _asked(state, row, request)
        case DistributionMeasured() as measured if state.measured_pos == row.pos:
            yield _measured(state, row, measured)
        case _:
            return


def _asked(state: State, row: Row, request: ComparisonRequested) -> Draft:
    obstacle = _obstacle(state, request.first, request.second) or _impossible(state, request)
    if obstacle is not None:
        return _held(state, row, request.first, obstacle, row.id)
    first, second = state.instances[request.first], state.instances[request.second]
    account = why(state, row, Reason.ASKED, inputs=[seen(state, first), seen(state, second)])
    return ordered(state, first, second, _model(state, request), account, request=row.id)


def _obstacle(state: State, *names: str) -> tuple[Reason, str] | None:
    """Return what keeps instances from being asked."""
    for name in names:
        side = state.instances.get(name)
        if side is None:
            return Reason.INSTANCE_UNKNOWN, f"no instance {name!r} is known"
        if not serving(side):
            return Reason.NOT_READY, f"instance {name!r} is {side.state}, not ready"
        if lost_node(state, side.node):
            return Reason.NODE_LOST, f"node {side.node!r} of instance {name!r} is silent"
    return None


def _impossible(state: State, request: ComparisonRequested) -> tuple[Reason, str] | None:
    first, second = state.instances[request.first], state.instances[request.second]
    if first.base != second.base:
        return Reason.INSTANCE_MISSING, f"{first.id!r} and {second.id!r} differ in base"
    if request.blend is not None and _model(state, request) == first.base:
        return Reason.RESIDENT_MISSING, f"blend {request.blend!r} is not on both instances"
    if claimed(state, pair(first.id, second.id)):
        return Reason.TARGET_BUSY, "the same comparison is under way"
    return None


def _model(state: State, request: ComparisonRequested) -> str:
    """Return the served name to ask: the blend that was named, or the first that both hold, or the base."""
    first, second = state.instances[request.first], state.instances[request.second]
    for name in sorted(state.blends):
        version = state.blends[name].resident.version
        wanted = request.blend in (None, name)
        if wanted and version in first.versions and version in second.versions:
            return version
    return first.base


def _held(state: State, row: Row, first: str, obstacle: tuple[Reason, str], request: str | None) -> Draft:
    reason, detail = obstacle
    return Draft(f"instance/{first}", Held(detail=detail, request=request, why=why(state, row, reason)))


def ordered(
    state: State, first: Instance, second: Instance, model: str, account: Why, *, request: str | None = None
) -> Draft:
    """Return the order to compare two instances on one served name; across nodes it is the first of three."""
    chosen = Pair(first=first, second=second, model=model, probes=state.probes.get(first.base), request=request)
    if first.node == second.node:
        return _comparison(state, chosen, account)
    return _measurement(state, chosen, first, account)


def _measured(state: State, row: Row, measured: DistributionMeasured) -> Draft:
    """Go on: the second side is measured on the tokens of the first, then the first is held against the second."""
    obstacle = _obstacle(state, measured.first, measured.second)
    if obstacle is not None:
        return _held(state, row, measured.first, obstacle, measured.request)
    first, second = state.instances[measured.first], state.instances[measured.second]
    chosen = Pair(first=first, second=second, model=measured.model, probes=measured.probes, request=measured.request)
    reason = Reason.ASKED if measured.request else occasion(state, measured.model)
    account = why(state, row, reason, inputs=[seen(state, first), seen(state, second)])
    if measured.instance == second.id:
        return _comparison(state, chosen, account, measured.positions)
    asked = tuple(position.tokens[:ASKED_TOKENS_MAX] for position in measured.positions)
    return _measurement(state, chosen, second, account, asked)


def occasion(state: State, version: str) -> Reason:
    """Return why a version is compared without being asked for."""
    blend = blend_of(state, version)
    if state.freeze is not None and state.freeze.blend == blend:
        return Reason.FREEZE_ENDING
    return Reason.INTERVAL if blend is None or watch_of(state, blend).verdict_us else Reason.PROMOTED


def _comparison(state: State, chosen: Pair, account: Why, measured: tuple[Logprobs, ...] | None = None) -> Draft:
    return Draft(
        f"instance/{chosen.first.id}",
        ComparisonOrdered(
            node=chosen.first.node,
            target=pair(chosen.first.id, chosen.second.id),
            **within(state, current(state).expiry.compare_us),
            request=chosen.request,
            sides=(_side(chosen.first), _side(chosen.second)),
            model=chosen.model,
            probes=chosen.probes,
            measured=measured,
            why=account,
        ),
    )


def _measurement(
    state: State, chosen: Pair, side: Instance, account: Why, tokens: tuple[tuple[int, ...], ...] | None = None
) -> Draft:
    return Draft(
        f"instance/{side.id}",
        MeasurementOrdered(
            node=side.node,
            target=pair(chosen.first.id, chosen.second.id),
            **within(state, current(state).expiry.compare_us),
            request=chosen.request,
            first=chosen.first.id,
            second=chosen.second.id,
            side=_side(side),
            model=chosen.model,
            probes=chosen.probes,
            tokens=tokens,
            why=account,
        ),
    )


def _side(instance: Instance) -> Side:
    return Side(instance=instance.id, endpoint=instance.endpoint)
