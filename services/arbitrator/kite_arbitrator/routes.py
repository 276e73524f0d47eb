"""Where requests for a served name go: what the channels mean for instances. Pure.

Nothing here is decided: routes follow from promotions, channels and what the instances report, so they have no event
of their own. The ledger keeps them as a table, for those who send requests and do not fold rows.
"""

from collections.abc import Iterable, Iterator

from kite.ledger import Route
from kite_arbitrator.records import Blend, Instance
from kite_arbitrator.state import State, holders, lost_node, serving
from kite_schemas.arbitration import Channel


def routes(state: State) -> tuple[Route, ...]:
    """Return every route, by name and instance; nothing goes to a node that is lost.

    A blend that has the name of a base has no routes: who asks for the base is not to be given something else.
    """
    bases = {instance.base for instance in state.instances.values()}
    reachable = (instance for instance in state.instances.values() if _reachable(state, instance))
    found = [_route(i.base, i.base, i, Channel.UPCYCLE, i.pos) for i in reachable]
    for blend in state.blends.values():
        if blend.name not in bases:
            found += _blend_routes(state, blend)
    return tuple(sorted(found, key=lambda route: (route.name, route.instance)))


def rerouted(former: State, state: State) -> bool:
    """Tell whether the routes of two states may differ. Cheap: it compares no records, and looks at no window."""
    return (
        former.instances is not state.instances
        or former.blends is not state.blends
        or former.channels is not state.channels
        or list(_lost(former)) != list(_lost(state))
    )


def _blend_routes(state: State, blend: Blend) -> Iterator[Route]:
    """On the yoco channel the woken standbys answer, and until one is ready those that did before."""
    selected = state.channels.get(blend.name)
    channel = selected.channel if selected else Channel.UPCYCLE
    holding = [instance for instance in holders(state, blend) if _reachable(state, instance)]
    woken = [instance for instance in holding if instance.standby] if channel is Channel.YOCO else []
    pos = max(blend.pos, selected.pos if selected else 0)
    for instance in woken or holding:
        yield _route(blend.name, blend.resident.version, instance, channel, pos)


def _route(name: str, version: str, instance: Instance, channel: Channel, pos: int) -> Route:
    return Route(name, version, instance.id, instance.endpoint, channel.value, pos)


def _reachable(state: State, instance: Instance) -> bool:
    return serving(instance) and bool(instance.endpoint) and not lost_node(state, instance.node)


def _lost(state: State) -> Iterable[str]:
    return (node for node, feed in state.feeds.items() if feed.lost)
