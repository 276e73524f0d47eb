"""The desired fleet: start what is missing, put standbys to sleep, load what an instance should hold."""

from collections.abc import Iterator

from kite_arbitrator.rules.draft import Draft, at_least, seen, why, within
from kite_arbitrator.rules.v1.injection import load
from kite_arbitrator.state import Instance, Row, State, busy, current, put, serving
from kite_schemas.policy import Pool
from kite_schemas.upcycle import Resident
from kite_schemas.why import Candidate, Reason
from kite_schemas.yoco import Device, DrainOrdered, SleepOrdered, StartOrdered
from kite_schemas.yoco import State as Life

STARTABLE = frozenset({Life.ABSENT, Life.FAILED})
STARTING = frozenset({Life.STARTING, Life.WARMING})


def start(state: State, row: Row) -> Iterator[Draft]:
    """Start every instance that the policy wants and the node lacks, one at a time per device."""
    for pool in current(state).fleet.pools:
        if pool.node not in state.nodes:
            continue
        for number in range(pool.ready + pool.standbys):
            draft = _start(state, row, pool, number)
            if draft is not None:
                yield draft
                state = _with_planned(state, draft)


def instance_id(pool: Pool, number: int) -> str:
    """Return the name of the `number`-th instance of a pool; those for standby come last."""
    return f"{pool.node}-{pool.spec.served_name}-{number}"


def _start(state: State, row: Row, pool: Pool, number: int) -> Draft | None:
    name = instance_id(pool, number)
    known = state.instances.get(name)
    if busy(state, name) or (known is not None and (known.state not in STARTABLE or known.retry_us > state.now_us)):
        return None
    device = _device(state, pool, name)
    if _starting(state, pool.node, device):
        return None
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


def _device(state: State, pool: Pool, name: str) -> Device:
    """Return the device with the fewest other instances, the first among equals."""
    others = [i.device for i in state.instances.values() if i.node == pool.node and i.id != name]
    return min(state.nodes[pool.node].devices, key=lambda device: (others.count(device.id), device.id))


def _starting(state: State, node: str, device: Device) -> bool:
    """Tell whether something starts on the device: two at once would mis-size each other's memory."""
    ordered = any(order.device == device.id and order.node == node for order in state.orders.values())
    return ordered or any(
        i.device == device.id and i.node == node and i.state in STARTING for i in state.instances.values()
    )


def _cpus(device: Device) -> str:
    return device.id.removeprefix("cpu") if device.kind == "cpu" else ""


def _running(state: State, pool: Pool) -> int:
    names = [instance_id(pool, number) for number in range(pool.ready + pool.standbys)]
    return sum(name in state.instances and state.instances[name].state not in STARTABLE for name in names)


def _with_planned(state: State, draft: Draft) -> State:
    """Count what was just ordered: the rule's own view of the state does not see its decisions."""
    data = draft.data
    assert isinstance(data, StartOrdered)  # noqa: S101 # the only draft that `start` makes
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
    """Drain a standby that has started, and put it to sleep when it is drained."""
    for instance in sorted(state.instances.values(), key=lambda i: i.id):
        if not instance.standby or instance.summoned or _waits(state, instance):
            continue
        if instance.state is Life.READY:
            yield _drain(state, row, instance)
        elif instance.state is Life.DRAINING:
            yield from _sleep(state, row, instance)


def _drain(state: State, row: Row, instance: Instance) -> Draft:
    return Draft(
        f"instance/{instance.id}",
        DrainOrdered(
            node=instance.node,
            target=f"instance/{instance.id}",
            **within(state, current(state).expiry.drain_us),
            instance=instance.id,
            why=why(state, row, Reason.STANDBY_STARTED, inputs=[seen(state, instance)]),
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
    for instance in sorted(state.instances.values(), key=lambda i: i.id):
        if not serving(instance) or _waits(state, instance):
            continue
        missing = _missing(state, instance)
        if missing:
            yield load(state, row, instance, missing[0], None)


def _missing(state: State, instance: Instance) -> list[Resident]:
    wanted = [state.blends[name].resident for name in sorted(state.blends) if state.blends[name].base == instance.base]
    return [resident for resident in wanted if resident.version not in instance.versions]


def _waits(state: State, instance: Instance) -> bool:
    return busy(state, instance.id) or instance.retry_us > state.now_us
