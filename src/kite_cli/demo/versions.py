"""The life of a version in the demo: the blend returns to the former one and back, then the former one is retired."""

from dataclasses import dataclass

from kite.errors import Fault, KiteError
from kite_arbitrator.records import Standing
from kite_arbitrator.state import State
from kite_cli.asking.following import Told
from kite_cli.asking.rollback import Rollback, rollback
from kite_cli.demo.episode import Say, Watch, set_limits
from kite_cli.embedded.fleet import Fleet
from kite_cli.place import reading
from kite_schemas.model import Data
from kite_schemas.upcycle import BlendPromoted, BlendUnloaded, RetireFailed, RetireOrdered

RETENTION_US = 1_000_000
"""The shipped two minutes would make the demo as long."""

TOLD: tuple[type[Data], ...] = (RetireOrdered, BlendUnloaded, RetireFailed)
GONE = frozenset({Standing.RELEASED, Standing.DELETING})
"""What a version is when no instance holds it any more; one that was deleted is in the state no longer."""


class NotReturned(KiteError):
    """A rollback did not do what it should."""

    code = "not_returned"
    fault = Fault.KITE


@dataclass(frozen=True, slots=True)
class Returned:
    """What was seen: how long the return took in ledger time, the decision on it, and the version left behind."""

    took_us: int
    decision: str
    former: str


async def there_and_back(fleet: Fleet, blend: str, say: Say, told: Told) -> Returned:
    """Return to the version before, then forward again to the present one. Raises NotReturned."""
    newest = fleet.state().blends[blend].resident.version
    say(f"  kite upcycle rollback {blend}")
    back = _done(await rollback(fleet, blend, reason="demo: is it the second adapter?", on_event=told))
    if back.former != newest or back.version is None:
        raise NotReturned(f"{blend} went back from {back.former} to {back.version}, and meant {newest}")
    say(f"  kite upcycle rollback {blend} --to {newest}")
    again = _done(await rollback(fleet, blend, version=newest, reason="demo: it is not", on_event=told))
    means = fleet.state().blends[blend].resident.version
    if (again.version, means) != (newest, newest):
        raise NotReturned(f"{blend} means {means}, and should mean {newest} again")
    return Returned(back.story.took_us, _decision(back), back.version)


def _done(ended: Rollback) -> Rollback:
    if not ended.ok:
        raise NotReturned(f"the rollback was {ended.outcome} ({ended.reason}): {ended.detail}")
    return ended


def _decision(ended: Rollback) -> str:
    """Return the id of the decision by which the name came to mean the earlier version."""
    return next(fact.event.header.id for fact in ended.story.facts if isinstance(fact.event.data, BlendPromoted))


async def retire(fleet: Fleet, version: str, say: Say) -> str:
    """Let the retention of a version end, and wait until no instance holds it; return the id of the decision.

    Raises NotChanged for the limit, and EpisodeIncomplete when it is not retired.
    """
    with reading(fleet) as reader:
        watch = Watch(reader, say, TOLD)
        await set_limits(fleet, say, {"upcycle.retention_us": RETENTION_US}, "two minutes are long to wait for")
        await watch.until(f"the retirement of {version}", lambda state: gone(state, version))
        return watch.decided[RetireOrdered][0]


def gone(state: State, version: str) -> bool:
    """Tell whether no instance holds a version any more."""
    stored = state.versions.get(version)
    held = any(version in instance.versions for instance in state.instances.values())
    return not held and (stored is None or stored.standing in GONE)
