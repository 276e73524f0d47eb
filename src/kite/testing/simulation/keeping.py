"""What must hold of versions in a history: what anything refers to is kept."""

from collections.abc import Iterator

from kite.testing.simulation.record import Row, Rows, closes, ends, named
from kite_schemas.upcycle import (
    BlendLoaded,
    BlendPromoted,
    BlendUnloaded,
    DeleteOrdered,
    DriftObserved,
    InjectionAdmitted,
    InjectionClosed,
    LoadOrdered,
    RebuildOrdered,
    RetireOrdered,
    RollbackClosed,
    RollbackOrdered,
    RollbackRequested,
    RolledBack,
)
from kite_schemas.why import Order
from kite_schemas.yoco import (
    InstanceReady,
    NodeRegistered,
)


def kept(rows: Rows) -> Iterator[str]:
    """What a blend means, or an instance was last known to hold, is not deleted."""
    meant: dict[str, str] = {}
    holding: dict[str, set[str]] = {}
    for row in rows:
        match row.data:
            case BlendPromoted(blend=blend, resident=resident):
                meant[blend] = resident.version
            case BlendLoaded(instance=name, version=version):
                holding.setdefault(name, set()).add(version)
            case BlendUnloaded(instance=name, version=version) | RolledBack(instance=name, version=version):
                holding.get(name, set[str]()).discard(version)
            case InstanceReady(instance=name, versions=versions):
                holding[name] = set(versions)
            case NodeRegistered(node=node, instances=found):
                there = {one.instance: set(one.versions) for one in found}
                holding = {name: held for name, held in holding.items() if not name.startswith(f"{node}-")} | there
            case DriftObserved(instance=name, found=found):
                holding[name] = holding.get(name, set[str]()) & set(found)
            case DeleteOrdered(version=version):
                if version in meant.values():
                    yield f"{named(row)} deletes what a blend means"
                yield from (f"{named(row)}: {name} holds it" for name, held in holding.items() if version in held)
            case _:
                holding.pop(ends(row.data), None)


def apart(rows: Rows) -> Iterator[str]:
    """Nothing is deleted that is named by what is under way, nor while an injection is on its way, and none begins."""
    named_by, admitted, opened = dict[str, str](), dict[str, Row](), dict[str, Order]()
    for row in rows:
        opened.pop(closes(row.data), None)
        match row.data:
            case RollbackRequested(version=str(version)):
                named_by[row.id] = version
            case InjectionAdmitted(request=request):
                yield from (f"{named(row)} comes during an open {o.TYPE}" for o in opened.values() if _deletes(o))
                admitted[request] = row
            case InjectionClosed(request=request) | RollbackClosed(request=request):
                admitted.pop(request, None)
                named_by.pop(request, None)
            case DeleteOrdered(version=version):
                yield from (f"{named(row)} comes before the end of {named(begun)}" for begun in admitted.values())
                yield from (f"{named(row)}: {who} asks for it" for who, name in named_by.items() if name == version)
                yield from (f"{named(row)}: an open {o.TYPE} names it" for o in opened.values() if _about(o) == version)
            case _:
                pass
        if isinstance(row.data, Order):
            opened[row.id] = row.data


def _deletes(order: Order) -> bool:
    return isinstance(order, DeleteOrdered)


def _about(order: Order) -> str:
    """Return the version that an order is about."""
    if isinstance(order, LoadOrdered):
        return order.resident.version
    known = isinstance(order, RetireOrdered | RollbackOrdered | RebuildOrdered | DeleteOrdered)
    return order.version if known else ""
