"""What a device has left for one more instance, as far as the node's registration and windows tell."""

from kite_arbitrator.records import Instance
from kite_arbitrator.state import State, current, pool_of
from kite_schemas.model import PPM
from kite_schemas.policy import Pool
from kite_schemas.yoco import Device, PrewarmOrdered
from kite_schemas.yoco import State as Life

STARTABLE = frozenset({Life.ABSENT, Life.FAILED, Life.PREWARMED})
"""An instance in one of these states holds no memory of a device, and may be started."""


def needed_bytes(state: State, node: str, base: str) -> int | None:
    """Return what an instance of a base takes of its device, None when the policy reserves nothing."""
    reserve_bytes = current(state).yoco.reserve_bytes
    if reserve_bytes is None:
        return None
    pool = pool_of(state, node, base)
    return max(reserve_bytes, pool.spec.kv_cache_bytes if pool else 0)


def free_bytes(state: State, node: str, device: Device) -> int:
    """Return what a device has left beside its instances, less the share of it that is fragmented, as last heard."""
    held_bytes = sum(_held_bytes(state, i) for i in state.instances.values() if (i.node, i.device) == (node, device.id))
    feed = state.feeds.get(node)
    fragmented_ppm = feed.fragmentation_ppm if feed and feed.fragmentation_ppm else 0
    return max(0, device.memory_bytes - held_bytes) * (PPM - fragmented_ppm) // PPM


def fits(state: State, pool: Pool, device: Device) -> bool:
    """Tell whether one more instance of the pool has room on a device."""
    needed = needed_bytes(state, pool.node, pool.spec.served_name)
    return needed is None or needed <= free_bytes(state, pool.node, device)


def prewarming(state: State, instance: str) -> bool:
    """Tell whether an instance is being prewarmed: its process starts, and stops short of the weights."""
    return any(o.instance == instance and o.type == PrewarmOrdered.TYPE for o in state.orders.values())


def _held_bytes(state: State, instance: Instance) -> int:
    if instance.state in STARTABLE or prewarming(state, instance.id):
        return 0
    return needed_bytes(state, instance.node, instance.base) or 0
