"""The end of a version: taken from every instance when its time is over, and only what is nowhere is deleted.

A version is retained for a while after another took its place; one is, no more, of each blend. What was never promoted
is unwanted. Nothing is taken away or deleted after a gap in the bus: what is not known to be unused stays.
"""

from collections.abc import Iterable, Iterator

from kite_arbitrator.folds.accounts import counted, limit_bytes, mean_bytes
from kite_arbitrator.folds.injections import promoted_version
from kite_arbitrator.folds.versions import LOOSE, retire_target
from kite_arbitrator.records import Account, Instance, Row, Standing, Stored
from kite_arbitrator.rules.draft import Draft, age, at_most, reached, seen, why, within
from kite_arbitrator.rules.v1.admission import admissible
from kite_arbitrator.rules.v1.fleet import concerned
from kite_arbitrator.state import State, current, lasting, listing, lost_node, reachable, waits
from kite_schemas.ledger import Tick
from kite_schemas.upcycle import DeleteOrdered, LoadOrdered, RetireOrdered
from kite_schemas.why import Fact, Reason, RuleValue
from kite_schemas.yoco import State as Life

ANSWERING = frozenset({Life.READY, Life.ASLEEP})
"""Where an engine can be told to unload: a paused one answers too."""

PATIENCE_US = 60_000_000
"""For an end of a version whose policy names no time for it."""

Ending = tuple[Reason, tuple[RuleValue, ...]]


def retire(state: State, row: Row) -> Iterator[Draft]:
    """Take from each instance what it lists and nobody wants there."""
    if not lasting(state) or state.degraded:
        return
    for instance in _concerned(state, row):
        for name in (*instance.versions, *instance.drifted):
            ending = _ending(state, name)
            if ending is not None and not lost_node(state, instance.node) and _free(state, instance, name):
                yield _retired(state, row, instance, name, ending)


def _concerned(state: State, row: Row) -> Iterable[Instance]:
    """Return the instances that a fact may have changed something for, all of them at a tick: it is when time is up."""
    match row.data:
        case Tick():
            return state.instances.values()
        case Fact():
            return (instance for _, instance in concerned(state, row))
        case _:
            return ()


def _ending(state: State, name: str) -> Ending | None:
    """Return why a version is to leave an instance, None while it is wanted."""
    stored = state.versions.get(name)
    if stored is None:
        return None if promoted_version(state, name) else (Reason.DRIFT, ())
    match stored.standing:
        case Standing.RETAINED | Standing.RETIRING:
            rule = _retained(state, stored)
            if rule.fired:
                return Reason.RETENTION_OVER, (rule,)
            return (Reason.SUPERSEDED, ()) if stored.standing is Standing.RETIRING else None
        case Standing.UNWANTED:
            return Reason.UNWANTED, ()
        case Standing.RELEASED:
            return Reason.DRIFT, ()
        case _:
            return None


def _retained(state: State, stored: Stored) -> RuleValue:
    retention_us = current(state).upcycle.retention_us or 0
    return reached("upcycle.retention_us", state.now_us - stored.left_us, retention_us)


def _free(state: State, instance: Instance, name: str) -> bool:
    """Tell whether nothing is under way with the instance, or with this version in it."""
    if instance.state not in ANSWERING or not instance.endpoint or _returning(state, name):
        return False
    if any(stray[0] == name for stray in instance.strays):
        return False  # it is rolled back
    target, life = retire_target(name, instance.id), f"instance/{instance.id}"
    about = (o for o in state.orders.values() if o.instance == instance.id)
    return not waits(state, target) and not any(o.version == name or o.target in (target, life) for o in about)


def _returning(state: State, name: str) -> bool:
    """Tell whether an open rollback or injection is about a version."""
    brought = (i.resident.version for i in state.injections.values() if i.resident is not None)
    return name in brought or any(name in (r.version, r.former) for r in state.rollbacks.values())


def _retired(state: State, row: Row, instance: Instance, name: str, ending: Ending) -> Draft:
    stored, (reason, rules) = state.versions.get(name), ending
    return Draft(
        f"instance/{instance.id}",
        RetireOrdered(
            node=instance.node,
            target=retire_target(name, instance.id),
            **within(state, current(state).expiry.retire_us or PATIENCE_US),
            blend=stored.resident.blend if stored else instance.base,
            instance=instance.id,
            endpoint=instance.endpoint,
            version=name,
            slot=dict(instance.slots).get(name),
            why=why(state, row, reason, rules=rules, inputs=[seen(state, instance)]),
        ),
    )


def delete(state: State, row: Row) -> Iterator[Draft]:
    """Delete what was never promoted, then what old versions take too much: oldest first, until they are below.

    No deletion while an injection is on its way from its admission to its end; it would wait for the deletion.
    """
    if not lasting(state) or state.degraded or not isinstance(row.data, Tick):
        return
    if any(admissible(state, injection) for injection in state.injections.values()):
        return
    gone = set[str]()
    for stored in sorted(state.versions.values(), key=lambda v: v.pos):
        if stored.standing is Standing.UNWANTED and _alone(state, stored):
            yield from _deletions(state, row, stored, gone, (Reason.UNWANTED, ()))
    for node in sorted(state.accounts):
        yield from _cleaned(state, row, state.accounts[node], gone)


def _alone(state: State, stored: Stored) -> bool:
    """Tell whether no version that may still be returned to has the same files."""
    return not any(other.standing is Standing.RELEASED for other in _sharers(state, stored))


def _cleaned(state: State, row: Row, account: Account, gone: set[str]) -> Iterator[Draft]:
    """Delete the oldest ones while a node's old versions take more than they may, on average and now."""
    limit = limit_bytes(state, account.node)
    if limit is None or account.retained_bytes <= limit:
        return
    mean, left = mean_bytes(account, state.now_us), account.retained_bytes
    bases = {pool.spec.served_name for pool in state.pools.get(account.node, ())}
    old = [v for v in state.versions.values() if v.standing is Standing.RELEASED and v.base in bases]
    left -= sum(counted(v) for v in old if v.version in gone)
    for stored in sorted(old, key=lambda v: (v.left_us, v.pos)):
        rules = (
            at_most("upcycle.retained_mean_bytes", mean, limit),
            at_most("upcycle.retained_bytes", left, limit),
        )
        if not all(rule.fired for rule in rules):
            return
        before = set(gone)
        yield from _deletions(state, row, stored, gone, (Reason.RETENTION_CROSSED, rules))
        left -= sum(counted(v) for v in old if v.version in gone - before)


def _deletions(state: State, row: Row, stored: Stored, gone: set[str], ending: Ending) -> Iterator[Draft]:
    """Delete a version, with those that have the same files; none of them when one of them is needed."""
    shared = [stored, *_sharers(state, stored)]
    node = _node(state, stored)
    if node is None or any(_needed(state, each) for each in shared):
        return
    for each in shared:
        target = f"delete/{each.version}"
        if each.version in gone or each.standing is Standing.DELETING or waits(state, target):
            continue
        gone.add(each.version)
        yield _deleted(state, row, each, node, ending)


def _deleted(state: State, row: Row, stored: Stored, node: str, ending: Ending) -> Draft:
    reason, rules = ending
    seen_print = stored.resident.effect_print
    others = (v.resident.effect_print for v in state.versions.values() if v.version != stored.version)
    shared = seen_print is not None and any(p is not None and p.path == seen_print.path for p in others)
    stood = age(state, f"version/{stored.version}", stored.pos, stored.since_us)
    return Draft(
        f"version/{stored.version}",
        DeleteOrdered(
            node=node,
            target=f"delete/{stored.version}",
            **within(state, current(state).expiry.delete_us or PATIENCE_US),
            blend=stored.resident.blend,
            version=stored.version,
            digest=stored.digest,
            effect_print=None if shared else seen_print,
            why=why(state, row, reason, rules=rules, inputs=[stood]),
        ),
    )


def _sharers(state: State, stored: Stored) -> list[Stored]:
    return [v for v in state.versions.values() if v.digest == stored.digest and v.version != stored.version]


def _needed(state: State, stored: Stored) -> bool:
    """Tell whether anything refers to a version: its standing, an instance, an order, an injection or a rollback."""
    name = stored.version
    if stored.standing not in LOOSE or listing(state, name) or _returning(state, name):
        return True
    ordered = (o for o in state.orders.values() if o.version == name and o.target != f"delete/{name}")
    lying = (i for i in state.instances.values() if name in i.drifted or any(s[0] == name for s in i.strays))
    return any(True for _ in (*ordered, *lying)) or _arriving(state, name)


def _arriving(state: State, name: str) -> bool:
    """Tell whether a load that was given up may still have been begun: its worker ends it when its time is over too."""
    grace_us = current(state).expiry.load_us
    given_up = (o for o in state.given_up.values() if o.version == name)
    return any(o.type == LoadOrdered.TYPE and o.expires_us + grace_us > state.now_us for o in given_up)


def _node(state: State, stored: Stored) -> str | None:
    """Return the node that deletes: one that serves the base, else any that is heard, for the store is one for all."""
    heard = [pool.node for pool in reachable(state, stored.base)]
    heard += [node for node in sorted(state.pools) if not lost_node(state, node)]
    return next(iter(heard), None)
