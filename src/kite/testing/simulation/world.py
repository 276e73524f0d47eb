"""A whole simulated fleet: nodes, bus and agents around one decider, from a seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Protocol
from uuid import uuid5

from kite.clock import US_PER_S
from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.agents import Agent, Mood
from kite.testing.simulation.chance import Chance
from kite.testing.simulation.engine import Engine, Memory
from kite.testing.simulation.lines import Event, Line, Outlet
from kite.testing.simulation.node import SPACE, Node
from kite.testing.simulation.plan import CALM_LOSS_PPM, LOSS_PPM, Plan, base_of, node_names
from kite.testing.simulation.upcycle import Guard, Store, Upcycle
from kite.testing.simulation.worker import Begun
from kite.testing.simulation.yoco import Yoco
from kite_schemas.model import Data

START_US = 1_767_225_600 * US_PER_S
"""When every simulation begins: 2026-01-01, UTC."""

OFFSET_MAX_US = 40_000
"""By how much the clock of a node is ahead of true time, or behind."""

PORT = 8_000


class Decider(Protocol):
    """What a world needs of the arbitrator."""

    def take(self, event: Event) -> None:
        """Take a fact or a request; while the arbitrator is down, the bus keeps it."""
        ...

    def hear(self, window: Event) -> None:
        """Take a window; while the arbitrator is down, it is lost."""
        ...

    def ways(self, name: str) -> Sequence[str]:
        """Return the endpoints that answer for a name."""
        ...

    def stop(self) -> None:
        """End as a killed process does."""
        ...

    def start(self) -> None:
        """Rebuild the state and go on."""
        ...


@dataclass(slots=True)
class Conflict:
    """Whether instances that should answer alike do not, at present."""

    on: bool = False

    def __call__(self) -> bool:
        """Tell it to the guard."""
        return self.on


class World:
    """One run of a plan. Bind a decider, then let time pass with `agenda.run`."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.agenda = Agenda(START_US)
        self.rng = self._random("world")
        self.chance = Chance(self._random("chance"), plan.failing_ppm)
        self.facts = Line(self.agenda, self._random("facts"))
        self.orders = Line(self.agenda, self._random("orders"))
        self.mood = Mood()
        self.conflict = Conflict()
        self.engines: dict[str, Engine] = {}
        self.store = Store()
        self._ports = count(PORT)
        self._asked = count()
        self._decider: Decider | None = None
        self.nodes = {name: self._node(number, name) for number, name in enumerate(node_names(plan))}
        self.agents = [self._agent(number) for number in range(plan.agents)]

    @property
    def decider(self) -> Decider:
        """The arbitrator."""
        assert self._decider is not None  # noqa: S101 # bound before time passes
        return self._decider

    def bind(self, decider: Decider) -> None:
        """Begin: nodes start one after another, agents think of their first request."""
        self._decider = decider
        for node in self.nodes.values():
            self.agenda.after(self.rng.randrange(US_PER_S), node.begin)
        for agent in self.agents:
            agent.think()

    def ask(self, subject: str, request: Data) -> None:
        """Publish what a person asks for."""
        name = str(uuid5(SPACE, f"request/{next(self._asked)}"))
        self.facts.send(f"person/{subject}", Event(name, subject, request, self.agenda.now_us), self._take)

    def relay(self, key: str, service: str, node: str, event: Event) -> None:
        """Publish a decision for a worker."""
        found = self.nodes.get(node)
        if found is not None:
            self.orders.send(key, event, partial(found.deliver, service))

    def rest(self) -> None:
        """From here on nothing fails, nothing is lost or late, and nobody hurries."""
        self.chance.failing_ppm = 0
        self.facts.slow_us = self.orders.slow_us = 0
        self.conflict.on = False
        self.mood.rest()
        for node in self.nodes.values():
            node.outlet.loss_ppm = node.outlet.slow_us = 0
            node.silent = False

    def begun(self) -> Iterator[Begun]:
        """Yield every attempt of every order, worker by worker, as they were begun."""
        for node in self.nodes.values():
            for worker in node.workers.values():
                yield from worker.begun

    def _take(self, event: Event) -> None:
        self.decider.take(event)

    def _hear(self, window: Event) -> None:
        self.decider.hear(window)

    def _ways(self, name: str) -> Sequence[str]:
        return self.decider.ways(name)

    def _random(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")  # noqa: S311 # a test's numbers have to be known, not secret

    def _node(self, number: int, name: str) -> Node:
        rng = self._random(f"node/{name}")
        memories = tuple(Memory(f"gpu{device}", self.plan.device_bytes) for device in range(self.plan.devices))
        loss_ppm = LOSS_PPM if number < self.plan.lossy else CALM_LOSS_PPM
        return Node(
            id=name,
            agenda=self.agenda,
            rng=rng,
            line=self.facts,
            take=self._take,
            outlet=Outlet(self.agenda, self._random(f"outlet/{name}"), self._hear, loss_ppm=loss_ppm),
            yoco=Yoco(name, self.agenda, self.chance, memories, self.engines, self._ports, self.plan.modes),
            upcycle=Upcycle(self.agenda, self.chance, self.engines, self.store),
            guard=Guard(self.agenda, self.chance, self.engines, self.conflict),
            memories=memories,
            offset_us=rng.randrange(-OFFSET_MAX_US, OFFSET_MAX_US),
        )

    def _agent(self, number: int) -> Agent:
        base = base_of(self.plan, number)
        names = (f"risk-{base}", base) if number % 3 else (base,)
        rng = self._random(f"agent/{number}")
        return Agent(names, self.agenda, rng, self.mood, self._ways, self.engines)
