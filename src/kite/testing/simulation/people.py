"""What people ask for: injections (some of them defective), capacity, comparisons, other numbers."""

from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import TypeAlias

from pydantic import JsonValue

from kite.clock import US_PER_S
from kite.testing.simulation.plan import base_of, changes
from kite.testing.simulation.upcycle import REFUSED, WITHOUT_EFFECT, digest
from kite.testing.simulation.world import World
from kite_schemas.guard import ComparisonRequested
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.upcycle import AdapterRef, InjectionRequested, RollbackRequested
from kite_schemas.yoco import DrainRequested, OrderRequested

ACTOR = "simulation"
BLENDS = ("risk", "tone")
FIRST_US = 300_000
EACH_US = 1_500_000
"""Distance of two requests, on average."""

BURST = 6
"""Injections that are sometimes asked for at once."""

WEIGHTS_PPM = (None, None, 200_000, 900_000)
NUMBERS: tuple[tuple[str, JsonValue], ...] = (
    ("arbitration.concurrency_max", 80),
    ("arbitration.idle_us", 6 * US_PER_S),
    ("upcycle.weight_decay_ppm", 900_000),
    ("yoco.prewarm_interval_us", 20 * US_PER_S),
    ("yoco.no_such_setting", 1),
    ("guard.freeze_us", -1),
)
"""What settings are changed to; the last two cannot be, and the third only with force."""

DEADLINES_US = (None, None, 1_000, 30_000, 2 * US_PER_S)
"""Within what time an instance is wanted; the least is less than any path takes."""

Blend: TypeAlias = str


@dataclass(slots=True)
class People:
    """All who ask for something, until `until_us`. Their words are on the bus as everything else."""

    world: World
    rng: Random
    until_us: int
    _adapters: "count[int]" = field(default_factory=count)
    _members: dict[Blend, list[str]] = field(default_factory=dict[str, list[str]])

    def begin(self) -> None:
        """Ask for the fleet, then for something every now and then."""
        fleet = ChangeRequested(actor=ACTOR, reason="the fleet", changes=changes(self.world.plan), force=True)
        self.world.agenda.after(FIRST_US, partial(self.world.ask, "policy/fleet", fleet))
        self.world.agenda.after(FIRST_US + EACH_US, self._next)

    def _next(self) -> None:
        if self.world.agenda.now_us >= self.until_us:
            return
        self.world.agenda.after(self.rng.randrange(2 * EACH_US), self._next)
        self.rng.choice(
            (
                *(self._inject, self._inject, self._inject, self._burst),
                *(self._order, self._drain, self._compare, self._set, self._return),
            )
        )()

    def _inject(self) -> None:
        base = base_of(self.world.plan, self.rng.randrange(self.world.plan.nodes))
        blend = f"{self.rng.choice(BLENDS)}-{base}"
        kind = self.rng.choice((REFUSED, WITHOUT_EFFECT, *("good",) * 6))
        name = f"{kind}-{next(self._adapters)}"
        members = self._members.setdefault(blend, [])
        replace = self.rng.choice([None, None, None, *members[-2:]])
        request = InjectionRequested(
            actor=ACTOR,
            blend=blend,
            adapter=AdapterRef(name=name, path=f"adapters/{name}", digest=digest(name)),
            base=base if self.rng.randrange(20) else "unknown",
            weight_ppm=self.rng.choice(WEIGHTS_PPM),
            replace=replace,
            anchors=(name,) if not self.rng.randrange(10) else (),
            dry_run=not self.rng.randrange(10),
            partial=not self.rng.randrange(4),
        )
        if kind not in (REFUSED, WITHOUT_EFFECT):
            members.append(name)
        self.world.ask(f"blend/{blend}", request)

    def _return(self) -> None:
        """Want the version before back, or any that the store ever held."""
        base = base_of(self.world.plan, self.rng.randrange(self.world.plan.nodes))
        blend = f"{self.rng.choice(BLENDS)}-{base}"
        known = [version for version in sorted(self.world.store.versions) if version.startswith(f"{blend}@")]
        version = self.rng.choice([None, None, None, *known])
        request = RollbackRequested(actor=ACTOR, blend=blend, version=version, dry_run=not self.rng.randrange(8))
        self.world.ask(f"blend/{blend}", request)

    def _burst(self) -> None:
        for number in range(BURST):
            self.world.agenda.after(number * self.rng.randrange(US_PER_S), self._inject)

    def _order(self) -> None:
        """Ask for one more: a certain one sometimes, which brings back what somebody has sent to rest."""
        number = self.rng.randrange(self.world.plan.nodes)
        base = base_of(self.world.plan, number)
        request = OrderRequested(
            actor=ACTOR,
            base=base,
            instance=self.rng.choice((None, f"n{number + 1}-{base}-{self.rng.randrange(4)}")),
            deadline_us=self.rng.choice(DEADLINES_US),
            late=self.rng.choice((True, False)),
        )
        self.world.ask(f"base/{base}", request)

    def _drain(self) -> None:
        """Send an instance to rest that may be no such one, not ready, or the last."""
        names = [name for node in self.world.nodes.values() for name in sorted(node.yoco.instances)]
        name = self.rng.choice([*names, "nobody"])
        force = not self.rng.randrange(4)
        self.world.ask(f"instance/{name}", DrainRequested(actor=ACTOR, instance=name, force=force))

    def _compare(self) -> None:
        """Ask about two instances that may not be ready, not on one node, or not there at all."""
        names = [name for node in self.world.nodes.values() for name in sorted(node.yoco.instances)]
        first, second = self.rng.choice([*names, "nobody"]), self.rng.choice([*names, "nobody"])
        if first != second:
            self.world.ask(f"instance/{first}", ComparisonRequested(actor=ACTOR, first=first, second=second))

    def _set(self) -> None:
        key, value = self.rng.choice(NUMBERS)
        self.world.ask("policy/fleet", ChangeRequested(actor=ACTOR, changes=(Change(key=key, value=value),)))
