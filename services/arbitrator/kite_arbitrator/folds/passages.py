"""How instances come to be ready: from the order to the report, in ledger time, by pool and path."""

from msgspec import structs

from kite_arbitrator.records import Call, Instance, Passage
from kite_arbitrator.state import State, current, passage_key, put
from kite_schemas.yoco import InstanceReady, Path, StartOrdered, WakeOrdered

TOOK_MAX = 20
"""So many durations of a pool's path are remembered, the newest."""


def called(state: State, data: WakeOrdered | StartOrdered) -> Call:
    """Return by when an instance was promised to be ready: the order itself may leave it more time.

    A start that answers no need has no deadline, which is 0.
    """
    path = data.path if isinstance(data, WakeOrdered) else Path.COLD
    return Call(at_us=state.now_us, path=path, deadline_us=_promised_us(state, data))


def _promised_us(state: State, data: WakeOrdered | StartOrdered) -> int:
    if data.deadline_us is None:
        return 0
    request = state.wanted.get(data.request or "")
    asked_us = getattr(request, "deadline_us", None)
    return current(state).yoco.cold_start_deadline_us if asked_us is None else asked_us


def arrived(state: State, instance: Instance, data: InstanceReady) -> State:
    """Count an instance that is ready, if it was ordered: in time, or late."""
    if instance.called is None:
        return state
    took_us, deadline_us = state.now_us - instance.called.at_us, instance.called.deadline_us
    known = _passage(state, instance, data.path)
    met = bool(deadline_us) and took_us <= deadline_us
    return put(
        state,
        structs.replace(
            known,
            ready=known.ready + 1,
            met=known.met + met,
            missed=known.missed + (bool(deadline_us) and not met),
            took_us=(*known.took_us, took_us)[-TOOK_MAX:],
        ),
    )


def failed(state: State, name: str) -> State:
    """An instance will not be ready by its order: what had a deadline has missed it. It is called no more."""
    instance = state.instances.get(name)
    if instance is None or instance.called is None:
        return state
    state = put(state, structs.replace(instance, called=None))
    if not instance.called.deadline_us:
        return state
    known = _passage(state, instance, instance.called.path)
    return put(state, structs.replace(known, missed=known.missed + 1))


def _passage(state: State, instance: Instance, path: Path) -> Passage:
    known = state.passages.get(passage_key(instance.node, instance.base, path))
    return known or Passage(node=instance.node, base=instance.base, path=path)
