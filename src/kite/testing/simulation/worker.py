"""A simulated worker: orders once per id, in sequence per target, with a journal that outlives it.

What an order needs is judged by the pure parts of `kite.orders`; a handler is a generator that yields how long to wait
or what to say, and returns the outcome. Cut off anywhere, it is simply closed, as a process that is killed is.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from kite.orders import Entry, State, Step, decide
from kite.orders.lanes import Lanes
from kite.orders.report import LAST_STEP, fact_id
from kite.orders.verdict import EXPIRED, TIMEOUT, deadline_us
from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.lines import Event, Taker
from kite_schemas.arbitration import OrderExpired
from kite_schemas.why import Order, Outcome

ACK_US = 1_500
"""From saying something until the bus has it."""


class Trouble(Exception):
    """An order cannot be carried out: in which stage, and why."""

    def __init__(self, stage: str, code: str, message: str = "") -> None:
        super().__init__(f"{stage}: {code}: {message}")
        self.stage = stage
        self.code = code
        self.message = message


Run: TypeAlias = Generator[int | Outcome, None, Outcome]


class Task(NamedTuple):
    """How one type of order is carried out, and how its failure is told (Any: the type it stands under)."""

    run: Callable[[Any], Run]
    failed: Callable[[Any, Trouble], Outcome]


Tasks: TypeAlias = Mapping[type[Order], Task]


class Begun(NamedTuple):
    """An attempt of an order, and when it began."""

    order: str
    attempt: int
    at_us: int


@dataclass(slots=True)
class Flight:
    """One order in hand. `ticket` tells a wait that is over from one that was cut short."""

    event: Event
    order: Order
    attempt: int = 0
    steps: int = 0
    run: Run | None = None
    expired: bool = False
    ticket: int = 0

    @property
    def until_us(self) -> int:
        """When it has to be over."""
        return deadline_us(self.event.at_us, self.order)


class Worker:
    """Carries out the orders that `take` is given. `begun` lists every attempt, for the judge."""

    def __init__(self, agenda: Agenda, publish: Taker, tasks: Tasks) -> None:
        self.up = True
        self.begun: list[Begun] = []
        self._agenda = agenda
        self._publish = publish
        self._tasks = tasks
        self._life = 0
        self._lanes = Lanes[Flight]()
        self._held: dict[str, Flight] = {}
        self._journal: dict[str, Entry] = {}
        self._orders: dict[str, Event] = {}
        self._outcomes: dict[str, Event] = {}
        self._unsent: dict[str, None] = {}
        self._missed: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether an order is being carried out."""
        return any(flight.run is not None for flight in self._held.values())

    def take(self, event: Event) -> None:
        """Take a delivery of the bus; while the worker is down, the bus keeps it."""
        if not self.up:
            self._missed.append(event)
        elif isinstance(event.data, OrderExpired):
            self._expire(event.data)
        elif event.id not in self._held and isinstance(event.data, Order) and type(event.data) in self._tasks:
            self._queue(Flight(event, event.data))

    def stop(self) -> None:
        """End as a killed process does."""
        self.up = False
        self._life += 1
        self._missed = [flight.event for flight in self._held.values()]
        for flight in self._held.values():
            if flight.run is not None:
                flight.run.close()
        self._held.clear()
        self._lanes = Lanes[Flight]()

    def start(self) -> None:
        """Take up what the life before left, and what the bus has kept."""
        self.up = True
        for name, entry in list(self._journal.items()):
            if entry.state is State.BEGUN or name in self._unsent:
                self.take(self._orders[name])
        missed, self._missed = self._missed, []
        for event in missed:
            self.take(event)

    def interrupt(self, target: str, trouble: Trouble) -> bool:
        """Let what is carried out for a target fail; return whether anything is."""
        for flight in self._held.values():
            if flight.order.target == target and flight.run is not None:
                self._advance(flight, trouble)
                return True
        return False

    def _expire(self, expired: OrderExpired) -> None:
        """Keep an order from being begun, and stop it if it was."""
        if expired.order not in self._journal:
            self._journal[expired.order] = _entry(expired.order, expired.target, State.DROPPED, 0)
        flight = self._held.get(expired.order)
        if flight is not None and not flight.expired:
            flight.expired = True
            if flight.run is not None:
                self._advance(flight, Trouble("run", EXPIRED))

    def _queue(self, flight: Flight) -> None:
        self._held[flight.event.id] = flight
        if self._lanes.push(flight.order.target, flight):
            self._drive(flight.order.target)

    def _drive(self, target: str) -> None:
        flight = self._lanes.pop(target)
        if flight is not None:
            self._serve(flight)

    def _serve(self, flight: Flight) -> None:
        entry = self._journal.get(flight.event.id)
        step, code = decide(entry, expired=flight.expired, now_us=self._agenda.now_us, until_us=flight.until_us)
        match step:
            case Step.BEGIN | Step.RESUME:
                self._begin(flight, entry)
            case Step.GIVE_UP if entry is not None:
                flight.attempt = entry.attempt
                self._end(flight, self._task(flight).failed(flight.order, Trouble("begin", code)))
            case Step.REPUBLISH:
                self._done(flight, self._life)
            case _:
                self._leave(flight)

    def _begin(self, flight: Flight, entry: Entry | None) -> None:
        """Begun is in the journal before the effect."""
        flight.attempt = entry.attempt + 1 if entry else 1
        name = flight.event.id
        self._journal[name] = _entry(name, flight.order.target, State.BEGUN, flight.attempt)
        self._orders[name] = flight.event
        self.begun.append(Begun(name, flight.attempt, self._agenda.now_us))
        flight.run = self._task(flight).run(flight.order)
        self._agenda.at(flight.until_us, partial(self._late, flight, self._life))
        self._advance(flight)

    def _advance(self, flight: Flight, trouble: Trouble | None = None) -> None:
        """Go on with a handler until it waits, says something, or ends."""
        assert flight.run is not None  # noqa: S101 # what is advanced was begun
        flight.ticket += 1
        try:
            said = next(flight.run) if trouble is None else flight.run.throw(trouble)
        except StopIteration as end:
            self._end(flight, end.value)
        except Trouble as found:
            self._end(flight, self._task(flight).failed(flight.order, found))
        else:
            wait_us = said if isinstance(said, int) else self._say(flight, said)
            self._agenda.after(wait_us, partial(self._resume, flight, flight.ticket, self._life))

    def _resume(self, flight: Flight, ticket: int, life: int) -> None:
        if (ticket, life) == (flight.ticket, self._life):
            self._advance(flight)

    def _late(self, flight: Flight, life: int) -> None:
        if flight.run is not None and life == self._life:
            self._advance(flight, Trouble("run", TIMEOUT))

    def _say(self, flight: Flight, outcome: Outcome) -> int:
        flight.steps += 1
        self._publish(self._fact(flight, outcome, str(flight.steps)))
        return ACK_US

    def _end(self, flight: Flight, outcome: Outcome) -> None:
        """The outcome is in the journal before it is published; cut off in between, the next life publishes it."""
        name = flight.event.id
        flight.run = None
        self._journal[name] = replace(self._journal[name], state=State.DONE)
        self._outcomes[name] = self._fact(flight, outcome, LAST_STEP)
        self._unsent[name] = None
        self._agenda.after(ACK_US, partial(self._done, flight, self._life))

    def _done(self, flight: Flight, life: int) -> None:
        if life == self._life:
            self._publish(self._outcomes[flight.event.id])
            self._unsent.pop(flight.event.id, None)
            self._leave(flight)

    def _leave(self, flight: Flight) -> None:
        del self._held[flight.event.id]
        self._drive(flight.order.target)

    def _fact(self, flight: Flight, outcome: Outcome, step: str) -> Event:
        place = {"order": flight.event.id, "attempt": flight.attempt, "done": step == LAST_STEP}
        said = outcome.model_copy(update=place)
        name = fact_id(flight.event.id, step, flight.attempt)
        return Event(name, flight.event.subject, said, self._agenda.now_us)

    def _task(self, flight: Flight) -> Task:
        return self._tasks[type(flight.order)]


def _entry(order: str, target: str, state: State, attempt: int) -> Entry:
    return Entry(id=order, target=target, state=state, raw=b"", published_us=0, attempt=attempt, outcome=b"")
