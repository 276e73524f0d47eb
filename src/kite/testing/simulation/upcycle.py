"""The simulated upcycle and guard of a node: adapters verified, blended, loaded and proven; instances compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.chance import Chance
from kite.testing.simulation.engine import Engine
from kite.testing.simulation.worker import Run, Task, Tasks, Trouble
from kite_schemas.guard import (
    Compared,
    ComparisonFailed,
    ComparisonOrdered,
    DistributionMeasured,
    Logprobs,
    MeasurementOrdered,
)
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendDeleted,
    BlendFailed,
    BlendLoaded,
    BlendStored,
    BlendUnloaded,
    DeleteFailed,
    DeleteOrdered,
    EffectPrint,
    InjectionAdmitted,
    LoadFailed,
    LoadOrdered,
    RebuildOrdered,
    Resident,
    RetireFailed,
    RetireOrdered,
    RollbackFailed,
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
    Violation,
)
from kite_schemas.why import Outcome

VERIFY_US, BLEND_US, LOAD_US, PROVE_US, UNLOAD_US, COMPARE_US = 20_000, 120_000, 25_000, 40_000, 10_000, 90_000
DRAIN_US = 300_000
SIZE_BYTES = 2_000_000_000
"""What a version's files take: so much that a run of two minutes has to clean up."""

SHIFTED_MICRONATS = 400_000
DISTANCE_MICRONATS = 90_000
REFUSED, WITHOUT_EFFECT = "refused", "without-effect"
"""What the name of a defective adapter begins with."""


def digest(text: str) -> str:
    """Return 64 hex digits that stand for something."""
    return sha256(text.encode()).hexdigest()


def proven(instance: str, resident: Resident) -> EffectProven:
    """Return the proof of a version, with its print."""
    mark = digest(resident.version)
    seen = EffectPrint(path=f"store/prints/{mark}.json", digest=mark, distance_micronats=DISTANCE_MICRONATS)
    return EffectProven(
        instance=instance,
        version=resident.version,
        base_micronats=DISTANCE_MICRONATS,
        base_min_micronats=100,
        effect_print=resident.effect_print or seen,
    )


@dataclass(slots=True)
class Store:
    """The store of the whole fleet: which versions have no effect, which are there, and which ever were.

    `torn` lists those that were deleted while an engine knew them: a real one ends of that, sooner or later.
    """

    without_effect: set[str] = field(default_factory=set[str])
    digests: set[str] = field(default_factory=set[str])
    versions: set[str] = field(default_factory=set[str])
    torn: list[str] = field(default_factory=list[str])

    def put(self, order: InjectionAdmitted | RebuildOrdered) -> tuple[Resident, str]:
        """Store the blend of an admission; a second time, the same version is found there."""
        found = digest(order.model_dump_json(include={"blend", "members", "base_weight_ppm"}))
        version = f"{order.blend}@{found[:12]}"
        if any(member.adapter.name.startswith(WITHOUT_EFFECT) for member in order.members):
            self.without_effect.add(version)
        self.digests.add(found)
        self.versions.add(version)
        return Resident(blend=order.blend, version=version, path=f"store/sha256/{found}"), found


@dataclass(slots=True)
class Upcycle:
    """How the orders of Upcycle are carried out on one node; `engines` are those of the fleet by endpoint."""

    agenda: Agenda
    chance: Chance
    engines: dict[str, Engine]
    store: Store

    def tasks(self) -> Tasks:
        """Return how each order is carried out."""
        return {
            VerificationOrdered: Task(self._verify, _refused),
            InjectionAdmitted: Task(self._blend, _blend_failed),
            LoadOrdered: Task(self._load, _load_failed),
            RollbackOrdered: Task(self._roll_back, _rollback_failed),
            RetireOrdered: Task(self._retire, _retire_failed),
            DeleteOrdered: Task(self._delete, _delete_failed),
            RebuildOrdered: Task(self._blend, _blend_failed),
        }

    def _verify(self, order: VerificationOrdered) -> Run:
        yield (took_us := self.chance.about(VERIFY_US))
        if order.adapter.name.startswith(REFUSED):
            raise Trouble("verify", "rank_too_large")
        return AdapterVerified(
            request=order.request,
            adapter=order.adapter,
            parameters=460_800,
            share_ppm=3_000,
            rank=8,
            duration_us=took_us,
        )

    def _blend(self, order: InjectionAdmitted | RebuildOrdered) -> Run:
        yield (took_us := self.chance.about(BLEND_US))
        if self.chance.bad():
            raise Trouble("blend", "rank_exceeded")
        resident, found = self.store.put(order)
        return BlendStored(
            request=order.request,
            resident=resident,
            digest=found,
            method="concatenate",
            rank=8,
            residual_ppm=0,
            share_ppm=5_000,
            size_bytes=SIZE_BYTES,
            duration_us=took_us,
        )

    def _load(self, order: LoadOrdered) -> Run:
        """Load a version unless the engine has it, say so, and prove its effect."""
        version = order.resident.version
        yield self.chance.about(LOAD_US)
        engine = self._engine(order.endpoint)
        if version not in engine.versions:
            if order.resident.path.rpartition("/")[2] not in self.store.digests:
                raise Trouble("check", "missing_path")
            if self.chance.bad():
                raise Trouble("load", "engine_refused")
            if not engine.load(version, self.agenda.now_us):
                raise Trouble("load", "out_of_memory")
        yield BlendLoaded(instance=order.instance, version=version, duration_us=LOAD_US)
        yield self.chance.about(PROVE_US)
        _ = self._engine(order.endpoint)
        if version in self.store.without_effect:
            return EffectMissing(instance=order.instance, version=version, code=Missing.LIKE_BASE, message="")
        return proven(order.instance, order.resident)

    def _roll_back(self, order: RollbackOrdered) -> Run:
        yield self.chance.about(UNLOAD_US)
        self._engine(order.endpoint).unload(order.version)
        return RolledBack(request=order.request, instance=order.instance, version=order.version)

    def _retire(self, order: RetireOrdered) -> Run:
        """Take the name away, then wait until nobody uses it."""
        self._engine(order.endpoint).unload(order.version)
        yield (took_us := self.chance.about(DRAIN_US))
        _ = self._engine(order.endpoint)
        if self.chance.bad():
            raise Trouble("drain", "in_use")
        return BlendUnloaded(instance=order.instance, version=order.version, duration_us=took_us)

    def _delete(self, order: DeleteOrdered) -> Run:
        """Delete a version. One that an engine lists still is deleted too, as a store would; it is noted."""
        yield self.chance.about(UNLOAD_US)
        if self.chance.bad():
            raise Trouble("delete", "store_unusable")
        self.store.torn += (f"{order.version} on {e.instance}" for e in self._knowing(order.version))
        self.store.digests.discard(order.digest)
        return BlendDeleted(version=order.version, digest=order.digest, freed_bytes=SIZE_BYTES)

    def _knowing(self, version: str) -> Iterator[Engine]:
        return (engine for engine in self.engines.values() if engine.alive and version in engine.versions)

    def _engine(self, endpoint: str) -> Engine:
        """Return the process that listens there. Raises Trouble."""
        engine = self.engines.get(endpoint)
        if engine is None or not engine.alive:
            raise Trouble("engine", "engine_unreachable")
        return engine


@dataclass(slots=True)
class Guard:
    """How comparisons are carried out. `conflicting` tells whether two that should answer alike do not."""

    agenda: Agenda
    chance: Chance
    engines: dict[str, Engine]
    conflicting: Callable[[], bool]

    def tasks(self) -> Tasks:
        """Return how each order is carried out."""
        return {
            ComparisonOrdered: Task(self._compare, _comparison_failed),
            MeasurementOrdered: Task(self._measure, _measurement_failed),
        }

    def _compare(self, order: ComparisonOrdered) -> Run:
        yield (took_us := self.chance.about(COMPARE_US))
        sides = order.sides[:1] if order.measured else order.sides
        if not all(self._answers(side.endpoint, order.model) for side in sides):
            raise Trouble("measure", "engine_unreachable")
        kl_micronats = SHIFTED_MICRONATS if self.conflicting() else 0
        return Compared(
            request=order.request,
            first=order.sides[0].instance,
            second=order.sides[1].instance,
            model=order.model,
            kl_micronats=kl_micronats,
            p99_micronats=kl_micronats,
            covered_ppm=990_000,
            positions=16,
            duration_us=took_us,
        )

    def _measure(self, order: MeasurementOrdered) -> Run:
        yield (took_us := self.chance.about(COMPARE_US))
        if not self._answers(order.side.endpoint, order.model):
            raise Trouble("measure", "engine_unreachable")
        return DistributionMeasured(
            request=order.request,
            first=order.first,
            second=order.second,
            instance=order.side.instance,
            model=order.model,
            probes=digest("probes"),
            positions=(Logprobs(tokens=(1,), logprobs_micronats=(-1,)),),
            duration_us=took_us,
        )

    def _answers(self, endpoint: str, model: str) -> bool:
        engine = self.engines.get(endpoint)
        return engine is not None and engine.alive and not engine.paused and model in (engine.base, *engine.versions)


def _refused(order: VerificationOrdered, trouble: Trouble) -> Outcome:
    broken = Violation(code=trouble.code, where=trouble.stage, expected="", found="")
    return AdapterRefused(request=order.request, adapter=order.adapter, violations=(broken,), total=1, duration_us=1)


def _blend_failed(order: InjectionAdmitted | RebuildOrdered, trouble: Trouble) -> Outcome:
    return BlendFailed(request=order.request, code=trouble.code, message=trouble.message, duration_us=1)


def _load_failed(order: LoadOrdered, trouble: Trouble) -> Outcome:
    return LoadFailed(
        instance=order.instance,
        version=order.resident.version,
        stage=trouble.stage,
        code=trouble.code,
        message=trouble.message,
    )


def _rollback_failed(order: RollbackOrdered, trouble: Trouble) -> Outcome:
    return RollbackFailed(
        request=order.request,
        instance=order.instance,
        version=order.version,
        code=trouble.code,
        message=trouble.message,
    )


def _retire_failed(order: RetireOrdered, trouble: Trouble) -> Outcome:
    return RetireFailed(instance=order.instance, version=order.version, code=trouble.code, message=trouble.message)


def _delete_failed(order: DeleteOrdered, trouble: Trouble) -> Outcome:
    return DeleteFailed(version=order.version, digest=order.digest, code=trouble.code, message=trouble.message)


def _comparison_failed(order: ComparisonOrdered, trouble: Trouble) -> Outcome:
    first, second = (side.instance for side in order.sides)
    return ComparisonFailed(
        request=order.request, first=first, second=second, code=trouble.code, message=trouble.message
    )


def _measurement_failed(order: MeasurementOrdered, trouble: Trouble) -> Outcome:
    return ComparisonFailed(
        request=order.request, first=order.first, second=order.second, code=trouble.code, message=trouble.message
    )
