"""The life of a blend's versions in sentences: rollbacks that were asked for, retirement, deletion, drift, repair."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kite_incident.units import duration, size
from kite_schemas.model import Data
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import (
    BlendDeleted,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    BlendUnloaded,
    DeleteFailed,
    DeleteOrdered,
    DriftObserved,
    Ending,
    InjectionClosed,
    LoadOrdered,
    RebuildOrdered,
    ResidentsSet,
    RetireFailed,
    RetireOrdered,
    Return,
    RollbackClosed,
    RollbackOrdered,
    RollbackRequested,
    RolledBack,
)
from kite_schemas.why import Reason

BECAUSE: Mapping[Reason, str] = {
    Reason.RETENTION_OVER: "its retention is over",
    Reason.SUPERSEDED: "a later version is the one before now",
    Reason.UNWANTED: "it was never promoted",
    Reason.DRIFT: "it should not be there",
    Reason.RETENTION_CROSSED: "old versions take too much of the node's memory",
    Reason.DAMAGED: "its files are gone or damaged",
    Reason.VERSION_QUARANTINED: "its effect was missing",
    Reason.RESIDENT_MISSING: "the instance lacks it",
}
"""Why a version is taken away or made again, for those reasons whose name alone tells too little."""

MENDING = frozenset({EffectProven.TYPE, BlendUnloaded.TYPE, BlendStored.TYPE})
"""What a repair of drift ends in: it is loaded and proven again, or taken away, or made again."""


def because(data: RetireOrdered | DeleteOrdered | RebuildOrdered | LoadOrdered) -> str:
    """Return why an order about a version was given."""
    return BECAUSE.get(data.why.reason, str(data.why.reason))


def listed(names: Iterable[str], none: str) -> str:
    """Return names one behind the other, or what stands for no name."""
    return ", ".join(names) or none


def _rolled(data: RollbackRequested) -> str:
    what = f"roll {data.blend} back to {data.version or 'the version before'}"
    return f"dry run: {what}" if data.dry_run else what


def _closed(data: RollbackClosed) -> str:
    match data.outcome:
        case Return.DONE:
            return f"done: {data.blend} means {data.version} again" + (f", not {data.former}" if data.former else "")
        case Return.DRY_RUN:
            return f"dry run: {data.blend} would mean {data.version} again"
        case _:
            return f"{data.outcome}: {data.detail or data.why.reason}"


def _injected(data: InjectionClosed) -> str:
    """Say who has it and who has not, when it was promoted on a part of the fleet only."""
    said = f"{data.outcome}: {data.why.reason}"
    if data.outcome is not Ending.PROMOTED or not data.missing:
        return said
    return f"{said}, on {listed(data.instances or (), 'no instance')}, not on {', '.join(data.missing)}"


def _taken_out(data: RolledBack) -> str:
    said = f"{data.version} taken out of {data.instance}"
    if data.healed is None:
        return said
    return f"{said}; its base {'answers' if data.healed else 'still does not answer'} with finite numbers"


def _taking_out(data: RollbackOrdered) -> str:
    if data.base is None:
        return ""
    return f"its numbers were not finite: {data.instance} forgets all prefixes, then {data.base} is asked"


def _drift(data: DriftObserved) -> str:
    """Say what an instance lacks, what it should not have, and what the store lacks."""
    lacks = [version for version in data.expected if version not in data.found]
    strays = [name for name in data.found if name not in data.expected]
    parts = (("lacks", lacks), ("should not hold", strays), ("has no sound files of", data.missing))
    return f"{data.instance} " + (
        "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names) or "holds what it should"
    )


def _should(data: ResidentsSet) -> str:
    held = (resident.version for resident in data.residents)
    return f"{data.instance} should hold {listed(held, 'nothing beside its base')}"


TITLES: dict[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    RollbackRequested: _rolled,
    LoadOrdered: lambda data: f"load {data.resident.version}: {because(data)}",
    RetireOrdered: lambda data: f"retire {data.version}: {because(data)}",
    DeleteOrdered: lambda data: f"delete {data.version}: {because(data)}",
    RebuildOrdered: lambda data: f"make {data.version} again: {because(data)}",
    ResidentsSet: lambda data: f"what {data.instance} should hold",
    DriftObserved: lambda data: f"drift on {data.instance}",
}
"""What an entry is about that begins with one of these."""

DETAILS: dict[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    InjectionClosed: _injected,
    BlendLoaded: lambda data: f"{data.version} loaded into {data.instance} in {duration(data.duration_us)}",
    EffectProven: lambda data: f"{data.version} proven on {data.instance}" if data.version else "",
    BlendPromoted: lambda data: f"{data.blend} means {data.resident.version}",
    RollbackOrdered: _taking_out,
    RolledBack: _taken_out,
    RollbackClosed: _closed,
    RetireOrdered: lambda data: f"{data.version} to leave {data.instance}: {because(data)}",
    BlendUnloaded: lambda data: f"{data.version} left {data.instance} after {duration(data.duration_us)}",
    RetireFailed: lambda data: f"{data.version} did not leave {data.instance}: {data.code}: {data.message}",
    DeleteOrdered: lambda data: f"{data.version} to be deleted: {because(data)}",
    BlendDeleted: lambda data: f"{data.version} deleted from the store, {size(data.freed_bytes)} freed",
    DeleteFailed: lambda data: f"{data.version} is in the store still: {data.code}: {data.message}",
    RebuildOrdered: lambda data: f"{data.version} to be made again on {data.node}: {because(data)}",
    ResidentsSet: _should,
    DriftObserved: _drift,
}
"""What a row of one of these types adds to its entry."""
