"""Rules, version 1: the ordered tuple that the core asks once per input row."""

from kite_arbitrator.rules.draft import Rule
from kite_arbitrator.rules.v1 import comparison, expiry, fleet, guard, handover, injection, policy

BOOTSTRAP: tuple[Rule, ...] = (policy.change,)
"""Before the first policy nothing else is decided."""

RULES: tuple[Rule, ...] = (
    policy.change,
    expiry.expire,
    injection.advance,
    handover.wake,
    comparison.compare,
    guard.trip,
    guard.thaw,
    guard.watch,
    fleet.settle,
    fleet.start,
    fleet.repair,
)
