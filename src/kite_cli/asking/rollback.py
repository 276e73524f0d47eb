"""A rollback on request: let a blend mean an earlier version again, and follow it to its end."""

from dataclasses import dataclass

from kite_cli.asking.following import Story, Told, ask, make
from kite_cli.asking.request import why_not
from kite_cli.place import Address
from kite_schemas.envelope import Event
from kite_schemas.upcycle import BlendPromoted, Return, RollbackClosed, RollbackRequested

ROLLBACK_S = 180.0
"""Silence that is still normal, from the beginning on: the version may be draining (60 s), or be made again (120 s)."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """How a rollback ended: `version` was to be returned to, `former` is what the blend meant before."""

    story: Story
    outcome: Return
    reason: str
    detail: str
    blend: str
    version: str | None
    former: str | None
    instances: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it did what was asked."""
        return self.outcome in (Return.DONE, Return.DRY_RUN)


async def rollback(
    fleet: Address,
    blend: str,
    *,
    version: str | None = None,
    dry_run: bool = False,
    reason: str = "",
    on_event: Told | None = None,
) -> Rollback:
    """Ask for an earlier version of a blend (default: the one before), and follow it until it is closed.

    Raises what `ask` raises, and UsageError for a name that cannot be one of a blend or a version.
    """
    request = make(RollbackRequested, reason, blend=blend, version=version, dry_run=dry_run)
    subject = f"blend/{blend}"
    story = await ask(fleet, subject, request, _is_closed, answer_s=ROLLBACK_S, limit_s=ROLLBACK_S, on_event=on_event)
    return ended(story)


def _is_closed(event: Event) -> bool:
    return isinstance(event.data, RollbackClosed)


def ended(story: Story) -> Rollback:
    """Return how the rollback of a story ended, one that is closed."""
    closed, promoted = story.last(RollbackClosed), story.last(BlendPromoted)
    assert closed is not None  # noqa: S101 # `ask` returns after it
    return Rollback(
        story=story,
        outcome=closed.outcome,
        reason=closed.why.reason,
        detail=closed.detail or why_not(story),
        blend=closed.blend,
        version=closed.version,
        former=closed.former,
        instances=promoted.instances if promoted else (),
    )
