"""The arbitrator's state: frozen records in dictionaries that are copied on change; integers and names only."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct, structs

from kite_schemas.model import Data
from kite_schemas.policy import Policy, Pool
from kite_schemas.upcycle import AdapterRef, Ending, InjectionRequested, Member, Resident
from kite_schemas.why import Reason
from kite_schemas.yoco import Device, SleepMode
from kite_schemas.yoco import State as Life

Key = TypeVar("Key")
Value = TypeVar("Value")


class Row(Struct, frozen=True, kw_only=True):
    """One ledger row as the core sees it; `data` is None when this version does not know the type."""

    pos: int
    id: str
    type: str
    subject: str
    ledger_us: int
    data: Data | None


class Phase(StrEnum):
    """Where an injection is."""

    REQUESTED = "requested"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    DEFERRED = "deferred"
    REFUSED = "refused"
    BLENDING = "blending"
    LOADING = "loading"
    FAILING = "failing"


class Node(Struct, frozen=True, kw_only=True):
    """A node as it last registered."""

    id: str
    boot: str
    devices: tuple[Device, ...]
    sleep_modes: tuple[SleepMode, ...]
    pos: int


class Instance(Struct, frozen=True, kw_only=True):
    """An instance as last reported; `pos` and `seen_us` are those of that report."""

    id: str
    node: str
    base: str
    device: str
    standby: bool
    state: Life
    endpoint: str = ""
    versions: tuple[str, ...] = ()
    noise_micronats: int = 0
    summoned: bool = False  # a standby that was woken stays awake
    failures: int = 0
    retry_us: int = 0
    pos: int = 0
    seen_us: int = 0


class Blend(Struct, frozen=True, kw_only=True):
    """What a blend's name means now."""

    name: str
    base: str
    resident: Resident
    members: tuple[Member, ...]
    base_weight_ppm: int
    pos: int


class Injection(Struct, frozen=True, kw_only=True):
    """One open injection; it leaves the state when it is closed."""

    id: str
    pos: int
    request: InjectionRequested
    phase: Phase = Phase.REQUESTED
    share_ppm: int = 0
    fact_pos: int = 0
    fact_us: int = 0
    members: tuple[Member, ...] = ()
    base_weight_ppm: int = 0
    targets: tuple[str, ...] = ()
    resident: Resident | None = None
    touched: tuple[str, ...] = ()  # instances that may hold the version
    proven: tuple[str, ...] = ()
    ending: Ending = Ending.ROLLED_BACK
    reason: Reason = Reason.LOAD_FAILED


class Watch(Struct, frozen=True, kw_only=True):
    """What the guard knows of one blend: its last verdict, and when the next one is due."""

    blend: str
    due_us: int = 0
    ordered_us: int = 0
    kl_micronats: int = 0
    verdict_us: int = 0
    pos: int = 0
    lonely: bool = False  # said once that there is nobody to compare with


class Freeze(Struct, frozen=True, kw_only=True):
    """Admissions are stopped: since when, until when at least, for which blend, how often renewed."""

    blend: str
    since_us: int
    until_us: int
    severity: int


class OpenOrder(Struct, frozen=True, kw_only=True):
    """An order without an outcome yet."""

    id: str
    type: str
    target: str
    node: str
    instance: str | None
    device: str | None
    request: str | None
    issued_us: int
    expires_us: int


class State(Struct, frozen=True, kw_only=True):
    """Everything that decisions read."""

    ledger: str = ""
    pos: int = 0
    now_us: int = 0
    policy: Policy | None = None
    policy_digest: str = ""
    nodes: Mapping[str, Node] = {}
    instances: Mapping[str, Instance] = {}
    blends: Mapping[str, Blend] = {}
    injections: Mapping[str, Injection] = {}
    orders: Mapping[str, OpenOrder] = {}
    watches: Mapping[str, Watch] = {}
    freeze: Freeze | None = None


def with_item(items: Mapping[Key, Value], key: Key, value: Value) -> Mapping[Key, Value]:
    """Return a copy with one entry set."""
    return {**items, key: value}


def without(items: Mapping[Key, Value], key: Key) -> Mapping[Key, Value]:
    """Return a copy without one entry; the same mapping when it has none."""
    return {k: v for k, v in items.items() if k != key} if key in items else items


def put(state: State, record: Node | Instance | Blend | Injection | OpenOrder | Watch) -> State:
    """Return the state with one record set under its own id."""
    match record:
        case Node():
            return structs.replace(state, nodes=with_item(state.nodes, record.id, record))
        case Instance():
            return structs.replace(state, instances=with_item(state.instances, record.id, record))
        case Blend():
            return structs.replace(state, blends=with_item(state.blends, record.name, record))
        case Injection():
            return structs.replace(state, injections=with_item(state.injections, record.id, record))
        case Watch():
            return structs.replace(state, watches=with_item(state.watches, record.blend, record))
        case OpenOrder():
            return structs.replace(state, orders=with_item(state.orders, record.id, record))


def current(state: State) -> Policy:
    """Return the policy in force; rules run only when there is one."""
    assert state.policy is not None  # noqa: S101 # `step` lets no rule but the policy's run without one
    return state.policy


def pools(state: State, base: str) -> tuple[Pool, ...]:
    """Return the pools of a base, in the order of the policy."""
    return tuple(pool for pool in current(state).fleet.pools if pool.spec.served_name == base)


def members(state: State, base: str) -> list[Instance]:
    """Return the instances of a base by id."""
    return sorted((i for i in state.instances.values() if i.base == base), key=lambda i: i.id)


def serving(instance: Instance) -> bool:
    """Tell whether an instance answers requests: ready, and not a standby on its way to sleep."""
    return instance.state is Life.READY and (instance.summoned or not instance.standby)


def watch_of(state: State, blend: str) -> Watch:
    """Return what the guard knows of a blend: at first nothing, and that it is due."""
    return state.watches.get(blend) or Watch(blend=blend)


def busy(state: State, instance: str) -> bool:
    """Tell whether an order about the instance is open."""
    return any(order.instance == instance for order in state.orders.values())


def claimed(state: State, target: str) -> bool:
    """Tell whether an order for the target is open: there is at most one."""
    return any(order.target == target for order in state.orders.values())


def same_adapter(member: Member, adapter: AdapterRef) -> bool:
    """Tell whether a member stands for the adapter: by name, or by content."""
    return member.adapter.name == adapter.name or member.adapter.digest == adapter.digest


def backed_off(state: State, instance: Instance) -> Instance:
    """Double the wait with every failure in a row: the same order is not repeated until its cause may have passed."""
    yoco = current(state).yoco
    wait_us = min(yoco.start_backoff_us << min(instance.failures, 32), yoco.start_backoff_max_us)
    return structs.replace(instance, failures=instance.failures + 1, retry_us=state.now_us + wait_us)
