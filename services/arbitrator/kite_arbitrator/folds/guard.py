"""How comparisons, freezes and promotions change what the guard knows."""

from msgspec import structs

from kite_arbitrator.records import Freeze, Row, Watch
from kite_arbitrator.state import State, current, pools, put, watch_of, with_item
from kite_schemas.arbitration import Held
from kite_schemas.guard import Compared, ComparisonOrdered, DistributionMeasured, MeasurementOrdered
from kite_schemas.probes import Registered
from kite_schemas.upcycle import BlendPromoted, Frozen, Unfrozen
from kite_schemas.why import Reason


def blend_of(state: State, version: str) -> str | None:
    """Return the blend that is served under this name now, None for an older version or the base."""
    return next((name for name, blend in state.blends.items() if blend.resident.version == version), None)


def pair(first: str, second: str) -> str:
    """Return the target of a comparison."""
    return f"pair/{first},{second}"


def ordered(state: State, _row: Row, data: ComparisonOrdered | MeasurementOrdered) -> State:
    blend = blend_of(state, data.model)
    if blend is None:
        return state
    due_us = state.now_us + current(state).guard.interval_us
    return put(state, structs.replace(watch_of(state, blend), due_us=due_us, ordered_us=state.now_us, lonely=False))


def measured(state: State, row: Row, data: DistributionMeasured) -> State:
    """Remember that this measurement was waited for: only then the comparison goes on."""
    order = state.orders.get(data.order or "")
    awaited = order is not None and order.target == pair(data.first, data.second)
    if not awaited or data.instance not in {data.first, data.second}:
        return state
    return structs.replace(state, measured_pos=row.pos)


def probes_registered(state: State, _row: Row, data: Registered) -> State:
    """The newest set of a base is in force; a base that no pool serves has none."""
    if state.policy is None or not pools(state, data.base):
        return state
    return structs.replace(state, probes=with_item(state.probes, data.base, data.digest))


def compared(state: State, row: Row, data: Compared) -> State:
    blend = blend_of(state, data.model)
    if blend is None:
        return state
    verdict = structs.replace(
        watch_of(state, blend), kl_micronats=data.kl_micronats, verdict_us=row.ledger_us, pos=row.pos
    )
    return put(state, verdict)


def promoted(state: State, row: Row, data: BlendPromoted) -> State:
    """A new version is compared at once."""
    return put(state, Watch(blend=data.blend, due_us=row.ledger_us, pos=row.pos))


def held(state: State, row: Row, data: Held) -> State:
    """Nobody to compare with: say so once, and look again after an interval."""
    if data.why.reason is not Reason.NO_PEER:
        return state
    blend = row.subject.partition("/")[2]
    due_us = state.now_us + current(state).guard.interval_us
    return put(state, structs.replace(watch_of(state, blend), due_us=due_us, lonely=True))


def frozen(state: State, row: Row, data: Frozen) -> State:
    """The comparison is repeated when the freeze ends."""
    since_us = state.freeze.since_us if state.freeze else row.ledger_us
    freeze = Freeze(blend=data.blend, since_us=since_us, until_us=data.until_us, severity=data.severity)
    watch = structs.replace(watch_of(state, data.blend), due_us=data.until_us)
    return put(structs.replace(state, freeze=freeze), watch)


def unfrozen(state: State, _row: Row, _data: Unfrozen) -> State:
    return structs.replace(state, freeze=None)
