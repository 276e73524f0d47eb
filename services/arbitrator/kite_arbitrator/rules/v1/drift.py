"""What instances should hold, told to their node's upcycle, which looks whether they do; what is damaged is made again.

What was found is taken as it is (folds.versions): `fleet.repair` loads what is missing, `retention.retire` takes away
what is too much.
"""

from collections.abc import Iterator, Mapping

from kite_arbitrator.folds.versions import restorable
from kite_arbitrator.records import Instance, Row, Standing, Stored, Told
from kite_arbitrator.rules.draft import Draft, age, seen, why, within
from kite_arbitrator.rules.v1.closing import base_of
from kite_arbitrator.state import State, claimed, current, lost_node, reachable, waits
from kite_schemas.ledger import Tick
from kite_schemas.upcycle import RebuildOrdered, Resident, ResidentsSet
from kite_schemas.why import Reason
from kite_schemas.yoco import State as Life

LASTING = frozenset({Standing.PROMOTED, Standing.RETAINED})
"""What is made again when its files are gone; anything else only when a blend returns to it."""


def tell(state: State, row: Row) -> Iterator[Draft]:
    """Tell what a ready instance should hold, when that has changed and nothing is being done about the instance."""
    interval_us = current(state).upcycle.drift_interval_us
    if interval_us is None or not isinstance(row.data, Tick):
        return
    engaged, meant = {order.instance for order in state.orders.values()}, _meant(state)
    for instance in state.instances.values():
        if instance.state is not Life.READY or instance.id in engaged or not instance.endpoint:
            continue
        versions = _expected(state, instance, meant.get(instance.base, {}))
        former = instance.told.id if instance.told else ""
        said = Told(id=former, endpoint=instance.endpoint, versions=versions, interval_us=interval_us)
        if said != instance.told and not lost_node(state, instance.node):
            residents = {**{name: v.resident for name, v in state.versions.items()}, **meant.get(instance.base, {})}
            yield _told(state, row, instance, tuple(residents[name] for name in versions), interval_us)


def _meant(state: State) -> dict[str, dict[str, Resident]]:
    """Return what the blends of each base mean, by version."""
    found = dict[str, dict[str, Resident]]()
    for blend in state.blends.values():
        found.setdefault(blend.base, {})[blend.resident.version] = blend.resident
    return found


def _expected(state: State, instance: Instance, meant: Mapping[str, Resident]) -> tuple[str, ...]:
    """Return what an instance should hold: what blends mean, and what else of the store it lists."""
    listed = (name for name in instance.versions if name in state.versions)
    return tuple(sorted({*listed, *meant}))


def _told(state: State, row: Row, instance: Instance, residents: tuple[Resident, ...], interval_us: int) -> Draft:
    return Draft(
        f"instance/{instance.id}",
        ResidentsSet(
            node=instance.node,
            instance=instance.id,
            endpoint=instance.endpoint,
            base=instance.base,
            residents=residents,
            interval_us=interval_us,
            why=why(state, row, Reason.RESIDENTS_CHANGED, inputs=[seen(state, instance)]),
        ),
    )


def rebuild(state: State, row: Row) -> Iterator[Draft]:
    """Have what is damaged made again: the same members give the same bytes."""
    for stored in state.versions.values():
        target = rebuild_target(stored)
        due = stored.damaged and restorable(state, stored) and _kept(state, stored)
        if due and not claimed(state, target) and not waits(state, target):
            yield from _rebuilt(state, row, stored, target)


def rebuild_target(stored: Stored) -> str:
    """Return the target of an order to make a version again."""
    return f"rebuild/{stored.version}"


def _kept(state: State, stored: Stored) -> bool:
    """Tell whether a version is meant, may be returned to within one load, or is being returned to."""
    returned = any(r.version == stored.version and not r.failed for r in state.rollbacks.values())
    return returned or stored.standing in LASTING


def _rebuilt(state: State, row: Row, stored: Stored, target: str) -> Iterator[Draft]:
    for pool in reachable(state, stored.base)[:1]:
        order = RebuildOrdered(
            node=pool.node,
            target=target,
            **within(state, current(state).expiry.blend_us),
            request=stored.request,
            blend=stored.resident.blend,
            version=stored.version,
            base=base_of(pool),
            members=stored.members,
            base_weight_ppm=stored.base_weight_ppm,
            max_lora_rank=stored.max_lora_rank or pool.spec.max_lora_rank,
            residual_max_ppm=stored.residual_max_ppm,
            why=why(
                state,
                row,
                Reason.DAMAGED,
                inputs=[age(state, f"version/{stored.version}", stored.pos, stored.since_us)],
            ),
        )
        yield Draft(f"version/{stored.version}", order)
