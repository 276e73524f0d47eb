"""What must hold between a history and the world it comes from: windows that stay away are noticed, nothing is lost,
and no effect happens twice.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kite.clock import US_PER_S
from kite.testing.simulation.record import Row, Rows, named
from kite.testing.simulation.world import World
from kite_schemas.arbitration import Transport, TransportChanged
from kite_schemas.ledger import LeaseTaken, Tick
from kite_schemas.telemetry import NodeFound, NodeLost, Window
from kite_schemas.why import Outcome
from kite_schemas.yoco import InstanceChanged, NodeRegistered

SLACK_US = 5 * US_PER_S
"""How long a fact may be on its way, at most."""

SILENCE_US = 5 * US_PER_S
"""A node that is silent for so long is lost, at the first tick after that."""

SPAN_WINDOWS, SPANS, LOST_MIN = 20, 3, 3
"""So many spans in a row that lost so many windows each are more than any transport may lose."""


def missed(rows: Rows) -> Iterator[str]:
    """A node is lost when it has been silent for long enough, at the next tick, and found with its next window."""
    silence = Silence()
    for row in _told(rows):
        yield from (f"{named(row)}: {complaint}" for complaint in silence.hear(row))


@dataclass(slots=True)
class Silence:
    """What is known of each node: its newest window, when it was heard, whether it is away or about to be called so."""

    newest: dict[str, int] = field(default_factory=dict[str, int])
    seen_us: dict[str, int] = field(default_factory=dict[str, int])
    away: set[str] = field(default_factory=set[str])
    due: set[str] = field(default_factory=set[str])

    def hear(self, row: Row) -> Iterator[str]:
        """Take in a row, and yield what is wrong about it."""
        match row.data:
            case Window(node=node, seq=seq) if seq > self.newest.get(node, 0):
                self.newest[node] = seq
                yield from self._heard(node, row.ledger_us)
            case NodeLost(node=node):
                yield from self._lost(node, row.ledger_us)
            case Tick():
                yield from (f"{node} is not called lost" for node in sorted(self.due - self.away))
                silent = {node for node, us in self.seen_us.items() if row.ledger_us - us >= SILENCE_US}
                self.due = silent - self.away
            case _:
                self._begin(row)

    def _heard(self, node: str, now_us: int) -> Iterator[str]:
        if node in self.away and node in self.due:
            yield f"{node} was not found"
        self.seen_us[node] = now_us
        self.due.discard(node)
        self.due |= {node} & self.away

    def _lost(self, node: str, now_us: int) -> Iterator[str]:
        if now_us - self.seen_us[node] < SILENCE_US:
            yield f"after {now_us - self.seen_us[node]} us"
        self.away.add(node)
        self.due.discard(node)

    def _begin(self, row: Row) -> None:
        """A node that starts or is found is silent from here on; so is every node when somebody begins to lead."""
        match row.data:
            case NodeRegistered(node=node) | NodeFound(node=node):
                self.newest |= {node: 0} if isinstance(row.data, NodeRegistered) else {}
                self.seen_us |= {node: row.ledger_us} if node in self.seen_us else {}
                self.away.discard(node)
                self.due.discard(node)
            case InstanceChanged(node=node, code="shutdown"):
                self.seen_us.pop(node, None)
                self.away.discard(node)
            case LeaseTaken():
                self.seen_us = dict.fromkeys(self.seen_us, row.ledger_us)
                self.due.clear()
            case _:
                pass


def carried(rows: Rows) -> Iterator[str]:
    """A node that loses too many windows is moved to reliable transport."""
    fast: dict[str, bool] = {}
    spans: dict[str, Counter[int]] = defaultdict(Counter)
    due: set[str] = set()
    for row in _told(rows):
        match row.data:
            case LeaseTaken():
                spans.clear()
                due.clear()
            case TransportChanged(node=node) | NodeRegistered(node=node):
                fast[node] = not (isinstance(row.data, TransportChanged) and row.data.transport is Transport.RELIABLE)
                spans.pop(node, None)
                due.discard(node)
            case Window(node=node) if node in due:
                yield f"{named(row)}: {node} has lost too much for long, and still sends fast"
                due.remove(node)
                spans.pop(node)
            case Window(node=node, seq=seq) if fast.get(node, True):
                spans[node][(seq - 1) // SPAN_WINDOWS] += 1
                due |= {node} if _lossy(spans[node], (seq - 1) // SPAN_WINDOWS) else set()
            case _:
                pass


def heard(rows: Rows, world: World, downs: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Every fact and request came, and every window that travelled reliably while somebody led."""
    there = {row.id for row in rows}
    end_us = rows[-1].ledger_us - SLACK_US
    for event in world.facts.sent:
        if event.id not in there and event.at_us < end_us:
            yield f"{event.data.TYPE} {event.subject} of {event.at_us} never came"
    for node in world.nodes.values():
        for window in node.outlet.reliable:
            unheard = any(down_us - SLACK_US < window.at_us < up_us for down_us, up_us in downs)
            if window.id not in there and window.at_us < end_us and not unheard:
                yield f"a reliable window of {node.id} of {window.at_us} never came"


def once(rows: Rows, world: World) -> Iterator[str]:
    """No effect happened twice: each attempt is begun once, in turn, and none after the order was done."""
    done_us = {row.data.order: row.ledger_us for row in rows if isinstance(row.data, Outcome) and row.data.done}
    attempts: Counter[str] = Counter()
    for begun in world.begun():
        attempts[begun.order] += 1
        if begun.attempt != attempts[begun.order]:
            yield f"attempt {begun.attempt} of {begun.order} is the {attempts[begun.order]}. that was begun"
        if begun.at_us > done_us.get(begun.order, begun.at_us):
            yield f"attempt {begun.attempt} of {begun.order} was begun after the order was done"
    processes = Counter(engine.instance for engine in world.engines.values() if engine.alive)
    yield from (f"{name} has {number} processes" for name, number in processes.items() if number > 1)
    for engine in world.engines.values():
        held = Counter(engine.versions)
        yield from (f"{engine.instance} holds {name} {number} times" for name, number in held.items() if number > 1)


def _told(rows: Rows) -> Iterator[Row]:
    """Yield the rows without windows of another start of their node: late, or before the node says that it started."""
    boots: dict[str, str] = {}
    for row in rows:
        match row.data:
            case Window(node=node, boot=boot) if boots.get(node) != boot:
                continue
            case NodeRegistered(node=node, boot=boot):
                boots[node] = boot
            case InstanceChanged(node=node, code="shutdown"):
                boots.pop(node, None)
            case _:
                pass
        yield row


def _lossy(spans: Counter[int], number: int) -> bool:
    """Tell whether the spans before the one before this are all there and lost too much."""
    judged = range(number - SPANS - 1, number)
    whole = bool(spans) and judged.start > min(spans)
    return whole and all(SPAN_WINDOWS - spans[each] >= LOST_MIN for each in judged)
