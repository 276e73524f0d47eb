"""The arbitrator's state: frozen records in dictionaries that are copied on change; integers and names only."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, structs

from kite_arbitrator.records import (
    Account,
    Blend,
    Delay,
    Feed,
    Freeze,
    Hold,
    Injection,
    Instance,
    Node,
    OpenOrder,
    Passage,
    Pressure,
    Rollback,
    Selected,
    Standing,
    Stored,
    Turn,
    Watch,
)
from kite_schemas.arbitration import Transport
from kite_schemas.policy import Policy, Pool
from kite_schemas.upcycle import (
    AdapterRef,
    Member,
    RetireOrdered,
)
from kite_schemas.yoco import DrainRequested, OrderRequested, Path
from kite_schemas.yoco import State as Life

Key = TypeVar("Key")
Value = TypeVar("Value")


class State(Struct, frozen=True, kw_only=True):
    """Everything that decisions read.

    `pools` are those of the policy by node; `pressing` the pressures that are on; `decays` those that differ from the
    policy's, by base; `blocks` since when no standby is started, by node; `requested_us` the injections asked for in
    the last minute; `wanted` the requests for one instance more or less that have no answer yet; `gap_pos` the last gap
    of the bus that nobody has acknowledged, 0 without one; `versions` what the store holds, by version; `accounts` what
    old versions take, by node; `delays` what failed of their end or repair, by target; `passages` how instances came to
    be ready, by pool and path; `prewarmed_us` when each pool's last prewarm was ordered; `probes` the digest of the set
    that instances of a base are
    compared with, where it is not the shipped one; `measured_pos` the last measurement that answered an open order;
    `given_up` the orders that ended without an outcome, which may still come: the newest of them.
    """

    ledger: str = ""
    pos: int = 0
    now_us: int = 0
    policy: Policy | None = None
    policy_digest: str = ""
    nodes: Mapping[str, Node] = {}
    instances: Mapping[str, Instance] = {}
    blends: Mapping[str, Blend] = {}
    injections: Mapping[str, Injection] = {}
    orders: Mapping[str, OpenOrder] = {}
    given_up: Mapping[str, OpenOrder] = {}
    watches: Mapping[str, Watch] = {}
    rollbacks: Mapping[str, Rollback] = {}
    versions: Mapping[str, Stored] = {}
    accounts: Mapping[str, Account] = {}
    delays: Mapping[str, Delay] = {}
    passages: Mapping[str, Passage] = {}
    prewarmed_us: Mapping[str, int] = {}
    probes: Mapping[str, str] = {}
    measured_pos: int = 0
    freeze: Freeze | None = None
    pools: Mapping[str, tuple[Pool, ...]] = {}
    feeds: Mapping[str, Feed] = {}
    pressures: Mapping[str, Pressure] = {}
    pressing: tuple[str, ...] = ()
    channels: Mapping[str, Selected] = {}
    decays: Mapping[str, int] = {}
    blocks: Mapping[str, int] = {}
    requested_us: tuple[int, ...] = ()
    wanted: Mapping[str, OrderRequested | DrainRequested] = {}
    holds: Mapping[str, Hold] = {}
    turns: Mapping[str, Turn] = {}
    gap_pos: int = 0
    degraded: bool = False


def with_item(items: Mapping[Key, Value], key: Key, value: Value) -> Mapping[Key, Value]:
    """Return a copy with one entry set."""
    return {**items, key: value}


def without(items: Mapping[Key, Value], key: Key) -> Mapping[Key, Value]:
    """Return a copy without one entry; the same mapping when it has none."""
    return {k: v for k, v in items.items() if k != key} if key in items else items


Record = (
    Node
    | Instance
    | Blend
    | Stored
    | Account
    | Delay
    | Passage
    | Injection
    | Rollback
    | OpenOrder
    | Watch
    | Feed
    | Pressure
    | Selected
    | Hold
    | Turn
)

PLACES: Mapping[type, tuple[str, Callable[[Any], str]]] = {  # Any: each function takes the record beside it
    Node: ("nodes", lambda record: record.id),
    Instance: ("instances", lambda record: record.id),
    Blend: ("blends", lambda record: record.name),
    Stored: ("versions", lambda record: record.version),
    Account: ("accounts", lambda record: record.node),
    Delay: ("delays", lambda record: record.target),
    Passage: ("passages", lambda record: passage_key(record.node, record.base, record.path)),
    Injection: ("injections", lambda record: record.id),
    Rollback: ("rollbacks", lambda record: record.id),
    OpenOrder: ("orders", lambda record: record.id),
    Watch: ("watches", lambda record: record.blend),
    Feed: ("feeds", lambda record: record.node),
    Pressure: ("pressures", lambda record: record.id),
    Selected: ("channels", lambda record: record.blend),
    Hold: ("holds", lambda record: record.subject),
    Turn: ("turns", lambda record: record.target),
}
"""Where each record lives in the state, and under which key."""


def passage_key(node: str, base: str, path: Path) -> str:
    """Return the key of how instances of a pool became ready on a path."""
    return f"{node}.{base}/{path}"


def put(state: State, record: Record) -> State:
    """Return the state with one record set under its own key."""
    field, key = PLACES[type(record)]
    return structs.replace(state, **{field: with_item(getattr(state, field), key(record), record)})


def current(state: State) -> Policy:
    """Return the policy in force; rules run only when there is one."""
    assert state.policy is not None  # noqa: S101 # `step` lets no rule but the policy's run without one
    return state.policy


def pools(state: State, base: str) -> tuple[Pool, ...]:
    """Return the pools of a base, in the order of the policy."""
    return tuple(pool for pool in current(state).fleet.pools if pool.spec.served_name == base)


def pool_of(state: State, node: str, base: str) -> Pool | None:
    """Return the pool of a base on a node, None when the policy has none."""
    return next((pool for pool in state.pools.get(node, ()) if pool.spec.served_name == base), None)


def instance_id(pool: Pool, number: int) -> str:
    """Return the name of the `number`-th instance of a pool; those for standby come last."""
    return f"{pool.node}-{pool.spec.served_name}-{number}"


def spares(pool: Pool) -> tuple[str, ...]:
    """Return the names of a pool's spares: what is kept without the weights, numbered after the standbys."""
    first = pool.ready + pool.standbys
    return tuple(instance_id(pool, number) for number in range(first, first + (pool.prewarmed or 0)))


def spare(state: State, instance: Instance) -> bool:
    """Tell whether an instance is a spare of its pool."""
    pool = pool_of(state, instance.node, instance.base)
    return pool is not None and instance.id in spares(pool)


def instances_of(state: State, pool: Pool) -> list[Instance]:
    """Return the instances of a pool that are known, by number; spares come last."""
    names = (instance_id(pool, number) for number in range(pool.ready + pool.standbys))
    return [state.instances[name] for name in (*names, *spares(pool)) if name in state.instances]


def pressing(state: State) -> list[Pressure]:
    """Return the pressures that are on, by id."""
    return [state.pressures[subject] for subject in sorted(state.pressing)]


def decay_of(state: State, base: str) -> int:
    """Return the factor on free members that is in force for a base."""
    return state.decays.get(base, current(state).upcycle.weight_decay_ppm)


def limit_us(state: State, feed: Feed) -> int | None:
    """Return the lag above which the node's windows are stale, None when nothing is ever stale."""
    arbitration = current(state).arbitration
    if feed.transport is Transport.RELIABLE:
        return arbitration.sync_timeout_reliable_us
    return arbitration.sync_timeout_us


def stale(state: State, node: str) -> bool:
    """Tell whether what the windows of a node say is too old to act on; a node that never sent any is not stale."""
    feed = state.feeds.get(node)
    limit = limit_us(state, feed) if feed else None
    if feed is None or limit is None:
        return False
    return feed.lost or feed.lag_us > limit or state.now_us - feed.seen_us > 2 * feed.interval_us + limit


def lost_node(state: State, node: str) -> bool:
    """Tell whether nothing is to be ordered on a node: it has been silent for too long, or has said that it stops."""
    feed = state.feeds.get(node)
    return node not in state.nodes or (feed is not None and feed.lost)


def reachable(state: State, base: str) -> tuple[Pool, ...]:
    """Return the pools of a base whose node is heard, in the order of the policy."""
    return tuple(pool for pool in pools(state, base) if not lost_node(state, pool.node))


def members(state: State, base: str) -> list[Instance]:
    """Return the instances of a base by id."""
    return sorted((i for i in state.instances.values() if i.base == base), key=lambda i: i.id)


def serving(instance: Instance) -> bool:
    """Tell whether an instance answers requests: ready, not parked, and not a standby on its way to sleep."""
    return instance.state is Life.READY and not instance.parked and (instance.summoned or not instance.standby)


def holders(state: State, blend: Blend) -> list[Instance]:
    """Return the serving instances that hold the promoted version of a blend, by id."""
    version = blend.resident.version
    return [i for i in members(state, blend.base) if serving(i) and version in i.versions]


def watch_of(state: State, blend: str) -> Watch:
    """Return what the guard knows of a blend: at first nothing, and that it is due."""
    return state.watches.get(blend) or Watch(blend=blend)


def busy(state: State, instance: str) -> bool:
    """Tell whether an order about the instance is open; one that takes an old version away is in nobody's way."""
    return any(order.instance == instance and order.type != RetireOrdered.TYPE for order in state.orders.values())


def probed(state: State, instance: str) -> bool:
    """Tell whether requests of KITE's own may be among those that an instance counts: proofs, comparisons, a wake."""
    known = state.instances.get(instance)
    recent = known is not None and known.probed_until_us > state.now_us
    return recent or any(instance in order.asks for order in state.orders.values())


def claimed(state: State, target: str) -> bool:
    """Tell whether an order for the target is open: there is at most one."""
    return any(order.target == target for order in state.orders.values())


def lasting(state: State) -> bool:
    """Tell whether the policy says how long old versions last; until it does, nothing of their end is decided."""
    return current(state).upcycle.retention_us is not None


def standing_of(state: State, version: str) -> Standing | None:
    """Return what becomes of a version, None when the store does not hold it."""
    stored = state.versions.get(version)
    return stored.standing if stored else None


def targets_of(state: State, base: str) -> list[Instance]:
    """Return the instances that answer for a base and can be reached, by id."""
    return [i for i in members(state, base) if serving(i) and not lost_node(state, i.node)]


def listing(state: State, version: str) -> list[Instance]:
    """Return the instances that list a version, also those that sleep, by id."""
    return sorted((i for i in state.instances.values() if version in i.versions), key=lambda i: i.id)


def former_of(state: State, blend: str) -> Stored | None:
    """Return the version that a blend meant before the present one, None when the store holds none."""
    found = [v for v in state.versions.values() if v.resident.blend == blend and v.left_us]
    return max(found, key=lambda stored: (stored.left_us, stored.pos), default=None)


def delayed(state: State, target: str) -> State:
    """Double the wait of a target with every failure in a row."""
    former, yoco = state.delays.get(target), current(state).yoco
    failures = former.failures if former else 0
    wait_us = min(yoco.start_backoff_us << min(failures, 32), yoco.start_backoff_max_us)
    return put(state, Delay(target=target, failures=failures + 1, retry_us=state.now_us + wait_us))


def waits(state: State, target: str) -> bool:
    """Tell whether what failed about a target is not to be ordered again yet."""
    delay = state.delays.get(target)
    return delay is not None and delay.retry_us > state.now_us


def same_adapter(member: Member, adapter: AdapterRef) -> bool:
    """Tell whether a member stands for the adapter: by name, or by content."""
    return member.adapter.name == adapter.name or member.adapter.digest == adapter.digest


def backed_off(state: State, instance: Instance) -> Instance:
    """Double the wait with every failure in a row: the same order is not repeated until its cause may have passed."""
    yoco = current(state).yoco
    wait_us = min(yoco.start_backoff_us << min(instance.failures, 32), yoco.start_backoff_max_us)
    return structs.replace(instance, failures=instance.failures + 1, retry_us=state.now_us + wait_us)


def quarantined(state: State, instance: Instance) -> Instance:
    """Take an instance whose effect is missing out of service; since when is what its end is counted from."""
    return structs.replace(instance, state=Life.QUARANTINED, quarantined_us=state.now_us)
