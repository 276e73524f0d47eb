"""The desired fleet: start what is missing, put standbys to sleep, load what an instance should hold, and only that."""

from collections.abc import Iterator

from kite_arbitrator.rules.draft import Draft, asked, at_least, at_most, seen, why, within
from kite_arbitrator.rules.v1.injection import load, rollback
from kite_arbitrator.rules.v1.memory import STARTABLE, fits, free_bytes, needed_bytes
from kite_arbitrator.state import (
    Instance,
    Row,
    State,
    busy,
    current,
    instance_id,
    instances_of,
    lost_node,
    put,
    serving,
    stale,
)
from kite_schemas.arbitration import Held
from kite_schemas.model import Data
from kite_schemas.policy import Pool
from kite_schemas.upcycle import Resident
from kite_schemas.why import Candidate, Reason, RuleValue, Why
from kite_schemas.yoco import Device, DrainOrdered, SleepOrdered, StartOrdered
from kite_schemas.yoco import State as Life

RESTLESS = frozenset({Life.READY, Life.DRAINING})
"""Where a standby that nobody needs does not stay."""

STARTING = frozenset({Life.STARTING, Life.WARMING})


def start(state: State, row: Row) -> Iterator[Draft]:
    """Start every instance that the policy wants and the node lacks, one at a time per device."""
    for pool in asked(state, row):
        if lost_node(state, pool.node):
            continue
        for number in range(pool.ready + pool.standbys):
            draft = _start(state, row, pool, number)
            if draft is not None:
                yield draft
                state = _with_planned(state, draft.data)


def _start(state: State, row: Row, pool: Pool, number: int) -> Draft | None:
    name = instance_id(pool, number)
    known = state.instances.get(name)
    if known is not None and (known.state not in STARTABLE or known.retry_us > state.now_us):
        return None
    if busy(state, name):
        return None
    device = _device(state, pool, name)
    if _starting(state, pool.node, device):
        return None
    obstacle = _obstacle(state, pool, device, standby=number >= pool.ready)
    if obstacle is not None:
        reason, detail, rules = obstacle
        return Draft(f"instance/{name}", Held(detail=detail, why=why(state, row, reason, rules=rules)))
    return Draft(
        f"instance/{name}",
        StartOrdered(
            node=pool.node,
            target=f"instance/{name}",
            **within(state, current(state).expiry.start_us),
            instance=name,
            device=device.id,
            standby=number >= pool.ready,
            spec=pool.spec.model_copy(update={"base_path": pool.base_path, "cpus": _cpus(device)}),
            why=why(
                state,
                row,
                Reason.INSTANCE_MISSING,
                rules=[at_least("fleet.instances", _running(state, pool), pool.ready + pool.standbys)],
                candidates=[Candidate(id=device.id, chosen=True, reason=Reason.INSTANCE_MISSING)],
            ),
        ),
    )


def _obstacle(
    state: State, pool: Pool, device: Device, *, standby: bool
) -> tuple[Reason, str, tuple[RuleValue, ...]] | None:
    """Return why nothing is started on a device now, None when something can be."""
    if stale(state, pool.node):
        return Reason.STALE, f"the windows of {pool.node} are too old to act on", ()
    if standby and pool.node in state.blocks:
        return Reason.PREWARM_BLOCKED, f"{pool.node} sheds: no standby is started there", ()
    needed = needed_bytes(state, pool.node, pool.spec.served_name)
    if needed is None:
        return None
    free = free_bytes(state, pool.node, device)
    rule = at_most("yoco.reserve_bytes", needed, free)
    detail = f"{device.id} has {free} bytes left in one piece, an instance takes {needed}"
    return (Reason.MEMORY, detail, (rule,)) if rule.fired else None


def _device(state: State, pool: Pool, name: str) -> Device:
    """Return the device with the fewest other instances among those with room, the first among equals."""
    others = [i.device for i in state.instances.values() if i.node == pool.node and i.id != name]

    def order(device: Device) -> tuple[bool, int, str]:
        return not fits(state, pool, device), others.count(device.id), device.id

    return min(state.nodes[pool.node].devices, key=order)


def _starting(state: State, node: str, device: Device) -> bool:
    """Tell whether something starts on the device: two at once would mis-size each other's memory."""
    ordered = any(order.device == device.id and order.node == node for order in state.orders.values())
    return ordered or any(
        i.device == device.id and i.node == node and i.state in STARTING for i in state.instances.values()
    )


def _cpus(device: Device) -> str:
    return device.id.removeprefix("cpu") if device.kind == "cpu" else ""


def _running(state: State, pool: Pool) -> int:
    return sum(instance.state not in STARTABLE for instance in instances_of(state, pool))


def _with_planned(state: State, data: Data) -> State:
    """Count what was just ordered: the rule's own view of the state does not see its decisions."""
    if not isinstance(data, StartOrdered):
        return state
    planned = Instance(
        id=data.instance,
        node=data.node,
        base=data.spec.served_name,
        device=data.device,
        standby=data.standby,
        state=Life.STARTING,
    )
    return put(state, planned)


def settle(state: State, row: Row) -> Iterator[Draft]:
    """Drain a standby that has started, and put it to sleep when it is drained; neither after a gap in the bus."""
    if state.degraded:
        return
    for instance in _instances(state, row):
        resting = instance.standby and not instance.summoned and instance.state in RESTLESS
        if not resting or _waits(state, instance):
            continue
        if instance.state is Life.READY:
            account = why(state, row, Reason.STANDBY_STARTED, inputs=[seen(state, instance)])
            yield drain_order(state, instance, account)
        else:
            yield from _sleep(state, row, instance)


def drain_order(state: State, instance: Instance, account: Why) -> Draft:
    """Return the order to give an instance no new request and wait for those it has."""
    return Draft(
        f"instance/{instance.id}",
        DrainOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, current(state).expiry.drain_us),
            instance=instance.id,
            why=account,
        ),
    )


def _sleep(state: State, row: Row, instance: Instance) -> Iterator[Draft]:
    node = state.nodes.get(instance.node)
    modes = {pool.standby_mode for pool in current(state).fleet.pools if pool.node == instance.node}
    for mode in sorted(modes & set(node.sleep_modes if node else ())):
        yield Draft(
            f"instance/{instance.id}",
            SleepOrdered(
                node=instance.node,
                target=f"instance/{instance.id}",
                **within(state, current(state).expiry.sleep_us),
                instance=instance.id,
                mode=mode,
                why=why(state, row, Reason.STANDBY_DRAINED, inputs=[seen(state, instance)]),
            ),
        )
        return


def repair(state: State, row: Row) -> Iterator[Draft]:
    """Load every promoted version that a serving instance lacks, one at a time per instance."""
    for instance in _instances(state, row):
        missing = _missing(state, instance) if serving(instance) else []
        if missing and not _waits(state, instance):
            yield load(state, row, instance, missing[0], None)


def withdraw(state: State, row: Row) -> Iterator[Draft]:
    """Take out what came by a load that was given up, and that no blend means; nothing after a gap in the bus."""
    if state.degraded:
        return
    for instance in _instances(state, row):
        strays = [mark for mark in instance.strays if mark[0] in instance.versions]
        if strays and instance.state is Life.READY and not _waits(state, instance):
            version, request = strays[0]
            account = why(state, row, Reason.EXPIRED, inputs=[seen(state, instance)])
            yield rollback(state, instance, version, request, account)


def _missing(state: State, instance: Instance) -> list[Resident]:
    lacking = (
        b for b in state.blends.values() if b.base == instance.base and b.resident.version not in instance.versions
    )
    return [blend.resident for blend in sorted(lacking, key=lambda blend: blend.name)]


def _instances(state: State, row: Row) -> Iterator[Instance]:
    """Yield the instances of the pools that the row is about and that can be reached, by pool and number."""
    for pool in asked(state, row):
        if not lost_node(state, pool.node):
            yield from instances_of(state, pool)


def _waits(state: State, instance: Instance) -> bool:
    return busy(state, instance.id) or instance.retry_us > state.now_us
