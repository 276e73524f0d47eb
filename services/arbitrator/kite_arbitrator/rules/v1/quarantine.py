"""Instances whose effect was missing: kept for a look, then their process ends, and the fleet starts another one."""

from collections.abc import Iterator

from kite_arbitrator.records import Row
from kite_arbitrator.rules.draft import Draft, reached, seen, why
from kite_arbitrator.rules.v1.fleet import stop_order
from kite_arbitrator.state import State, busy, current, lost_node
from kite_schemas.ledger import Tick
from kite_schemas.why import Reason
from kite_schemas.yoco import State as Life


def end(state: State, row: Row) -> Iterator[Draft]:
    """Stop what has been quarantined for long enough; also after a gap in the bus, since it answers nobody."""
    quarantine_us = current(state).yoco.quarantine_us
    if quarantine_us is None or not isinstance(row.data, Tick):
        return
    for instance in state.instances.values():
        if instance.state is not Life.QUARANTINED or instance.retry_us > state.now_us:
            continue
        rule = reached("yoco.quarantine_us", state.now_us - instance.quarantined_us, quarantine_us)
        if rule.fired and not busy(state, instance.id) and not lost_node(state, instance.node):
            account = why(state, row, Reason.QUARANTINED, rules=[rule], inputs=[seen(state, instance)])
            yield stop_order(state, instance, account)
