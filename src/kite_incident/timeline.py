"""The timeline: what happened, told by request: everything that one request brought about is one entry."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kite.ledger import Row as LedgerRow
from kite_schemas.arbitration import Held, OrderExpired
from kite_schemas.envelope import Header, decode
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonRequested
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRejected, ChangeRequested
from kite_schemas.upcycle import AdapterRefused, Frozen, InjectionClosed, InjectionRequested, Unfrozen
from kite_schemas.why import Decision
from kite_schemas.yoco import InstanceChanged, InstanceReady, NodeRegistered, OrderFailed, OrderRefused, OrderRequested


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
        """What the last telling step says."""
        return next((step.detail for step in reversed(self.steps) if step.detail), "")


def timeline(rows: Iterable[LedgerRow], since_us: int = 0) -> list[Entry]:
    """Return the entries that begin at or after `since_us` of ledger time, by time; ticks are not told."""
    entries: dict[str, Entry] = {}
    for row in rows:
        if row.type == Tick.TYPE or row.ledger_us < since_us:
            continue
        event = decode(row.raw)
        key = event.header.correlationid or event.header.id
        entry = entries.get(key)
        if entry is None:
            entry = entries[key] = Entry(key, title(event.header, event.data), row.trace_id)
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
    match data:
        case InjectionRequested():
            mode = "dry run of " if data.dry_run else ""
            return f"{mode}inject {data.adapter.name} into {data.blend}"
        case OrderRequested():
            return f"order one more {data.base}"
        case ComparisonRequested():
            return f"compare {data.first} with {data.second}"
        case ChangeRequested():
            return "change the policy: " + (", ".join(change.key for change in data.changes) or "all of it")
        case NodeRegistered():
            return f"node {data.node} registered"
        case _:
            return f"{header.type.split('.')[2].replace('_', ' ')} ({header.subject})"


def detail(data: Data | None) -> str:
    """Return what a row adds to its entry's outcome, empty when it is only a step on the way."""
    return next((tell(data) for kind, tell in DETAILS.items() if isinstance(data, kind)), "")


def _failed(data: OrderFailed | OrderRefused) -> str:
    return f"{data.instance} failed: {data.code}"


def _not_done(data: Held | ChangeRejected) -> str:
    return f"not done: {data.detail}"


DETAILS: dict[type[Data], Callable[[Any], str]] = {  # Any: each function takes the type that stands before it
    InjectionClosed: lambda data: f"{data.outcome}: {data.why.reason}",
    AdapterRefused: lambda data: "refused: " + ", ".join(sorted({v.code for v in data.violations})),
    InstanceReady: lambda data: f"{data.instance} ready ({data.path}) after {data.t_first_token_us / 1_000:.0f} ms",
    InstanceChanged: lambda data: f"{data.instance} {data.to_state} ({data.code})",
    OrderFailed: _failed,
    OrderRefused: _failed,
    Compared: lambda data: f"KL {data.kl_micronats / 1e6:.6f} nats over {data.positions} positions",
    ComparisonFailed: lambda data: f"not compared: {data.code}",
    Held: _not_done,
    ChangeRejected: _not_done,
    Frozen: lambda data: f"admissions frozen, severity {data.severity}",
    Unfrozen: lambda data: f"admissions go on: {data.why.reason}",
    OrderExpired: lambda data: f"{data.kind} for {data.target} expired",
}
