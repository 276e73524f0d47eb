"""Ways to one more ready instance: on which path, how long each is expected to take, and what stands against it."""

from collections.abc import Iterable

from msgspec import Struct

from kite_arbitrator.records import Instance, Node, OpenOrder
from kite_arbitrator.rules.v1.memory import prewarming
from kite_arbitrator.state import State, passage_key, pool_of
from kite_schemas.why import Candidate, Reason
from kite_schemas.yoco import PATHS, EngineOffer, Path, SleepMode, StartOrdered, WakeOrdered
from kite_schemas.yoco import State as Life

RANKS: dict[Path, int] = {Path.HOT: 0, Path.WARM: 1, Path.COLD: 2}
"""Which path is the faster one where no duration is known."""

STARTS = frozenset({Life.STARTING, Life.WARMING})


class Way(Struct, frozen=True, kw_only=True):
    """One instance that could be made ready; `reason` is why it is, or what stands against it."""

    instance: Instance
    path: Path
    expected_us: int | None
    reason: Reason

    def within(self, deadline_us: int) -> bool:
        """Tell whether it can meet a deadline; of what is not known, nobody can say that it cannot."""
        return self.expected_us is None or self.expected_us <= deadline_us

    def candidate(self, chosen: "Way | None", reason: Reason | None = None) -> Candidate:
        """Return it as a decision tells it."""
        return Candidate(id=self.instance.id, chosen=self is chosen, reason=reason or self.reason)


def way(state: State, instance: Instance, reason: Reason) -> Way:
    """Return the way to an instance as it is now: a wake on the path of its sleep, or a start."""
    path = path_of(instance)
    return Way(instance=instance, path=path, expected_us=_expected_us(state, instance, path), reason=reason)


def path_of(instance: Instance) -> Path:
    """Return the path on which an instance would become ready; one that sleeps in no known mode is paused."""
    if instance.state is Life.ASLEEP:
        return PATHS[instance.mode or SleepMode.PAUSED]
    return Path.COLD


def fastest(ways: Iterable[Way]) -> Way | None:
    """Return the way that is expected to take the least time: the lowest name among equals.

    Where one is not known, the paths decide first: hot before warm before cold. What is prewarmed starts before what is
    not.
    """
    found = list(ways)
    known = all(one.expected_us is not None for one in found)

    def order(one: Way) -> tuple[int, int, int, bool, str]:
        rank = RANKS[one.path]
        held = one.instance.state is Life.PREWARMED
        return 0 if known else rank, one.expected_us or 0, rank, not held, one.instance.id

    return min(found, key=order, default=None)


def offer_of(node: Node | None, kind: str) -> EngineOffer | None:
    """Return what a kind of engine can do on a node, None where the node does not tell."""
    return next((offer for offer in node.offers if offer.kind == kind), None) if node else None


def _expected_us(state: State, instance: Instance, path: Path) -> int | None:
    """Return the median of what the pool's last passages on the path took, else what the node's engine offers.

    A node that tells nothing of its engines is of a time before deadlines were held against: nothing is expected then.
    """
    node, pool = state.nodes.get(instance.node), pool_of(state, instance.node, instance.base)
    if node is None or pool is None or not node.offers:
        return None
    passage = state.passages.get(passage_key(instance.node, instance.base, path))
    if passage is not None and passage.took_us:
        return sorted(passage.took_us)[len(passage.took_us) // 2]
    offer, mode = offer_of(node, pool.spec.kind), instance.mode if path is not Path.COLD else None
    told = (one.expected_us for one in offer.paths if (one.path, one.mode) == (path, mode)) if offer else ()
    return next(iter(told), None)


def wakes_in_turn(state: State, node: str) -> bool:
    """Tell whether wakes wait for each other and for starts on a node: where it tells what its engines can do.

    Histories from before that are decided as they were.
    """
    known = state.nodes.get(node)
    return known is not None and bool(known.offers)


def device_busy(state: State, node: str, device: str) -> bool:
    """Tell whether an instance starts or wakes on a device: two at once would mis-size each other's memory.

    A prewarm takes none of it.
    """
    wakes = wakes_in_turn(state, node)
    kinds = {StartOrdered.TYPE, WakeOrdered.TYPE} if wakes else {StartOrdered.TYPE}
    if any(o.type in kinds and (o.node, _device(state, o)) == (node, device) for o in state.orders.values()):
        return True
    passing = STARTS | {Life.WAKING} if wakes else STARTS
    found = (i for i in state.instances.values() if i.device == device and i.node == node and i.state in passing)
    return any(not prewarming(state, instance.id) for instance in found)


def wake_busy(state: State, instance: Instance) -> bool:
    """Tell whether a sleeping instance has to wait for another one on its device."""
    return wakes_in_turn(state, instance.node) and device_busy(state, instance.node, instance.device)


def _device(state: State, order: OpenOrder) -> str | None:
    instance = state.instances.get(order.instance or "")
    return order.device or (instance.device if instance else None)
