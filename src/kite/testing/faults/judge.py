"""What must hold of a fault run, whatever was done to it. Each rule looks at the history alone and tells complaints."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from kite.ledger import ChainBroken, verify
from kite.testing.faults.history import Entry, History
from kite.testing.faults.plan import Fault, Step, Store, Victim
from kite.testing.faults.yoco import BEGAN, MADE
from kite.testing.simulation import judge as fleet
from kite_schemas.arbitration import OrderExpired
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusEpochChanged
from kite_schemas.model import Data
from kite_schemas.why import Decision, Order, Outcome

Rule = Callable[[History], Iterable[str]]


def judge(history: History) -> list[str]:
    """Return every complaint about a run that has come to rest, each with the name of its rule."""
    return [f"{rule.__name__}: {complaint}" for rule in RULES for complaint in rule(history)]


def dense(history: History) -> Iterator[str]:
    """Positions begin at 1 and have no hole; ledger time rises; lease epochs do not fall."""
    for pos, entry in enumerate(history.entries, start=1):
        if entry.pos != pos:
            yield f"{entry.pos} stands where {pos} should"
            return
    for former, entry in pairwise(history.entries):
        if entry.ledger_us <= former.ledger_us or entry.row.epoch < former.row.epoch:
            yield f"{entry.pos} is older than {former.pos}"


def chained(history: History) -> Iterator[str]:
    """Every row is what was appended."""
    try:
        for _ in verify(entry.row for entry in history.entries):
            pass
    except ChainBroken as error:
        yield str(error)


def unique(history: History) -> Iterator[str]:
    """No event is there twice."""
    for event, number in Counter(entry.id for entry in history.entries).items():
        if number > 1:
            yield f"event {event} is there {number} times"


def replayed(history: History) -> Iterator[str]:
    """Deciding again from the inputs gives the same decisions."""
    if history.replay:
        yield history.replay


def kept(history: History) -> Iterator[str]:
    """What the bus has acknowledged is on it, byte for byte, or was on the one whose store is gone."""
    held = {message.event_id: message.payload for store in history.stores for message in store.facts}
    for event, raw in history.acked.items():
        if held.get(event) != raw:
            yield f"{event} was acknowledged and is in no store"


def consumed(history: History) -> Iterator[str]:
    """What is on the bus is in the ledger; of a store that was replaced, all that came before the last one read.

    What both stores have in one place may have been read of either, also when it was published anew there: a copy that
    is no older than what was read is taken for the same bus.
    """
    rows = {entry.id: entry for entry in history.entries}
    lost = history.lost.facts if history.lost else ()
    both = {(m.seq, m.event_id) for m in lost} & {(m.seq, m.event_id) for m in history.bus.facts}
    for message in history.bus.facts:
        if message.event_id not in rows or rows[message.event_id].row.raw != message.payload:
            yield f"{message.event_id} at {message.seq} of the bus is not in the ledger"
    only = [m for m in lost if (m.seq, m.event_id) not in both]
    read_seq = max((message.seq for message in only if _is_from(rows.get(message.event_id), message.seq)), default=0)
    for message in lost:
        if message.seq <= read_seq and message.event_id not in rows:
            yield f"{message.event_id} at {message.seq} of the bus before was passed over: {read_seq} was read"


def delivered(history: History) -> Iterator[str]:
    """Every decision was published at least once, as it stands in the ledger."""
    held = {message.event_id: message.payload for store in history.stores for message in store.decisions}
    for entry in history.entries:
        if isinstance(entry.data, Decision) and held.get(entry.id) != entry.row.raw:
            yield f"{_named(entry)} was never published"


def committed(history: History) -> Iterator[str]:
    """Nothing was published that is not in the ledger."""
    rows = {entry.id: entry.row.raw for entry in history.entries}
    for store in history.stores:
        for message in store.decisions:
            if rows.get(message.event_id) != message.payload:
                yield f"{message.event_id} at {message.seq} of the decisions is not in the ledger"


def noticed(history: History) -> Iterator[str]:
    """That the bus was deleted is a row, unless the ledger was not made yet. An older copy may fit."""
    deleted = [fault for fault in history.spent if fault.store is Store.DELETED and not _is_first(fault)]
    changes = _changes(history)
    if history.lost is not None and deleted and not changes:
        yield f"the bus was deleted ({deleted[0]}), and no row says so"
    if len(changes) > (history.lost is not None):
        yield f"{len(changes)} rows say that the bus is another one"


def carried_out(history: History) -> Iterator[str]:
    """Every order has its effect once; one that was given up, at most once. Each attempt is begun once."""
    given_up = {entry.data.order for entry in history.entries if isinstance(entry.data, OrderExpired)}
    orders = {entry.id for entry in history.entries if isinstance(entry.data, Order)}
    made = Counter(deed.order for deed in history.world if deed.what == MADE)
    for order in sorted(orders | made.keys()):
        least = order in orders and order not in given_up
        if not least <= made[order] <= (order in orders):
            yield f"order {order} had its effect {made[order]} times"
    for begun, number in Counter(deed for deed in history.world if deed.what == BEGAN).items():
        if number > 1 or begun.attempt > 1 + history.deaths:
            yield f"attempt {begun.attempt} of {begun.order} was begun {number} times, with {history.deaths} deaths"


def ended(history: History) -> Iterator[str]:
    """Every order has exactly one outcome; one that was given up has none only when it had no effect.

    Nobody asks for the outcome of such an order again: when only the bus before had it, it is gone.
    """
    gone = {_last_of(decode(message.payload).data) for message in (history.lost.facts if history.lost else ())}
    given_up = {entry.data.order for entry in history.entries if isinstance(entry.data, OrderExpired)}
    made = {deed.order for deed in history.world if deed.what == MADE}
    done = Counter(_outcome(entry) for entry in history.entries)
    for entry in history.entries:
        if isinstance(entry.data, Order):
            least = entry.id not in given_up or (entry.id in made and entry.id not in gone)
            if not least <= done[entry.id] <= 1:
                yield f"{_named(entry)} has {done[entry.id]} outcomes"


def sensible(history: History) -> Iterator[str]:
    """The ledger holds what that of any fleet has to."""
    yield from fleet.judge(history.entries)


def quiet(history: History) -> Iterator[str]:
    """Processes ended by faults only, and nothing is left."""
    yield from history.complaints


def _changes(history: History) -> list[Entry]:
    return [entry for entry in history.entries if isinstance(entry.data, BusEpochChanged)]


def _is_first(fault: Fault) -> bool:
    """Tell whether an arbitrator died of a fault with its first append."""
    at_first = fault.point in {Step.MID_WRITE, Step.BEFORE_COMMIT} and fault.count == 1
    return at_first and Victim.SELF in fault.victims


def _is_from(entry: Entry | None, seq: int) -> bool:
    return entry is not None and entry.row.bus_epoch == 1 and entry.row.bus_seq == seq


def _outcome(entry: Entry) -> str:
    return _last_of(entry.data)


def _last_of(data: Data | None) -> str:
    """Return the order whose last outcome a payload is."""
    return data.order or "" if isinstance(data, Outcome) and data.done else ""


def _named(entry: Entry) -> str:
    return f"{entry.pos} {entry.row.type} {entry.subject} ({entry.id})"


RULES: tuple[Rule, ...] = (
    *(dense, chained, unique, replayed, kept, consumed, delivered, committed, noticed),
    *(carried_out, ended, sensible, quiet),
)
