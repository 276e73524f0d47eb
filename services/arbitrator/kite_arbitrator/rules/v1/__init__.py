"""Rules, version 1: the ordered tuples that the core asks once per input row."""

from kite_arbitrator.records import Row
from kite_arbitrator.rules.draft import Draft, Rule, Rules
from kite_arbitrator.rules.v1 import (
    capacity,
    channel,
    comparison,
    drift,
    expiry,
    fleet,
    freshness,
    guard,
    handover,
    injection,
    policy,
    pressure,
    prewarm,
    quarantine,
    retention,
    rollback,
)
from kite_arbitrator.rules.v1.gate import admit
from kite_arbitrator.state import State


def _unchecked(_state: State, _row: Row, made: Draft) -> Draft:
    return made


BOOTSTRAP = Rules(on_window=(), on_all_else=(policy.change,), admit=_unchecked)
"""Before the first policy nothing else is decided."""

LOAD: tuple[Rule, ...] = (
    pressure.press,
    pressure.relax,
    pressure.shed,
    pressure.release,
    pressure.decay,
    channel.select,
    capacity.grow,
)
"""What load and memory bring about; each rule looks at what the row may have changed."""

RULES = Rules(
    on_window=(freshness.find, freshness.carry, *LOAD),
    on_all_else=(
        policy.change,
        expiry.expire,
        freshness.lose,
        freshness.degrade,
        injection.advance,
        rollback.advance,
        handover.wake,
        handover.rest,
        comparison.compare,
        guard.trip,
        guard.thaw,
        guard.watch,
        *LOAD,
        capacity.shrink,
        quarantine.end,
        fleet.settle,
        fleet.clear,
        fleet.start,
        prewarm.keep,
        fleet.withdraw,
        retention.retire,
        retention.delete,
        drift.rebuild,
        fleet.repair,
        drift.tell,
    ),
    admit=admit,
)
