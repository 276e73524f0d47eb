"""`kite status`: a verdict first, then what stands behind it: one table, or one kind of JSON object, for each part."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir
from kite_cli.output import Record, count, duration, percent, say, say_json, table

if TYPE_CHECKING:
    from kite_arbitrator.records import Feed, Hold
    from kite_arbitrator.state import State
    from kite_cli.health import Health
    from kite_schemas.policy import Pool

Part = tuple[Record, tuple[str, ...]]
"""One thing as JSON, and as the cells of a table."""

NODES = ("NODE", "WINDOWS", "SEEN", "LAG", "LOST", "TRANSPORT", "PREWARMS")
POOLS = ("POOL", "NODE", "PRESSURE", "IN FLIGHT", "WEIGHT DECAY")
HOLDS = ("NOT DONE", "REASON", "FOR", "POS")


def status(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] Say in one sentence how the fleet is; then instances, nodes, pools, blends, what is held, ledger."""
    from kite import clock
    from kite_cli import place
    from kite_cli.health import look

    with place.reading(place.find(directory)) as reader:
        health = look(reader, clock.wall_us())
    if as_json:
        for one in records(health):
            say_json(one)
    else:
        _print(health)
    return Exit.OK


def records(health: "Health") -> Iterator[Record]:
    """Yield the status as JSON: one object for the whole, then one for each thing."""
    from kite_cli.blends import blends
    from kite_cli.yoco import record

    state = health.state
    yield _whole(health)
    yield from (record(instance, state) for instance in sorted(state.instances.values(), key=lambda found: found.id))
    for parts in (nodes(state), pools(state), blends(state), holds(state)):
        yield from (found for found, _ in parts)


def _whole(health: "Health") -> Record:
    from kite_arbitrator.state import pressing
    from kite_cli.health import freshness, guard, off

    state = health.state
    ways = {node: freshness(state, node) for node in sorted(state.feeds)}
    return {
        "kind": "status",
        "verdict": health.verdict,
        "sentence": health.sentence,
        "epoch": health.head.epoch,
        "holder": health.holder,
        "pos": health.head.pos,
        "ledger_us": health.head.ledger_us,
        "tick_age_us": health.tick_age_us,
        "policy": state.policy_digest,
        "guard": guard(state),
        "mode": "degraded" if state.degraded else "static",
        "gap_pos": state.gap_pos or None,
        "nodes": len(state.nodes),
        "instances": len(state.instances),
        "blends": len(state.blends),
        "versions": len(state.versions),
        "open_injections": len(state.injections),
        "open_rollbacks": len(state.rollbacks),
        "open_orders": len(state.orders),
        "under_pressure": [found.id for found in pressing(state)],
        "on_yoco": [name for name, found in sorted(state.channels.items()) if found.channel == "yoco"],
        "lost": [node for node, way in ways.items() if way == "lost"],
        "stale": [node for node, way in ways.items() if way == "stale"],
        "reliable": [node for node, feed in sorted(state.feeds.items()) if feed.transport == "reliable"],
        "prewarm_blocked": sorted(state.blocks),
        "holds": len(state.holds),
        "off": [{"setting": key, "rule": rule} for key, rule in off(state)],
        "late_24h": health.late.record(),
    }


def _print(health: "Health") -> None:
    from kite_cli.blends import BLENDS, blends
    from kite_cli.yoco import show_instances

    state = health.state
    say(health.sentence)
    if state.instances:
        show_instances(state, as_json=False)
    for header, parts in ((NODES, nodes(state)), (POOLS, pools(state)), (BLENDS, blends(state)), (HOLDS, holds(state))):
        _table(header, [cells for _, cells in parts])
    say("")
    for line in notes(health):
        say(line)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        say("")
        table(header, rows)


def notes(health: "Health") -> Iterator[str]:
    """Yield what is to be known beside the tables, a line each: what is off or was late, guard, leader, ledger."""
    from kite_cli.health import gap, off

    if gap(health.state):
        yield f"mode degraded: {gap(health.state)}"
    yield from (f"{key} unset: {rule} is off" for key, rule in off(health.state))
    late = health.late
    if late.number:
        yield (
            f"{count(late.number, 'time')} in the last 24 h decisions came late, {duration(late.worst_us)} at worst "
            f"(deadline {duration(late.deadline_us)}), the last time at position {late.pos}"
        )
    yield health.ledger


def nodes(state: "State") -> list[Part]:
    """Return every node that is registered or was heard of, by name."""
    return [_node(state, name, state.feeds.get(name)) for name in sorted(state.nodes.keys() | state.feeds.keys())]


def _node(state: "State", name: str, feed: "Feed | None") -> Part:
    from kite_cli.health import freshness

    blocked_us = state.now_us - state.blocks[name] if name in state.blocks else None
    way = freshness(state, name)
    found = {
        "kind": "node",
        "node": name,
        "windows": way,
        "age_us": state.now_us - feed.seen_us if feed else None,
        "lag_us": feed.lag_us if feed else None,
        "loss_ppm": feed.span.loss_ppm if feed else None,
        "transport": feed.transport if feed else None,
        "fragmentation_ppm": feed.fragmentation_ppm if feed else None,
        "blocked_us": blocked_us,
    }
    prewarms = "" if blocked_us is None else f"blocked for {duration(blocked_us)}"
    if feed is None:
        return found, (name, way, "", "", "", "", prewarms)
    seen = f"{duration(state.now_us - feed.seen_us)} ago"
    lag, lost = duration(feed.lag_us), percent(feed.span.loss_ppm)
    return found, (name, way, seen, lag, lost, str(feed.transport), prewarms)


def pools(state: "State") -> list[Part]:
    """Return the pools of the policy, in its order."""
    return [_pool(state, pool) for pool in state.policy.fleet.pools] if state.policy else []


def _pool(state: "State", pool: "Pool") -> Part:
    from kite_arbitrator.folds.pressure import pressure_of
    from kite_arbitrator.state import current, decay_of

    base = pool.spec.served_name
    pressure, decay_ppm = pressure_of(state, pool), decay_of(state, base)
    lasted_us = state.now_us - pressure.since_us
    limited = current(state).arbitration.concurrency_max is not None
    found = {
        "kind": "pool",
        "node": pool.node,
        "base": base,
        "pressure": pressure.on,
        "lasted_us": lasted_us if pressure.since_us else None,
        "in_flight": pressure.in_flight if limited else None,
        "decay_ppm": decay_ppm,
        "decay_in_force": base in state.decays,
    }
    says = f"for {duration(lasted_us)}" if pressure.on else "no" if limited else "off"
    decay = percent(decay_ppm) + (" (in force)" if base in state.decays else "")
    return found, (base, pool.node, says, str(pressure.in_flight) if limited else "", decay)


def holds(state: "State") -> list[Part]:
    """Return what is not done now, the longest first."""
    return [_hold(state, hold) for hold in sorted(state.holds.values(), key=lambda found: (found.since_us, found.pos))]


def _hold(state: "State", hold: "Hold") -> Part:
    lasted_us = state.now_us - hold.since_us
    found = {
        "kind": "hold",
        "subject": hold.subject,
        "reason": hold.reason,
        "lasted_us": lasted_us,
        "pos": hold.pos,
    }
    return found, (hold.subject, str(hold.reason), duration(lasted_us), str(hold.pos))
