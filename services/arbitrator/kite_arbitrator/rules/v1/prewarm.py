"""The warm pool: spare processes that wait without the weights, one more at a time, and never at inference's cost."""

from collections.abc import Iterator

from kite_arbitrator.records import Row
from kite_arbitrator.rules.draft import Draft, asked, at_least, why, within
from kite_arbitrator.rules.v1.fleet import core_of, device_of, held, obstacle, recent, spec_on, startable
from kite_arbitrator.rules.v1.paths import STARTS
from kite_arbitrator.state import State, busy, current, instances_of, lost_node, serving, spares
from kite_schemas.policy import Pool
from kite_schemas.why import Candidate, Reason
from kite_schemas.yoco import Device, PrewarmOrdered, StartOrdered
from kite_schemas.yoco import State as Life


def keep(state: State, row: Row) -> Iterator[Draft]:
    """Prewarm the first spare that a pool lacks, once an interval, while nothing else of the pool starts.

    One that was used comes back as it was when it is needed no more: until then nothing takes its place.
    """
    if current(state).yoco.prewarm_interval_us is None:
        return
    for pool in asked(state, row):
        if not pool.prewarmed or lost_node(state, pool.node) or _starting(state, pool):
            continue
        missing = next((name for name in spares(pool) if _missing(state, name)), None)
        if missing is not None:
            yield _prewarm(state, row, pool, missing)


def _prewarm(state: State, row: Row, pool: Pool, name: str) -> Draft:
    device = device_of(state, pool, name)
    found = obstacle(state, pool, device, standby=True) or recent(state, pool)
    if found is not None:
        return held(state, row, name, found)
    policy, there = current(state), sum(not _missing(state, each) for each in spares(pool))
    return Draft(
        f"instance/{name}",
        PrewarmOrdered(
            node=pool.node,
            target=f"instance/{name}",
            **within(state, policy.expiry.prewarm_us or policy.expiry.start_us),
            instance=name,
            device=device.id,
            spec=spec_on(pool, device),
            cores=_cores(state, pool.node) if device.kind == "cpu" else "",
            why=why(
                state,
                row,
                Reason.DEMAND,
                rules=[at_least("fleet.prewarmed", there, pool.prewarmed or 0)],
                candidates=[Candidate(id=device.id, chosen=True, reason=Reason.DEMAND)],
            ),
        ),
    )


def _missing(state: State, name: str) -> bool:
    """Tell whether a spare has no process, and may be given one."""
    known = state.instances.get(name)
    if known is None:
        return not busy(state, name)
    return known.state is not Life.PREWARMED and startable(state, known) and not busy(state, name)


def _starting(state: State, pool: Pool) -> bool:
    """Tell whether an instance of the pool starts, or is prewarmed."""
    found = instances_of(state, pool)
    names = {instance.id for instance in found}
    orders = (order for order in state.orders.values() if order.type in (StartOrdered.TYPE, PrewarmOrdered.TYPE))
    return any(instance.state in STARTS for instance in found) or any(order.instance in names for order in orders)


def _cores(state: State, node: str) -> str:
    """Return the cores of a CPU node on which nothing serves, as in `0-2,5`; empty when there is none: then any."""
    serves = {instance.device for instance in state.instances.values() if instance.node == node and serving(instance)}
    return ranges(core_of(device) for device in _cpus(state, node) if device.id not in serves)


def _cpus(state: State, node: str) -> list[Device]:
    return [device for device in state.nodes[node].devices if device.kind == "cpu"]


def ranges(cores: Iterator[str]) -> str:
    """Return numbers of cores in the form of the kernel's lists.

    >>> ranges(iter(("0", "1", "2", "5")))
    '0-2,5'
    """
    spans: list[tuple[int, int]] = []
    for core in sorted(int(core) for core in cores if core.isdigit()):
        if spans and spans[-1][1] == core - 1:
            spans[-1] = spans[-1][0], core
        else:
            spans.append((core, core))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
