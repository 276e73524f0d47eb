"""Adapter slots of engines: each version takes one, and one that was unloaded does until the engine drops it."""

from collections.abc import Sequence

from kite_arbitrator.records import Instance, Phase
from kite_arbitrator.rules.draft import at_most
from kite_arbitrator.state import State, lasting, pool_of
from kite_schemas.why import RuleValue

RULE = "pool.max_loras"
BRINGING = frozenset({Phase.BLENDING, Phase.LOADING})


def taken(instance: Instance) -> int:
    """Return how many adapters an engine holds, as far as it has told."""
    return max(instance.slots_taken or 0, len(instance.versions))


def full(state: State, instance: Instance) -> bool:
    """Tell whether an instance has no slot for one version more."""
    pool = pool_of(state, instance.node, instance.base)
    return lasting(state) and pool is not None and taken(instance) >= pool.spec.max_loras


def demand(state: State, instance: Instance, version: str = "") -> RuleValue | None:
    """Hold against its slots what an instance would hold with one version more; None when it lists that one already.

    What is on its way counts: what it lacks of the promoted blends, open injections and open rollbacks.
    """
    pool = pool_of(state, instance.node, instance.base)
    if not lasting(state) or pool is None or version in instance.versions:
        return None
    coming = {blend.resident.version for blend in state.blends.values() if blend.base == instance.base}
    for injection in state.injections.values():
        if injection.phase in BRINGING and instance.id in injection.targets:
            coming.add(injection.resident.version if injection.resident else injection.id)
    coming |= {rollback.version for rollback in state.rollbacks.values() if instance.id in rollback.targets}
    coming.add(version)
    return at_most(RULE, taken(instance) + len(coming.difference(instance.versions)), pool.spec.max_loras)


def arithmetic(state: State, base: str, blend: str) -> str:
    """Say how many slots the blends of a base need: each two, one that is loaded, and one that is not dropped yet."""
    blends = len({known.name for known in state.blends.values() if known.base == base} | {blend})
    return f"2 x {blends} blends + 2 = {2 * blends + 2} would do"


def crowded(state: State, instance: Instance, version: str = "") -> bool:
    """Tell whether an instance has no slot for a version, what is on its way counted."""
    rule = demand(state, instance, version)
    return rule is not None and rule.fired


def overfull(state: State, instances: Sequence[Instance], blend: str, version: str = "") -> str:
    """Say which instances have no slot for a version, and how many there would have to be."""
    rules = ((i, demand(state, i, version)) for i in instances)
    needs = (f"{i.id} would hold {rule.value} adapters in {rule.threshold} slots" for i, rule in rules if rule)
    return f"{'; '.join(needs)}: {arithmetic(state, instances[0].base, blend)}"
