"""One run around the real core: the ledger is a list, time is simulated, and the seed is all."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from random import Random
from uuid import UUID, uuid5

from kite.clock import US_PER_S
from kite.testing.simulation import Event, People, Plan, Trouble, World
from kite.testing.simulation.node import SPACE
from kite.testing.simulation.world import START_US
from kite_arbitrator import core, shipped
from kite_arbitrator.pace import look_us, tick_us
from kite_arbitrator.records import Row
from kite_arbitrator.routes import rerouted, routes
from kite_arbitrator.routing import destination
from kite_arbitrator.state import State
from kite_schemas.arbitration import OrderExpired, TransportChanged
from kite_schemas.ledger import Created, LeaseTaken, Tick
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRequested, Policy
from kite_schemas.upcycle import ResidentsSet
from kite_schemas.why import Decision, Order

LEDGER = str(uuid5(SPACE, "ledger"))
COMMIT_US = 2_000
"""From a decision until it is durable and on its way."""

UNACKED_MAX = 4
"""Decisions that a new leader publishes again, since the last one may not have known that they were."""

FOR_WORKERS = (Order, OrderExpired, TransportChanged, ResidentsSet)
PLACE = slice(3, 5)
"""Where the bus subject of a decision has its service and its node."""


@dataclass(slots=True)
class Arbitrator:
    """The service around the core, as a list: takes each event once, relays decisions from an outbox, ticks.

    `occurred_us` is when each row's event was published. `downs` are the spans without a leader, `diverged` the
    positions at which the state that was rebuilt from the rows was not the one that was lost.
    """

    world: World
    policy: Policy
    state: State = field(default_factory=core.initial)
    rows: list[Row] = field(default_factory=list[Row])
    occurred_us: list[int] = field(default_factory=list[int])
    downs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    diverged: list[int] = field(default_factory=list[int])
    up: bool = False
    _known: set[str] = field(default_factory=set[str])
    _missed: list[Event] = field(default_factory=list[Event])
    _outbox: deque[Row] = field(default_factory=deque[Row])
    _sent: deque[Row] = field(default_factory=lambda: deque[Row](maxlen=UNACKED_MAX))
    _lives: int = 0
    _left_us: int = 0
    _ticked_us: int = 0
    _table: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def start(self) -> None:
        """Lead: rebuild the state from the rows, take the lease, publish what the life before did not, catch up."""
        if self.up:
            return
        self.up = True
        self._lives += 1
        if self.rows:
            self._rebuild()
        else:
            self._write(Created(ledger=LEDGER, format=core.FORMAT))
        self._write(LeaseTaken(epoch=self._lives, holder="simulation"))
        if self.state.policy is None:
            self._write(ChangeRequested(actor="arbitrator", policy=self.policy), "policy/fleet")
        self._take_over()
        self._look(self._lives)

    def stop(self) -> None:
        """End as a killed process does: what is not in the rows is gone."""
        if self.up:
            self.up = False
            self._left_us = self.world.agenda.now_us

    def take(self, event: Event) -> None:
        """Take a fact or a request, once."""
        if not self.up:
            self._missed.append(event)
        elif event.id not in self._known:
            self._row(event.id, event.subject, event.data, event.at_us)

    def hear(self, window: Event) -> None:
        """Take a window, once; nobody hears it while nobody leads."""
        if self.up and window.id not in self._known:
            self._row(window.id, window.subject, window.data, window.at_us)

    def ways(self, name: str) -> Sequence[str]:
        """Return the endpoints that answer for a name."""
        return self._table.get(name, ())

    def _rebuild(self) -> None:
        self.downs.append((self._left_us, self.world.agenda.now_us))
        rebuilt = folded(self.rows)
        if rebuilt != self.state:
            self.diverged.append(self.state.pos)
        self.state = rebuilt

    def _take_over(self) -> None:
        """Publish what is in the outbox, and what the life before may not have known to be published."""
        self._outbox.extendleft(reversed(self._sent))
        for _ in range(len(self._outbox)):
            self._publish(self._lives)
        missed, self._missed = self._missed, []
        for event in missed:
            self.take(event)

    def _write(self, data: Data, subject: str = "ledger/fleet") -> None:
        name = str(uuid5(UUID(LEDGER), f"row/{self.state.pos + 1}"))
        self._row(name, subject, data, self.world.agenda.now_us)

    def _row(self, name: str, subject: str, data: Data, at_us: int) -> None:
        """Append one input with the decisions it causes."""
        now_us = max(self.state.now_us + 1, self.world.agenda.now_us)
        row = Row(pos=self.state.pos + 1, id=name, type=data.TYPE, subject=subject, ledger_us=now_us, data=data)
        former = self.state
        self.state, decided = core.step(former, row)
        self._known.add(name)
        self.rows += (row, *decided)
        self.occurred_us += (at_us, *(decision.ledger_us for decision in decided))
        if rerouted(former, self.state):
            self._reroute()
        for decision in decided:
            if isinstance(decision.data, FOR_WORKERS):
                self._outbox.append(decision)
                self.world.agenda.after(COMMIT_US, partial(self._publish, self._lives))

    def _publish(self, life: int) -> None:
        if life == self._lives and self.up and self._outbox:
            decision = self._outbox.popleft()
            self._sent.append(decision)
            key = destination(decision)
            service, node = key.split(".")[PLACE]
            event = Event(decision.id, decision.subject, payload(decision), self.world.agenda.now_us)
            self.world.relay(key, service, node, event)

    def _reroute(self) -> None:
        table: dict[str, tuple[str, ...]] = {}
        for route in routes(self.state):
            table[route.name] = (*table.get(route.name, ()), route.endpoint)
        self._table = table

    def _look(self, life: int) -> None:
        """Tick when it is time, as the service does."""
        if life != self._lives or not self.up:
            return
        now_us = self.world.agenda.now_us
        if now_us - self._ticked_us >= tick_us(self.state):
            self._ticked_us = now_us
            self._write(Tick())
        self.world.agenda.after(look_us(self.state), partial(self._look, life))


@dataclass(frozen=True, slots=True)
class History:
    """A run that is over: the world as it was left, and the arbitrator with its rows."""

    seed: int
    world: World
    arbitrator: Arbitrator

    @property
    def rows(self) -> list[Row]:
        """The ledger."""
        return self.arbitrator.rows

    def counts(self) -> Counter[str]:
        """Count the rows by type, shortened to family and verb."""
        return Counter(row.type.removeprefix("kite.").removesuffix(".v1") for row in self.rows)

    def digest(self) -> str:
        """Return the hash of everything that a decision read and every decision."""
        text = sha256()
        for row in self.rows:
            told = payload(row).model_dump_json(exclude_none=True)
            text.update(f"{row.pos} {row.id} {row.type} {row.subject} {row.ledger_us} {told}\n".encode())
        return text.hexdigest()


def payload(row: Row) -> Data:
    """Return the payload of a row of a simulation: its type is always known."""
    assert row.data is not None  # noqa: S101 # nothing else is written here
    return row.data


def folded(rows: Sequence[Row]) -> State:
    """Return the state that rows lead to, decisions folded as they stand."""
    state = core.initial()
    for row in rows:
        state = core.evolve(state, row)
    return state


def redecided(rows: Sequence[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Decide again from the inputs among rows; yield each decision as it is, and as it comes out again."""
    state, again = core.initial(), deque[Row]()
    for row in rows:
        if isinstance(row.data, Decision):
            yield row, again.popleft() if again else None
        else:
            yield from ((row, unexpected) for unexpected in again)
            state, decided = core.step(state, row)
            again = deque(decided)


def simulate(plan: Plan, seed: int, *, policy: Policy | None = None) -> History:
    """Run a plan: so many seconds of trouble, then as many to come to rest as the plan has for it."""
    world = World(plan, seed)
    arbitrator = Arbitrator(world, policy or shipped.policy())
    arbitrator.start()
    world.bind(arbitrator)
    People(world, Random(f"{seed}/people"), START_US + plan.end_us).begin()  # noqa: S311 # known, not secret
    Trouble(world, Random(f"{seed}/trouble")).begin()  # noqa: S311 # known, not secret
    world.agenda.run(START_US + plan.end_us)
    world.rest()
    world.agenda.run(START_US + plan.end_us + plan.settle_s * US_PER_S)
    return History(seed, world, arbitrator)
