"""What must hold of a history, whatever happened in it. Each rule looks at the rows alone and returns its complaints.

The rules are written a second time here, from the design and not from the code that they judge.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from kite.clock import US_PER_S
from kite.testing.simulation.keeping import apart, kept
from kite.testing.simulation.record import Row, Rows, closes, ends, named
from kite.testing.simulation.witness import carried, missed
from kite_schemas.arbitration import (
    Channel,
    ChannelSelected,
    Held,
    OrderExpired,
    PressureChanged,
)
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, ComparisonRequested, MeasurementOrdered
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRejected, ChangeRequested, PolicySet
from kite_schemas.telemetry import NodeFound, NodeLost
from kite_schemas.upcycle import (
    Frozen,
    InjectionClosed,
    InjectionRequested,
    RetireOrdered,
    RollbackClosed,
    RollbackOrdered,
    RollbackRequested,
    Unfrozen,
)
from kite_schemas.why import Order, Outcome, Reason
from kite_schemas.yoco import (
    DrainOrdered,
    DrainRequested,
    InstanceChanged,
    NodeRegistered,
    OrderRefused,
    OrderRequested,
    PrewarmBlocked,
    PrewarmOrdered,
    PrewarmReleased,
    SleepOrdered,
    StartOrdered,
    WakeOrdered,
)

REST_US = 20 * US_PER_S
"""What was ordered so long before the end of a run that has come to rest has ended."""

Rule = Callable[[Rows], Iterable[str]]


def judge(rows: Rows) -> list[str]:
    """Return every complaint about a history that has come to rest, each with the name of the rule."""
    return [f"{rule.__name__}: {complaint}" for rule in RULES for complaint in rule(rows)]


def in_order(rows: Rows) -> Iterator[str]:
    """Positions are dense, ledger time rises, no event is there twice."""
    for former, row in pairwise(rows):
        if row.pos != former.pos + 1 or row.ledger_us <= former.ledger_us:
            yield f"{row.pos} at {row.ledger_us} follows {former.pos} at {former.ledger_us}"
    for event, number in Counter(row.id for row in rows).items():
        if number > 1:
            yield f"event {event} is there {number} times"


def answered(rows: Rows) -> Iterator[str]:
    """Every request is answered exactly once; an order that was refused as too late was no answer."""
    answers = Counter(_answers(rows))
    answers.subtract(_withdrawn(rows))
    for row in rows:
        if isinstance(row.data, REQUESTS) and answers[row.id] != 1:
            yield f"{named(row)} has {answers[row.id]} answers"


def steady(rows: Rows) -> Iterator[str]:
    """No two opposite decisions about one target inside the window."""
    last: dict[str, tuple[bool, Row]] = {}
    window_us = 0
    for row in rows:
        if isinstance(row.data, PolicySet):
            window_us = row.data.policy.arbitration.switch_window_us or 0
        found = _way(row.data)
        if found is None:
            continue
        target, up = found
        former = last.get(target)
        if former is not None and former[0] is not up and row.ledger_us - former[1].ledger_us < window_us:
            yield f"{named(row)} undoes {named(former[1])} after {row.ledger_us - former[1].ledger_us} us"
        last[target] = up, row


def reachable(rows: Rows) -> Iterator[str]:
    """Nothing is ordered on a node that is lost, or has said that it stops."""
    away: dict[str, Row] = {}
    for row in rows:
        match row.data:
            case NodeLost(node=node) | InstanceChanged(node=node, code="shutdown"):
                away[node] = row
            case NodeFound(node=node) | NodeRegistered(node=node):
                away.pop(node, None)
            case Order(node=node) if node in away:
                yield f"{named(row)} goes to {node}, away since {away[node].pos}"
            case _:
                pass


def fitting(rows: Rows) -> Iterator[str]:
    """No more memory is ordered than a device has."""
    sizes: dict[tuple[str, str], int] = {}
    held: dict[str, tuple[str, str, int]] = {}
    reserve_bytes: int | None = None
    for row in rows:
        match row.data:
            case PolicySet(policy=policy):
                reserve_bytes = policy.yoco.reserve_bytes
            case NodeRegistered(node=node, devices=devices, instances=found):
                sizes |= {(node, device.id): device.memory_bytes for device in devices}
                there = {one.instance for one in found}
                held = {name: place for name, place in held.items() if place[0] != node or name in there}
            case StartOrdered() if reserve_bytes is not None:
                place = (row.data.node, row.data.device)
                taken = sum(
                    each for name, (*at, each) in held.items() if tuple(at) == place and name != row.data.instance
                )
                needed = max(reserve_bytes, row.data.spec.kv_cache_bytes)
                if taken + needed > sizes[place]:
                    yield f"{named(row)} takes {needed} bytes more than {taken} of {sizes[place]}"
                held[row.data.instance] = (*place, needed)
            case _:
                held.pop(ends(row.data), None)


def serial(rows: Rows) -> Iterator[str]:
    """On one device one instance at a time starts or wakes, on nodes that say what their engines can do."""
    offering: set[str] = set()
    places: dict[str, tuple[str, str]] = {}
    opened: dict[str, tuple[str, str]] = {}
    for row in rows:
        match row.data:
            case NodeRegistered(node=node, engines=engines) if engines:
                offering.add(node)
            case StartOrdered() | PrewarmOrdered():
                places[row.data.instance] = row.data.node, row.data.device
            case _:
                pass
        if isinstance(row.data, StartOrdered | WakeOrdered) and row.data.node in offering:
            place = places.get(row.data.instance, (row.data.node, ""))
            if place in opened.values():
                yield f"{named(row)} comes while another one starts or wakes on {place[1]}"
            opened[row.id] = place
        opened.pop(closes(row.data), None)


def paced(rows: Rows) -> Iterator[str]:
    """Two prewarms of a pool are an interval apart."""
    last: dict[tuple[str, str], Row] = {}
    interval_us = 0
    for row in rows:
        match row.data:
            case PolicySet(policy=policy):
                interval_us = policy.yoco.prewarm_interval_us or 0
            case PrewarmOrdered(node=node, spec=spec):
                former = last.get((node, spec.served_name))
                if former is not None and row.ledger_us - former.ledger_us < interval_us:
                    yield f"{named(row)} follows {named(former)} after {row.ledger_us - former.ledger_us} us"
                last[node, spec.served_name] = row
            case _:
                pass


def single(rows: Rows) -> Iterator[str]:
    """One open order per target; while the life of an instance is in an order, nothing else is ordered for it."""
    opened: dict[str, Order] = {}
    for row in rows:
        if isinstance(row.data, Order):
            for complaint in _clashes(row.data, opened.values()):
                yield f"{named(row)} {complaint}"
            opened[row.id] = row.data
        opened.pop(closes(row.data), None)


def ended(rows: Rows) -> Iterator[str]:
    """Every order has exactly one outcome, or expires, and not before its time."""
    issued: dict[str, Row] = {}
    done: Counter[str] = Counter()
    for row in rows:
        match row.data:
            case Order():
                issued[row.id] = row
            case Outcome(order=str(order), done=True):
                done[order] += 1
            case OrderExpired(order=order, why=why) if why.reason is Reason.EXPIRED:
                yield from _expired(row, issued[order])
            case _:
                pass
    yield from (f"{order} has {number} outcomes" for order, number in done.items() if number > 1)
    yield from (f"outcomes of {order}, which was never given" for order in done.keys() - issued.keys())
    closed = {closes(row.data) for row in rows}
    for order, row in issued.items():
        if order not in closed and row.ledger_us < rows[-1].ledger_us - REST_US:
            yield f"{named(row)} never ended"


def timely(rows: Rows) -> Iterator[str]:
    """An order is given up at the first tick after its time, and when its node has started anew."""
    opened: dict[str, Row] = {}
    late: set[str] = set()
    for row in rows:
        match row.data:
            case Order():
                opened[row.id] = row
            case NodeRegistered(node=node):
                late |= {name for name, order in opened.items() if _on(order, node)}
            case Tick():
                yield from (
                    f"{named(row)}: {named(opened[name])} is open still" for name in sorted(late & opened.keys())
                )
                late = {name for name, order in opened.items() if _over(order, row.ledger_us)}
            case _:
                opened.pop(closes(row.data), None)


def episodes(rows: Rows) -> Iterator[str]:
    """Pressure, freezes and blocks begin and end in turn, and each has ended in the end."""
    on: dict[str, Row] = {}
    for row in rows:
        found = _episode(row.data)
        if found is None:
            continue
        target, begins = found
        renewed = isinstance(row.data, Frozen)
        if begins is (target in on) and not renewed:
            yield f"{named(row)} {'begins' if begins else 'ends'} what {'goes on' if begins else 'had not begun'}"
        on[target] = row
        if not begins:
            del on[target]
    yield from (f"{named(row)} has no end" for row in on.values())


def _answers(rows: Rows) -> Iterator[str]:
    """Yield the request that each decision answers; what a worker says after its order has expired answers nothing."""
    asked: dict[str, str] = {}
    for row in rows:
        match row.data:
            case InjectionClosed(request=request) | PolicySet(request=request) | ChangeRejected(request=request):
                yield request
            case RollbackClosed(request=request):
                yield request
            case Held(request=str(request)) | WakeOrdered(request=str(request)):
                yield request
            case StartOrdered(request=str(request)) | DrainOrdered(request=str(request)):
                yield request
            case ComparisonOrdered(request=str(request)) | MeasurementOrdered(request=str(request)):
                asked[row.id] = request
            case Compared(order=str(order)) | ComparisonFailed(order=str(order)) | OrderExpired(order=order):
                yield from (asked.pop(order) for _ in range(order in asked))
            case _:
                pass


def _withdrawn(rows: Rows) -> Iterator[str]:
    """Yield the requests whose order was refused, in its time, since it would have been too late."""
    asked: dict[str, str] = {}
    for row in rows:
        match row.data:
            case WakeOrdered(request=str(request)) | StartOrdered(request=str(request)):
                asked[row.id] = request
            case OrderRefused(order=str(order), code=Reason.DEADLINE_UNREACHABLE) if order in asked:
                yield asked[order]
            case _:
                pass
        asked.pop(closes(row.data), None)


def _way(data: Data | None) -> tuple[str, bool] | None:
    """Return the target of a decision that has an opposite, and which way it goes; a freeze is exempt."""
    match data:
        case StartOrdered(target=target) | WakeOrdered(target=target) | PrewarmOrdered(target=target):
            return target, True
        case DrainOrdered(target=target) | SleepOrdered(target=target):
            return target, False
        case ChannelSelected(blend=blend, channel=channel):
            return f"channel/{blend}", channel is Channel.YOCO
        case Frozen() | Unfrozen():
            return None
        case _:
            return _episode(data)


def _clashes(order: Order, opened: Iterable[Order]) -> Iterator[str]:
    for other in opened:
        if other.target == order.target:
            yield f"has the target of an open {other.TYPE}"
        elif _instance(other) == _instance(order) is not None and _lives(other) is not _lives(order):
            leaving = isinstance(order, RollbackOrdered) or isinstance(other, RetireOrdered)  # it has its own lane
            yield from () if leaving else (f"is about the instance of an open {other.TYPE}",)


def _instance(order: Order) -> str | None:
    return getattr(order, "instance", None)


def _lives(order: Order) -> bool:
    return order.target.startswith("instance/")


def _on(row: Row, node: str) -> bool:
    return isinstance(row.data, Order) and row.data.node == node


def _over(row: Row, now_us: int) -> bool:
    return isinstance(row.data, Order) and row.data.expires_us <= now_us


def _expired(row: Row, order: Row) -> Iterator[str]:
    assert isinstance(order.data, Order)  # noqa: S101 # only orders are issued
    if row.ledger_us < order.data.expires_us:
        yield f"{named(row)} comes {order.data.expires_us - row.ledger_us} us too early"


def _episode(data: Data | None) -> tuple[str, bool] | None:
    """Return what begins or ends."""
    match data:
        case PressureChanged(node=node, base=base, on=on):
            return f"pressure/{node}.{base}", on
        case Frozen():
            return "freeze", True
        case Unfrozen():
            return "freeze", False
        case PrewarmBlocked(node=node):
            return f"prewarm/{node}", True
        case PrewarmReleased(node=node):
            return f"prewarm/{node}", False
        case _:
            return None


REQUESTS = (InjectionRequested, RollbackRequested, OrderRequested, DrainRequested, ComparisonRequested, ChangeRequested)

RULES: tuple[Rule, ...] = (
    *(in_order, answered, steady, reachable, fitting, serial, paced, single, ended, kept, apart, timely, episodes),
    *(missed, carried),
)
"""Every rule, in the order in which complaints are told."""
