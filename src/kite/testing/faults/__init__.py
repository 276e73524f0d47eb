"""Fault runs over real processes: what is done to them and when, who is there to be hurt, and how it is judged."""

from kite.testing.faults.history import History, Stored
from kite.testing.faults.judge import judge
from kite.testing.faults.plan import Fault, Plan, Role, Step, Store, Victim, plan_of

__all__ = ["Fault", "History", "Plan", "Role", "Step", "Store", "Stored", "Victim", "judge", "plan_of"]
