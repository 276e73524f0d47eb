"""The life of instances in sentences: what a node brought along, prewarms, drains, quarantine, deadlines."""

from collections.abc import Callable, Mapping
from typing import Any

from kite_incident.units import duration
from kite_schemas.arbitration import Held
from kite_schemas.model import Data
from kite_schemas.why import Reason
from kite_schemas.yoco import (
    DrainRequested,
    Found,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRefused,
    OrderRequested,
    PrewarmOrdered,
    StopOrdered,
)


def _asked(data: OrderRequested) -> str:
    within = "" if data.deadline_us is None else f" within {duration(data.deadline_us)}"
    return f"order one more {data.base}{within}" + (", or late" if data.late else "")


def _drain(data: DrainRequested) -> str:
    return f"drain {data.instance}" + (", even if it is the last" if data.force else "")


def _registered(data: NodeRegistered) -> str:
    """Say which engines went on while no yoco watched them."""
    return f"adopted {', '.join(map(_found, data.instances))}" if data.instances else ""


def _found(found: Found) -> str:
    versions = f", {', '.join(found.versions)}" if found.versions else ""
    return f"{found.instance} ({found.mode or found.state}{versions})"


def _ready(data: InstanceReady) -> str:
    return f"{data.instance} ready ({data.path}) after {data.t_first_token_us / 1_000:.0f} ms"


def _prewarm(data: PrewarmOrdered) -> str:
    cores = f", cores {data.cores}" if data.cores else ""
    return f"{data.instance} to be prewarmed on {data.device}{cores}: {data.why.reason}"


def _failed(data: OrderFailed | OrderRefused) -> str:
    best = ""
    if isinstance(data, OrderRefused) and data.expected_us is not None:
        best = f", {data.path or 'the fastest path'} takes {duration(data.expected_us)}"
    return f"{data.instance} failed: {data.code}{best}"


def held(data: Held) -> str:
    """Say what is not done, and where no path meets the deadline, how long the fastest takes."""
    if data.why.reason is Reason.DEADLINE_UNREACHABLE and data.why.rules:
        rule = data.why.rules[0]
        best = next((candidate.id for candidate in data.why.candidates if candidate.reason is data.why.reason), "")
        who = f"the fastest, {best}," if best else "the fastest path"
        return f"not done: {who} takes {duration(rule.value)}, the deadline is {duration(rule.threshold)}"
    return f"not done: {data.detail}"


TITLES: Mapping[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    OrderRequested: _asked,
    DrainRequested: _drain,
    NodeRegistered: lambda data: f"node {data.node} registered",
}
DETAILS: Mapping[type[Data], Callable[[Any], str]] = {  # Any: as above
    NodeRegistered: _registered,
    InstanceReady: _ready,
    PrewarmOrdered: _prewarm,
    StopOrdered: lambda data: f"{data.instance} to be stopped: {data.why.reason}",
    OrderFailed: _failed,
    OrderRefused: _failed,
    Held: held,
}
