"""What goes wrong: nodes, processes, workers and the arbitrator end, the bus is slow, windows are late, load surges."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from kite.clock import US_PER_S
from kite.testing.simulation.engine import STRANGER
from kite.testing.simulation.node import Node
from kite.testing.simulation.world import World
from kite_schemas.model import PPM

QUIET_US = 6 * US_PER_S
"""The fleet comes up before anything goes wrong."""

SURGE_US = 14 * US_PER_S

LOOK_US, PATIENCE = 10_000, 400
"""How often, and how many times, it is looked whether a worker that is to be cut off has something in hand."""


@dataclass(slots=True)
class Trouble:
    """Plans what goes wrong in one run."""

    world: World
    rng: Random

    def begin(self) -> None:
        """Enter all of it into the agenda."""
        plan = self.world.plan
        kinds = (
            self._restart,
            self._die,
            self._die,
            self._cut,
            self._hush,
            self._stop,
            self._slow,
            self._lag,
            self._part,
            self._meddle,
            self._damage,
        )
        for _ in range(plan.troubles):
            self.world.agenda.after(self._moment(), self.rng.choice(kinds))
        for number in range(plan.surges):
            begin_us = (number + 1) * plan.end_us // (plan.surges + 1) - SURGE_US // 2
            self.world.agenda.after(begin_us, self.world.mood.hurry)
            self.world.agenda.after(begin_us + SURGE_US, self.world.mood.relax)

    def _moment(self) -> int:
        return QUIET_US + self.rng.randrange(max(1, self.world.plan.end_us - QUIET_US))

    def _span(self, least_us: int, most_us: int) -> int:
        return least_us + self.rng.randrange(most_us - least_us)

    def _node(self) -> Node:
        return self.world.nodes[self.rng.choice(sorted(self.world.nodes))]

    def _restart(self) -> None:
        """A node ends, as told to or not, and comes back: sometimes soon, sometimes after it was called lost.

        Sometimes it is its yoco alone that ends, and finds what still runs.
        """
        node = self._node()
        if node.up:
            if self.rng.randrange(PPM) < self.world.plan.adopting_ppm:
                node.fall()
            else:
                node.end(farewell=self.rng.choice((True, False)))
            self.world.agenda.after(self._span(300_000, 9 * US_PER_S), node.begin)

    def _die(self) -> None:
        """A process ends by itself."""
        node = self._node()
        living = node.yoco.living()
        if node.up and living:
            node.kill(self.rng.choice(living))

    def _cut(self) -> None:
        """Upcycle or guard ends in the middle of an order, and is started again."""
        self._await(self._node(), self.rng.choice(("upcycle", "upcycle", "guard")), PATIENCE)

    def _await(self, node: Node, service: str, patience: int) -> None:
        """Wait until it has an order in hand, for a while."""
        worker = node.workers[service]
        if node.up and worker.up and (worker.busy or not patience):
            worker.stop()
            again = partial(self._resume, node, node.boots, service)
            self.world.agenda.after(self._span(200_000, 9 * US_PER_S), again)
        elif patience:
            self.world.agenda.after(LOOK_US, partial(self._await, node, service, patience - 1))

    def _resume(self, node: Node, boots: int, service: str) -> None:
        if node.up and node.boots == boots and not node.workers[service].up:
            node.workers[service].start()

    def _hush(self) -> None:
        """A node sends no windows, though all else goes on."""
        self._until(self._span(200_000, 9 * US_PER_S), partial(setattr, self._node(), "silent"))

    def _stop(self) -> None:
        """The arbitrator ends, and another takes over."""
        self.world.decider.stop()
        self.world.agenda.after(self._span(100_000, 3 * US_PER_S), self.world.decider.start)

    def _slow(self) -> None:
        """Facts and orders take longer."""
        line, slow_us = self.rng.choice((self.world.facts, self.world.orders)), self._span(50_000, 2 * US_PER_S)
        line.slow_us = slow_us
        self.world.agenda.after(self._span(US_PER_S, 5 * US_PER_S), partial(setattr, line, "slow_us", 0))

    def _lag(self) -> None:
        """The windows of a node are late."""
        outlet = self._node().outlet
        outlet.slow_us = self._span(20_000, 300_000)
        self.world.agenda.after(self._span(US_PER_S, 6 * US_PER_S), partial(setattr, outlet, "slow_us", 0))

    def _part(self) -> None:
        """Instances that should answer alike do not."""
        self._until(self._span(3 * US_PER_S, 12 * US_PER_S), partial(setattr, self.world.conflict, "on"))

    def _meddle(self) -> None:
        """Somebody loads into an engine, or takes from it, by hand."""
        living = [one.engine for one in self._node().yoco.living() if one.engine is not None]
        if not living:
            return
        engine = self.rng.choice(living)
        if engine.versions and self.rng.choice((True, False)):
            engine.unload(self.rng.choice(engine.versions))
        elif STRANGER not in engine.versions:
            engine.load(STRANGER, self.world.agenda.now_us)

    def _damage(self) -> None:
        """The files of a version are gone."""
        if self.world.store.digests:
            self.world.store.digests.discard(self.rng.choice(sorted(self.world.store.digests)))

    def _until(self, us: int, switch: Callable[[bool], None]) -> None:
        switch(True)
        self.world.agenda.after(us, partial(switch, False))
