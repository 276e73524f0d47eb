"""The timeline: what happened, told by request: everything that one request brought about is one entry."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kite.ledger import Row as LedgerRow
from kite_incident import lives, versions
from kite_incident.units import duration, percent
from kite_schemas.arbitration import (
    ChannelSelected,
    Discarded,
    GapAcknowledged,
    ModeChanged,
    OrderExpired,
    PressureChanged,
    TransportChanged,
)
from kite_schemas.envelope import Header, decode
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonRequested
from kite_schemas.ledger import BusEpochChanged, BusGap, ClockStepped, DeadlineMissed, ProducerKeyAdded, Tick
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRejected, ChangeRequested
from kite_schemas.probes import Registered
from kite_schemas.telemetry import InstanceWindow, NodeFound, NodeLost, Window
from kite_schemas.upcycle import (
    RECOMPRESS,
    AdapterRefused,
    BlendFailed,
    BlendStored,
    DecaySet,
    DriftObserved,
    Frozen,
    InjectionClosed,
    InjectionRequested,
    ResidentsSet,
    RollbackClosed,
    Unfrozen,
)
from kite_schemas.upcycle import ChannelSampled as UpcycleSampled
from kite_schemas.why import Decision
from kite_schemas.yoco import (
    ChannelSampled,
    InstanceChanged,
    PrewarmBlocked,
    PrewarmReleased,
)

UNTOLD = frozenset({Tick.TYPE, Window.TYPE})
"""Ten times a second and more: nobody reads them one by one, and decoding them takes most of the time."""

REPORTS = frozenset({ChannelSampled.TYPE, UpcycleSampled.TYPE, ResidentsSet.TYPE})
"""What is said of a node or an instance again whenever it has changed: one entry, from the first to the last."""

CLOSING = frozenset({InjectionClosed.TYPE, RollbackClosed.TYPE})
"""What ends a request although more may follow from the same rows: a channel, a comparison, a retirement."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row inside an entry."""

    pos: int
    id: str
    at_us: int
    lane: str
    type: str
    subject: str
    decision: bool
    detail: str


@dataclass(slots=True)
class Entry:
    """One request, or one thing that happened by itself, with all that followed."""

    correlation: str
    title: str
    trace_id: str
    steps: list[Step] = field(default_factory=list[Step])

    @property
    def at_us(self) -> int:
        """Ledger time of the first step."""
        return self.steps[0].at_us

    @property
    def took_us(self) -> int:
        """From the first step to the last, in ledger time."""
        return self.steps[-1].at_us - self.steps[0].at_us

    @property
    def outcome(self) -> str:
        """What the step that closes a request says, what was repaired of a drift, else the last telling step."""
        telling = [step for step in reversed(self.steps) if step.detail]
        closing = (step.detail for step in telling if step.type in CLOSING)
        return next(closing, self._mended or (telling[0].detail if telling else ""))

    @property
    def _mended(self) -> str:
        if self.steps[0].type != DriftObserved.TYPE:
            return ""
        mended = [step.detail for step in self.steps if step.type in versions.MENDING]
        return f"repaired: {'; '.join(mended)}" if mended else ""


def timeline(rows: Iterable[LedgerRow], since_us: int = 0) -> list[Entry]:
    """Return the entries that begin at or after `since_us` of ledger time, by time, without ticks and windows."""
    entries: dict[str, Entry] = {}
    for row in rows:
        if row.type in UNTOLD or row.ledger_us < since_us:
            continue
        event = decode(row.raw)
        correlation = event.header.correlationid or event.header.id
        key = f"{row.type} {row.subject}" if row.type in REPORTS else correlation
        entry = entries.get(key)
        if entry is None:
            entry = entries[key] = Entry(correlation, title(event.header, event.data), row.trace_id)
        entry.steps.append(_step(row, event.header, event.data))
    return list(entries.values())


def _step(row: LedgerRow, header: Header, data: Data | None) -> Step:
    return Step(
        pos=row.pos,
        id=row.event_id,
        at_us=row.ledger_us,
        lane=header.producer.partition("@")[0],
        type=row.type,
        subject=row.subject,
        decision=isinstance(data, Decision),
        detail=detail(data),
    )


def title(header: Header, data: Data | None) -> str:
    """Return what an entry is about, in a few words."""
    own = TITLES.get(type(data)) if data is not None else None
    return own(data) if own is not None else f"{short(header.type).replace('_', ' ')} ({header.subject})"


def detail(data: Data | None) -> str:
    """Return what a row adds to its entry's outcome, empty when it is only a step on the way."""
    return next((tell(data) for kind, tell in DETAILS.items() if isinstance(data, kind)), "")


def short(event_type: str) -> str:
    """Return the part of an event type that people call it by.

    >>> short("kite.yoco.wake_ordered.v1")
    'wake_ordered'
    """
    return event_type.split(".")[2]


def _injected(data: InjectionRequested) -> str:
    return f"{'dry run of ' if data.dry_run else ''}inject {data.adapter.name} into {data.blend}"


def _changed(data: ChangeRequested) -> str:
    return "change the policy: " + (", ".join(change.key for change in data.changes) or "all of it")


def _not_done(data: ChangeRejected) -> str:
    return f"not done: {data.detail}"


def _pressure(data: PressureChanged) -> str:
    if data.on:
        return f"{data.base} on {data.node} under pressure, above its limit for {duration(data.lasted_us)}"
    return f"{data.base} on {data.node} out of pressure after {duration(data.lasted_us)}: {data.why.reason}"


def _sampled(data: ChannelSampled) -> str:
    shares = (
        ("healthy", data.healthy_ppm),
        ("prewarms done", data.prewarm_success_ppm),
        ("fragmentation", data.fragmentation_ppm),
    )
    return ", ".join(f"{name} {percent(ppm)}" for name, ppm in shares if ppm is not None) or "nothing is known"


def _upcycle(data: UpcycleSampled) -> str:
    shares = (("weight decay", data.decay_ppm), ("KV-cache pollution", data.kv_pollution_ppm))
    parts = [f"{name} {percent(ppm)}" for name, ppm in shares if ppm is not None]
    parts += [f"{shift.version} shifted by {shift.kl_micronats / 1e6:.4f} nats" for shift in data.shifts[-1:]]
    return ", ".join(parts) or "nothing is known"


def _stored(data: BlendStored) -> str:
    """Say at which rank, and what recompressing lost."""
    how = f"rank {data.rank}"
    if data.method == RECOMPRESS:
        how = f"recompressed to {how}, residual {percent(data.residual_ppm)}"
    return f"blend stored as {data.resident.version} ({how})"


def _window(data: Window) -> str:
    """Say what a decision could read in a window: requests in flight and fragmentation, as far as known."""
    worst_ppm = max((d.fragmentation_ppm for d in data.devices if d.fragmentation_ppm is not None), default=None)
    parts = [f"window {data.seq}", *(_load(instance) for instance in data.instances)]
    return ", ".join(parts if worst_ppm is None else [*parts, f"fragmentation {percent(worst_ppm)}"])


def _load(data: InstanceWindow) -> str:
    if data.running is None or data.waiting is None:
        return f"{data.id} unknown"
    return f"{data.id} {data.running} running {data.waiting} waiting"


TITLES: dict[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    **versions.TITLES,
    **lives.TITLES,
    InjectionRequested: _injected,
    ComparisonRequested: lambda data: f"compare {data.first} with {data.second}",
    ChangeRequested: _changed,
    Registered: lambda data: f"compare {data.base} with {data.probes} probes",
    GapAcknowledged: lambda _: "acknowledge the gap in the bus",
    ProducerKeyAdded: lambda data: f"trust a key of {data.source}",
}
DETAILS: dict[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    **versions.DETAILS,
    **lives.DETAILS,
    BlendStored: _stored,
    BlendFailed: lambda data: f"blend failed: {data.code}: {data.message}",
    AdapterRefused: lambda data: "refused: " + ", ".join(sorted({v.code for v in data.violations})),
    InstanceChanged: lambda data: f"{data.instance} {data.to_state} ({data.code})",
    Compared: lambda data: f"KL {data.kl_micronats / 1e6:.6f} nats over {data.positions} positions",
    ComparisonFailed: lambda data: f"not compared: {data.code}",
    ChangeRejected: _not_done,
    Frozen: lambda data: f"admissions frozen, severity {data.severity}",
    Unfrozen: lambda data: f"admissions go on: {data.why.reason}",
    OrderExpired: lambda data: f"{data.kind} for {data.target} expired",
    Discarded: lambda data: f"discarded: {short(data.decision)} of {data.target} too soon after its opposite",
    ChannelSelected: lambda data: f"{data.blend} on the {data.channel} channel: {data.why.reason}",
    PressureChanged: _pressure,
    DecaySet: lambda data: f"weight decay of {data.base} {percent(data.decay_ppm)}: {data.why.reason}",
    PrewarmBlocked: lambda data: f"prewarms of {data.node} blocked: {data.why.reason}",
    PrewarmReleased: lambda data: f"prewarms of {data.node} released after {duration(data.lasted_us)}",
    ChannelSampled: _sampled,
    UpcycleSampled: _upcycle,
    TransportChanged: lambda data: f"windows of {data.node} on {data.transport} transport: {data.why.reason}",
    ModeChanged: lambda data: f"mode {data.mode}: {data.why.reason}",
    NodeLost: lambda data: f"{data.node} lost: silent for {duration(data.silence_us)}",
    NodeFound: lambda data: f"{data.node} heard again after {duration(data.silence_us)}",
    BusGap: lambda data: f"{data.last - data.first + 1} messages of {data.stream} lost",
    BusEpochChanged: lambda data: f"another bus ({data.why}): read again from its start, epoch {data.bus_epoch}",
    ClockStepped: lambda data: f"the arbitrator's wall clock was set by {data.by_us / 1e6:+.0f} s",
    DeadlineMissed: lambda data: f"decided after {duration(data.took_us)}, deadline {duration(data.deadline_us)}",
    Window: _window,
}
