"""What can be asked of a fleet: each function publishes one request, follows it to its end and returns how it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from kite_cli.asking.following import Story, Told, ask, make
from kite_cli.asking.intake import bring
from kite_cli.place import Address
from kite_schemas.arbitration import GapAcknowledged, Held, Mode, ModeChanged, OrderExpired
from kite_schemas.envelope import Event
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonRequested, DistributionMeasured
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested, PolicySet
from kite_schemas.proof import EffectMissing
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendFailed,
    Ending,
    InjectionClosed,
    InjectionRejected,
    InjectionRequested,
    LoadFailed,
    Member,
    Violation,
)
from kite_schemas.why import Outcome
from kite_schemas.yoco import OrderFailed, OrderRefused

INJECTION_S = 180.0
"""Silence that is still normal: computing a blend may take 120 s."""

COMPARISON_S = 60.0
POLICY_S = 15.0
ACKNOWLEDGEMENT_S = 15.0
FLEET = "policy/fleet"
ARBITRATION = "arbitration/fleet"


@dataclass(frozen=True, slots=True)
class Injection:
    """How an injection ended; `violations` are all of a refused adapter's (64 at most, `total` says how many)."""

    story: Story
    ending: Ending
    reason: str
    detail: str
    blend: str
    version: str | None
    members: tuple[Member, ...]
    base_weight_ppm: int
    violations: tuple[Violation, ...]
    total: int
    verified: AdapterVerified | None
    instances: tuple[str, ...] | None
    missing: tuple[str, ...] | None

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        return self.ending in (Ending.PROMOTED, Ending.DRY_RUN)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a comparison ended: with `measured`, or with the reason why not."""

    story: Story
    measured: Compared | None
    code: str
    detail: str

    @property
    def ok(self) -> bool:
        """Whether there is a verdict."""
        return self.measured is not None


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """How a change of the policy ended."""

    story: Story
    digest: str
    detail: str

    @property
    def ok(self) -> bool:
        """Whether the changed policy is in force."""
        return bool(self.digest)


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """How the acknowledgement of a gap ended: `mode` is the one that is in force from there."""

    story: Story
    mode: Mode

    @property
    def ok(self) -> bool:
        """Whether decisions may destroy again."""
        return self.mode is not Mode.DEGRADED


async def inject(
    fleet: Address,
    *,
    adapter: Path,
    base: str,
    blend: str | None = None,
    weight_ppm: int | None = None,
    anchors: Sequence[str] = (),
    replace: str | None = None,
    dry_run: bool = False,
    partial: bool = False,
    reason: str = "",
    name: str | None = None,
    on_event: Told | None = None,
    on_copied: Callable[[Path], None] | None = None,
) -> Injection:
    """Inject an adapter into a blend (default: the base's name) and follow it until it is closed.

    `partial` promotes it where it could be proven, if it could not everywhere. `on_copied` is told the folder when the
    adapter was not below the adapter root. Raises what `bring` and `ask` raise,
    and UsageError for names and weights that cannot be.
    """
    from kite_upcycle.store import served_name

    called = blend or base
    served_name(called, "0" * 64)  # a name that cannot be served is refused here, not after the blend was computed
    brought = bring(adapter, fleet.adapter_root, name)
    if brought.copied_to is not None and on_copied is not None:
        on_copied(brought.copied_to)
    request = make(
        InjectionRequested,
        reason,
        blend=called,
        adapter=brought.ref,
        base=base,
        weight_ppm=weight_ppm,
        anchors=tuple(anchors),
        replace=replace,
        dry_run=dry_run,
        partial=partial,
    )
    story = await ask(fleet, f"blend/{called}", request, _is_closed, limit_s=INJECTION_S, on_event=on_event)
    return _injection(story)


def _is_closed(event: Event) -> bool:
    return isinstance(event.data, InjectionClosed)


def _injection(story: Story) -> Injection:
    closed = story.last(InjectionClosed)
    assert closed is not None  # noqa: S101 # `ask` returns after it
    refused = story.last(AdapterRefused)
    return Injection(
        story=story,
        ending=closed.outcome,
        reason=closed.why.reason,
        detail=why_not(story),
        blend=closed.blend,
        version=closed.version,
        members=closed.members,
        base_weight_ppm=closed.base_weight_ppm,
        violations=refused.violations if refused else (),
        total=refused.total if refused else 0,
        verified=story.last(AdapterVerified),
        instances=closed.instances,
        missing=closed.missing,
    )


def why_not(story: Story) -> str:
    """Return the sentence of whatever kept a version from being loaded and proven, empty when nothing did."""
    if rejected := story.last(InjectionRejected):
        return rejected.detail
    if failed := story.last(BlendFailed):
        return f"{failed.code}: {failed.message}"
    if missing := story.last(EffectMissing):
        return f"{missing.instance}: {missing.code}: {missing.message}"
    if unloaded := story.last(LoadFailed):
        return f"{unloaded.instance}: {unloaded.code}: {unloaded.message}"
    if expired := story.last(OrderExpired):
        return f"{expired.kind} for {expired.target} expired"
    return ""


async def compare(
    fleet: Address,
    first: str,
    second: str,
    *,
    blend: str | None = None,
    reason: str = "",
    on_event: Told | None = None,
) -> Comparison:
    """Have two instances compared by what they answer, and follow it. Raises what `ask` raises."""
    request = make(ComparisonRequested, reason, first=first, second=second, blend=blend)
    story = await ask(fleet, f"instance/{first}", request, _is_compared, limit_s=COMPARISON_S, on_event=on_event)
    code, said = obstacle(story)
    return Comparison(story, story.last(Compared), code, said)


def _is_compared(event: Event) -> bool:
    """A measurement is the end of its order, and a step of a comparison across nodes."""
    return closes(event) and not isinstance(event.data, DistributionMeasured)


def closes(event: Event) -> bool:
    """Tell whether an event ends a request for one order; what is held in passing, or put off, is no answer to it."""
    match event.data:
        case Held(request=request):
            return request == event.header.correlationid
        case data:
            return isinstance(data, OrderExpired) or (isinstance(data, Outcome) and data.done)


def obstacle(story: Story) -> tuple[str, str]:
    """Return code and sentence of what kept an order from being done; both empty when nothing did."""
    match story.facts[-1].event.data:
        case Held(why=why, detail=said):
            return why.reason, said
        case OrderExpired(kind=kind, target=target):
            return "expired", f"{kind} for {target} expired"
        case OrderRefused() | OrderFailed() | ComparisonFailed() | EffectMissing() as failed:
            return failed.code, failed.message
        case _:
            return "", ""


async def change(
    fleet: Address,
    changes: Sequence[tuple[str, JsonValue]],
    *,
    reason: str = "",
    force: bool = False,
    on_event: Told | None = None,
) -> PolicyChange:
    """Change settings of the policy by key and JSON value, and follow it; `force`: harmful ones too.

    Raises what `ask` raises.
    """
    wanted = tuple(Change(key=key, value=value) for key, value in changes)
    request = make(ChangeRequested, reason, changes=wanted, force=force)
    story = await ask(fleet, FLEET, request, _is_decided, limit_s=POLICY_S, on_event=on_event)
    applied, rejected = story.last(PolicySet), story.last(ChangeRejected)
    return PolicyChange(story, applied.digest if applied else "", rejected.detail if rejected else "")


def _is_decided(event: Event) -> bool:
    return isinstance(event.data, PolicySet | ChangeRejected)


async def acknowledge(fleet: Address, *, reason: str, on_event: Told | None = None) -> Acknowledgement:
    """Acknowledge the gap in the bus and follow it until the mode has changed. Raises what `ask` raises."""
    request = make(GapAcknowledged, reason)
    story = await ask(fleet, ARBITRATION, request, _is_mode, limit_s=ACKNOWLEDGEMENT_S, on_event=on_event)
    changed = story.last(ModeChanged)
    assert changed is not None  # noqa: S101 # `ask` returns after it
    return Acknowledgement(story, changed.mode)


def _is_mode(event: Event) -> bool:
    return isinstance(event.data, ModeChanged)
