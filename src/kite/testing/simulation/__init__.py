"""A fleet that exists only in simulated time, from a seed: nodes, workers, memory, bus, agents, people and trouble.

Everything but the decider is here. What it decides is relayed to workers that carry orders out as `kite.orders` does;
what they say, and what people ask for, comes back late, twice, or in another order. `judge` looks at the history.
"""

from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.lines import Event
from kite.testing.simulation.people import People
from kite.testing.simulation.plan import Plan, plan_of
from kite.testing.simulation.trouble import Trouble
from kite.testing.simulation.world import Decider, World

__all__ = ["Agenda", "Decider", "Event", "People", "Plan", "Trouble", "World", "plan_of"]
