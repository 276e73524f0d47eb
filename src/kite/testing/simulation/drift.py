"""The eyes of a simulated upcycle: what its engines should hold, against what they hold and what the store has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.engine import Engine
from kite.testing.simulation.upcycle import Store
from kite_schemas.upcycle import DriftObserved, ResidentsSet

Say = Callable[[str, DriftObserved], None]
"""Publish what was seen, under a subject."""

Told = tuple[str, ResidentsSet]
"""What an instance should hold, behind the id of the decision."""


@dataclass(slots=True)
class Watcher:
    """Looks every now and then, while `awake`, and says what it sees once per change."""

    agenda: Agenda
    engines: dict[str, Engine]
    store: Store
    say: Say
    awake: Callable[[], bool]
    told: dict[str, Told] = field(default_factory=dict[str, Told])
    said: dict[str, DriftObserved] = field(default_factory=dict[str, DriftObserved])

    def tell(self, event: str, data: ResidentsSet) -> None:
        """Take what an instance should hold; the newest counts, also when the bus tells it twice."""
        if self.told.get(data.instance) != (event, data):
            self.told[data.instance] = event, data
            self.said.pop(data.instance, None)
            self.agenda.after(data.interval_us, partial(self._look, event, data))

    def _look(self, event: str, data: ResidentsSet) -> None:
        if self.told.get(data.instance) != (event, data):
            return
        self.agenda.after(data.interval_us, partial(self._look, event, data))
        engine = self.engines.get(data.endpoint)
        if engine is None or not engine.alive or not self.awake():
            return
        seen = DriftObserved(
            node=data.node,
            instance=data.instance,
            told=event,
            expected=tuple(resident.version for resident in data.residents),
            found=tuple(sorted(engine.versions)),
            missing=tuple(r.version for r in data.residents if r.path.rpartition("/")[2] not in self.store.digests),
        )
        drifted = bool(seen.missing) or set(seen.found) != set(seen.expected)
        if seen != self.said.get(data.instance) and (drifted or data.instance in self.said):
            self.said[data.instance] = seen
            self.say(f"instance/{data.instance}", seen)
