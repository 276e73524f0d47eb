"""Which nodes are heard, how their windows travel, and whether decisions may destroy after a gap in the bus."""

from collections.abc import Iterator

from kite_arbitrator.records import Feed, Row
from kite_arbitrator.rules.draft import Draft, at_most, heard, reached, why
from kite_arbitrator.state import State, current
from kite_schemas.arbitration import Mode, ModeChanged, Transport, TransportChanged
from kite_schemas.ledger import Tick
from kite_schemas.telemetry import NodeFound, NodeLost, Window
from kite_schemas.why import Reason, RuleValue, Why

SILENCE_US = 5_000_000
"""A node without a window for so long is lost."""

LOSSLESS_US = 60_000_000
"""After so long without a lost window a node sends without waiting again."""


def lose(state: State, row: Row) -> Iterator[Draft]:
    """Give up the nodes that have been silent for too long, on ticks: silence has no row of its own."""
    if not isinstance(row.data, Tick) or current(state).arbitration.sync_timeout_us is None:
        return
    for feed in sorted(state.feeds.values(), key=lambda feed: feed.node):
        silence_us = state.now_us - feed.seen_us
        if not feed.lost and silence_us >= SILENCE_US:
            rule = reached("telemetry.silence_us", silence_us, SILENCE_US)
            account = why(state, row, Reason.SILENT, rules=[rule], inputs=[heard(state, feed)])
            yield Draft(f"node/{feed.node}", NodeLost(node=feed.node, silence_us=silence_us, why=account))


def find(state: State, row: Row) -> Iterator[Draft]:
    """Take a lost node back with its next window."""
    feed = _told(state, row)
    if feed is not None and feed.lost:
        account = why(state, row, Reason.HEARD, inputs=[heard(state, feed)])
        yield Draft(f"node/{feed.node}", NodeFound(node=feed.node, silence_us=feed.silent_us, why=account))


def carry(state: State, row: Row) -> Iterator[Draft]:
    """Change the transport of a node that loses too many windows, and back when it loses none, whatever the limits."""
    feed = _told(state, row)
    if feed is None:
        return
    if feed.transport is Transport.FAST:
        limit = current(state).arbitration.loss_windows
        if limit is not None and feed.span.lossy >= limit:
            account = why(state, row, Reason.LOSS, rules=_lossy(state, feed, limit), inputs=[heard(state, feed)])
            yield _changed(feed, Transport.RELIABLE, account)
        return
    lossless_us = state.now_us - feed.span.lossless_since_us
    if lossless_us >= LOSSLESS_US:
        rule = reached("telemetry.lossless_us", lossless_us, LOSSLESS_US)
        account = why(state, row, Reason.LOSSLESS, rules=[rule], inputs=[heard(state, feed)])
        yield _changed(feed, Transport.FAST, account)


def degrade(state: State, row: Row) -> Iterator[Draft]:
    """Take no decision that destroys after a gap in the bus, until somebody has looked at it."""
    if bool(state.gap_pos) is state.degraded:
        return
    mode, reason = (Mode.DEGRADED, Reason.GAP) if state.gap_pos else (Mode.STATIC, Reason.GAP_ACKNOWLEDGED)
    yield Draft("arbitration/fleet", ModeChanged(mode=mode, why=why(state, row, reason)))


def _told(state: State, row: Row) -> Feed | None:
    feed = state.feeds.get(row.data.node) if isinstance(row.data, Window) else None
    return feed if feed is not None and feed.pos == row.pos else None


def _lossy(state: State, feed: Feed, limit: int) -> list[RuleValue]:
    loss_max_ppm = current(state).arbitration.loss_max_ppm or 0
    return [
        at_most("arbitration.loss_max_ppm", feed.span.loss_ppm, loss_max_ppm),
        reached("arbitration.loss_windows", feed.span.lossy, limit),
    ]


def _changed(feed: Feed, transport: Transport, account: Why) -> Draft:
    data = TransportChanged(node=feed.node, boot=feed.boot, transport=transport, why=account)
    return Draft(f"node/{feed.node}", data)
