"""How often the ledger's clock ticks: fast while something is pending that only time can bring about. Pure.

Timers fire on ticks only, so this is how exactly they are kept. A quiet fleet ticks slowly: each tick is a row.
"""

from collections.abc import Iterator

from kite_arbitrator.records import Standing
from kite_arbitrator.state import State
from kite_schemas.policy import ArbitrationPolicy

UNRULED_US = 1_000_000
"""Distance of ticks before there is a policy."""

NEAR_US = 1_000_000
"""A timer that is due within it, or before the next slow tick, is kept by fast ticks."""


def tick_us(state: State) -> int:
    """Return the distance of the next tick to the last one, as the state is now."""
    if state.policy is None:
        return UNRULED_US
    limits = state.policy.arbitration
    fast_us = limits.tick_us
    if fast_us is None or fast_us >= limits.idle_tick_us:
        return limits.idle_tick_us
    pending = _pressing(state) or _turning(state, limits, fast_us) or _due(state, limits, fast_us)
    return fast_us if pending else limits.idle_tick_us


def look_us(state: State) -> int:
    """Return how often to ask again: what becomes pending meanwhile is not to wait for a slow tick."""
    fast_us = state.policy.arbitration.tick_us if state.policy else None
    return min(fast_us or UNRULED_US, UNRULED_US)


def _pressing(state: State) -> bool:
    """A pool is under pressure, or above its limit. What is held waits for its cause, which is a row of its own."""
    return any(p.on or p.above_us is not None for p in state.pressures.values())


def _turning(state: State, limits: ArbitrationPolicy, fast_us: int) -> bool:
    """What was discarded as jitter is taken again at the first tick after the window: that one is still to come."""
    span_us = (limits.switch_window_us or 0) + fast_us
    return any(turn.discarded and state.now_us - turn.at_us < span_us for turn in state.turns.values())


def _due(state: State, limits: ArbitrationPolicy, fast_us: int) -> bool:
    """One timer is near. A freeze or an order stays until it is ended; a wait that is over says nothing any more."""
    until_us = state.now_us + max(NEAR_US, limits.idle_tick_us)
    over_us = state.now_us - fast_us
    return any(due_us <= until_us for due_us in _ends_us(state)) or any(
        over_us < instance.retry_us <= until_us for instance in state.instances.values()
    )


def _ends_us(state: State) -> Iterator[int]:
    if state.freeze is not None:
        yield state.freeze.until_us  # deferred injections wait for it too
    for order in state.orders.values():
        yield order.expires_us
    retention_us = state.policy.upcycle.retention_us if state.policy else None
    if retention_us is not None:
        kept = (v for v in state.versions.values() if v.standing is Standing.RETAINED)
        yield from (stored.since_us + retention_us for stored in kept)
