"""Whether engines hold what they should: looked at again and again, said once per change, repaired by order only."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from kite.clock import mono_us
from kite.engine import EngineError
from kite.errors import MissingPath
from kite_schemas.upcycle import DriftObserved, Resident, ResidentsSet
from kite_upcycle import core
from kite_upcycle.engines import Engines
from kite_upcycle.store import Store, StoreDamaged

LOOK_S = 0.5  # between two looks for something that is due
CONFIRM_US = 3_000_000  # before a drift is said: after a load, what to hold is told anew with the next tick, 1 s away
INSTANCES_MAX = 64  # of one node that are looked at; the one told of first is forgotten
VERSIONS_MAX = 1_024  # whose files are remembered as whole

Report = Callable[[DriftObserved], Awaitable[None]]
Sizes = tuple[tuple[str, int, int], ...]

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Expected:
    """What one instance should hold, and the decision that says so; `looked_us` is when that was looked at last."""

    decision: str
    said: ResidentsSet
    looked_us: int = 0

    @property
    def versions(self) -> tuple[str, ...]:
        """The names that its engine should list beside its base."""
        return tuple(sorted(resident.version for resident in self.said.residents))


@dataclass(slots=True)
class Files:
    """Which stored versions are whole: hashed when first seen, and when the sizes or times of their files change."""

    root: Path
    _store: Store | None = None  # opened at the first look: opening it sweeps what a crash left
    _known: dict[str, tuple[Sizes, bool]] = field(default_factory=dict[str, tuple[Sizes, bool]])

    def damaged(self, residents: Sequence[Resident]) -> tuple[str, ...]:
        """Return the versions whose files are gone or not their own. Raises OSError when the store cannot be read."""
        store = self._store = self._store or Store(self.root)
        return tuple(sorted(r.version for r in residents if not self._whole(store, core.stored_digest(r))))

    def _whole(self, store: Store, digest: str | None) -> bool:
        if digest is None:
            return False
        sizes = store.sizes(digest)
        known = self._known.get(digest)
        if known is None or known[0] != sizes:
            self._make_room()
            known = self._known[digest] = (sizes, bool(sizes) and checks(store, digest))
        return known[1]

    def _make_room(self) -> None:
        while len(self._known) >= VERSIONS_MAX:
            del self._known[next(iter(self._known))]


def checks(store: Store, digest: str) -> bool:
    """Say whether a stored version hashes to its own name."""
    try:
        store.check(digest)
    except (StoreDamaged, MissingPath):
        return False
    return True


def observed(expected: Expected, listed: Sequence[str], missing: tuple[str, ...]) -> DriftObserved:
    """Return what was found of an instance; `listed` are the names that its engine serves, the base among them."""
    said = expected.said
    return DriftObserved(
        node=said.node,
        instance=said.instance,
        told=expected.decision,
        expected=expected.versions,
        found=tuple(sorted(name for name in listed if name != said.base)),
        missing=missing,
    )


def drifted(found: DriftObserved) -> bool:
    """Say whether what was found is not what should be."""
    return found.found != found.expected or bool(found.missing)


class Drift:
    """What the instances of a node should hold, as the arbitrator last said, and what was last said of each."""

    def __init__(self, engines: Engines, store: Path) -> None:
        self._engines = engines
        self._files = Files(store)
        self._expected: dict[str, Expected] = {}
        self._said: dict[str, DriftObserved] = {}
        self._suspected: dict[str, tuple[DriftObserved, int]] = {}  # seen once, and when

    def hear(self, notice: ResidentsSet, decision: str) -> None:
        """Hold an instance against this from now on."""
        for known in (self._expected, self._said, self._suspected):
            known.pop(notice.instance, None)
        self._expected[notice.instance] = Expected(decision, notice)
        while len(self._expected) > INSTANCES_MAX:
            oldest = next(iter(self._expected))
            del self._expected[oldest]
            self._said.pop(oldest, None)
            self._suspected.pop(oldest, None)

    def endpoints(self) -> set[str]:
        """Return the addresses of the instances that were told of."""
        return {expected.said.endpoint for expected in self._expected.values()}

    async def run(self, report: Report) -> None:
        """Look at each instance when its interval has passed, for ever."""
        while True:
            await self.look(report)
            await asyncio.sleep(LOOK_S)

    async def look(self, report: Report) -> None:
        """Look at what is due now; an instance that an order is about, or that does not answer, is left for later."""
        for name, expected in list(self._expected.items()):
            if not self._due(name, expected):
                continue
            found = await self._found(expected)
            stale = self._expected.get(name) is not expected or self._engines.busy(expected.said.endpoint)
            if found is None or stale:
                continue  # an order began while it was looked at
            if self._believed(found):
                self._expected[name] = replace(expected, looked_us=mono_us())
                await self._tell(found, report)

    def _due(self, name: str, expected: Expected) -> bool:
        if name in self._suspected:
            return mono_us() - self._suspected[name][1] >= CONFIRM_US
        return not expected.looked_us or mono_us() - expected.looked_us >= expected.said.interval_us

    def _believed(self, found: DriftObserved) -> bool:
        """Say whether what was found is no drift, or one that was there before: who brought it about may tell of it."""
        before, _ = self._suspected.pop(found.instance, (None, 0))
        if not drifted(found) or found in (before, self._said.get(found.instance)):
            return True
        self._suspected[found.instance] = found, mono_us()
        return False

    async def _found(self, expected: Expected) -> DriftObserved | None:
        endpoint = expected.said.endpoint
        if self._engines.busy(endpoint):
            return None
        try:
            async with self._engines.lend(endpoint) as engine:
                listed = await engine.models()
            missing = await asyncio.to_thread(self._files.damaged, expected.said.residents)
        except (EngineError, OSError) as error:
            log.debug("drift_unseen", instance=expected.said.instance, reason=str(error))
            return None
        return observed(expected, listed, missing)

    async def _tell(self, found: DriftObserved, report: Report) -> None:
        """Say what has changed; an instance that is as it should be is worth a word only after a drift."""
        said = self._said.get(found.instance)
        if found == said or (said is None and not drifted(found)):
            return
        self._said[found.instance] = found
        log.info("drift_observed", instance=found.instance, found=found.found, missing=found.missing)
        await report(found)
