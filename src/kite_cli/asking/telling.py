"""One line for every event that somebody waits for."""

from collections.abc import Callable
from typing import Any

from kite_cli.output import Progress, count, duration, moment, percent, short
from kite_incident.timeline import detail
from kite_schemas.envelope import Event
from kite_schemas.guard import ComparisonOrdered, DistributionMeasured, MeasurementOrdered
from kite_schemas.model import Data
from kite_schemas.policy import PolicySet
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import (
    AdapterVerified,
    BlendLoaded,
    BlendPromoted,
    Frozen,
    InjectionAdmitted,
    InjectionDeferred,
    InjectionRejected,
    LoadFailed,
    LoadOrdered,
    MemberDropped,
    RollbackFailed,
    RollbackOrdered,
    Unfrozen,
    VerificationOrdered,
)
from kite_schemas.yoco import DrainOrdered, SleepOrdered, StartOrdered, StopOrdered, WakeOrdered

NATS_DIGITS = 4


def tell(event: Event) -> str:
    """Return what an event says, in one line; empty for one that says nothing to a person who waits."""
    data = event.data
    if data is None:
        return short(event.header.type).replace("_", " ")
    own = TOLD.get(type(data))
    return own(data) if own is not None else detail(data)


def into(progress: Progress) -> Callable[[Event], None]:
    """Return what tells every event as a step of a progress."""
    return lambda event: progress.step(tell(event) or event.header.type)


def nats(micronats: int) -> str:
    """Format a divergence.

    >>> nats(1_234_567)
    '1.2346 nats'
    """
    return f"{micronats / 1_000_000:.{NATS_DIGITS}f} nats"


def _admitted(data: InjectionAdmitted) -> str:
    members = ", ".join(f"{m.adapter.name} {percent(m.weight_ppm)}" for m in data.members)
    return f"admitted: {members}, base {percent(data.base_weight_ppm)}"


TOLD: dict[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    VerificationOrdered: lambda data: f"verifying {data.adapter.name} against {data.base.name}",
    AdapterVerified: lambda data: f"verified: rank {data.rank}, {percent(data.share_ppm)} of the base's parameters",
    MemberDropped: lambda data: f"{data.member.name} leaves: its weight would be {percent(data.weight_ppm)}",
    InjectionAdmitted: _admitted,
    InjectionDeferred: lambda data: f"waits: {data.why.reason} until {moment(data.until_us)}",
    Frozen: lambda data: f"admissions frozen until {moment(data.until_us)}: instances disagree on {data.blend}",
    Unfrozen: lambda data: f"admissions go on after {duration(data.lasted_us)}: {data.why.reason}",
    InjectionRejected: lambda data: f"rejected: {data.detail}",
    LoadOrdered: lambda data: f"loading {data.resident.version} into {data.instance}",
    BlendLoaded: lambda data: f"loaded into {data.instance} in {duration(data.duration_us)}",
    LoadFailed: lambda data: f"{data.instance} did not load it: {data.code}: {data.message}",
    EffectProven: lambda data: f"proven on {data.instance}: {nats(data.base_micronats)} from the base",
    EffectMissing: lambda data: f"no effect on {data.instance}: {data.code}: {data.message}",
    BlendPromoted: lambda data: f"{data.blend} now means {data.resident.version}",
    RollbackOrdered: lambda data: f"taking {data.version} out of {data.instance} again",
    RollbackFailed: lambda data: f"{data.instance} still holds {data.version}: {data.code}: {data.message}",
    StartOrdered: lambda data: f"{data.instance} to be started on {data.device}",
    DrainOrdered: lambda data: f"{data.instance} to be drained",
    SleepOrdered: lambda data: f"{data.instance} to sleep",
    WakeOrdered: lambda data: f"{data.instance} to wake ({data.path}), deadline {duration(data.deadline_us)}",
    StopOrdered: lambda data: f"{data.instance} to be stopped",
    ComparisonOrdered: lambda data: f"comparing {data.sides[0].instance} with {data.sides[1].instance} on {data.model}",
    MeasurementOrdered: lambda data: f"measuring {data.side.instance} on {data.model}",
    DistributionMeasured: lambda data: f"{data.instance} measured at {count(len(data.positions), 'position')}",
    PolicySet: lambda data: f"policy {data.digest[:12]} is in force",
}
