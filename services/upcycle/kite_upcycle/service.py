"""Upcycle's life: take an order, look, act, say what came of it.

Nothing here decides: a version that has no effect stays loaded until the arbitrator orders it out again.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import structlog

from kite import __version__, clock, probes, proof
from kite.bus import Bus
from kite.engine import Engine, EngineRefused, Refusal
from kite.errors import Fault, KiteError, MissingPath
from kite.events import Origin
from kite.orders import GRACE_US, Emit, Received, Task, Tasks, Worker, stage
from kite.probes import Probes
from kite.proof import Missing, Proven
from kite.watches import Watch, beside, tell
from kite_schemas.proof import EffectMissing, EffectProven
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BaseRef,
    BlendFailed,
    BlendLoaded,
    BlendStored,
    ChannelSampled,
    DecaySet,
    EffectPrint,
    InjectionAdmitted,
    LoadFailed,
    LoadOrdered,
    Resident,
    RollbackFailed,
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
)
from kite_schemas.why import Order
from kite_upcycle import channel, core
from kite_upcycle.base import Base, UnreadableBase
from kite_upcycle.blend import Device, combine
from kite_upcycle.channel import Channel
from kite_upcycle.engines import Engines
from kite_upcycle.settings import Settings
from kite_upcycle.shifts import Shifts
from kite_upcycle.store import Manifest, Store, Version
from kite_upcycle.verify import Report, verify

SERVICE = "upcycle"
BASES_MAX = 8  # bases of a node whose layout is kept

Result = TypeVar("Result")

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class BaseChanged(KiteError):
    """The base's files are not those that the policy names, so that nothing can be held against them."""

    code: ClassVar[str] = core.BASE_MISMATCH
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(
            f"base {path} has digest {found}, not {expected}",
            hint="put the base back, or give the pool the digest of the one that its instances serve",
        )
        self.expected = expected
        self.found = found


class MemberUnreadable(KiteError):
    """An adapter's files changed or failed while they were read."""

    code: ClassVar[str] = "adapter_unreadable"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, reason: str) -> None:
        super().__init__(f"reading stopped: {reason}", hint="let nothing write to an adapter; check the disk")


class StoreUnusable(KiteError):
    """The store cannot be read or written."""

    code: ClassVar[str] = "store_unusable"
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = True

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the store {path} cannot be used: {reason}", hint="upcycle must be able to write there")
        self.path = path


class NotAVersion(KiteError):
    """An order names something to load that is no version of the store."""

    code: ClassVar[str] = "not_a_version"

    def __init__(self, resident: Resident) -> None:
        super().__init__(
            f"{resident.path} is no place of {resident.version} in the store",
            hint="engines are given stored versions only",
        )


class NotListed(KiteError):
    """The engine said 200 OK to a load and does not list the version."""

    code: ClassVar[str] = "not_listed"
    fault: ClassVar[Fault] = Fault.PEER

    def __init__(self, version: str) -> None:
        super().__init__(f"the engine took {version} and does not list it", hint="see the engine's log")


class StillListed(KiteError):
    """The engine said 200 OK to an unload and lists the version still."""

    code: ClassVar[str] = "still_listed"
    fault: ClassVar[Fault] = Fault.PEER

    def __init__(self, version: str) -> None:
        super().__init__(f"the engine still lists {version} after its unload", hint="see the engine's log")


class Bases:
    """Bases by path and digest. Each is hashed once: an engine, too, reads its base only when it starts."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Base] = {}

    def get(self, ref: BaseRef) -> Base:
        """Return the base that a reference means. Raises MissingPath, UnreadableBase, BaseChanged."""
        key = ref.path, ref.digest
        if key not in self._known:
            base = _checked(ref)
            while len(self._known) >= BASES_MAX:
                del self._known[next(iter(self._known))]
            self._known[key] = base
        return self._known[key]


class Upcycle:
    """The handlers of one node's orders; the report of its channel learns from the loads."""

    def __init__(self, settings: Settings, engines: Engines, probe_set: Probes, watched: Channel) -> None:
        self._root = settings.adapters
        self._store = settings.store
        self._device: Device = settings.device
        self._engines = engines
        self._channel = watched
        self._probes = probe_set
        self._bases = Bases()
        self._turn = asyncio.Lock()

    def tasks(self) -> Tasks:
        """Return the table of what this service carries out."""
        return {
            VerificationOrdered: Task(self.verify, _verification_failed),
            InjectionAdmitted: Task(self.blend, _blend_failed),
            LoadOrdered: Task(self.load, _load_failed),
            RollbackOrdered: Task(self.roll_back, _rollback_failed),
        }

    async def warm(self) -> None:
        """Import torch (seconds) before an order waits for it."""
        await self._in_turn(_import_torch)

    async def verify(self, received: Received[VerificationOrdered], emit: Emit) -> AdapterVerified | AdapterRefused:
        """Check an adapter against the contract of its base."""
        del emit
        began_us = clock.mono_us()
        order = received.data
        stage("base")
        base = await self._in_turn(partial(self._bases.get, order.base))
        stage("verify")
        report = await self._in_turn(partial(self._report, order, base))
        return core.verdict(order, report, clock.mono_us() - began_us)

    async def blend(self, received: Received[InjectionAdmitted], emit: Emit) -> BlendStored:
        """Compute the blend of a weight vector and store it; a second time, the same version is found there."""
        del emit
        began_us = clock.mono_us()
        order = received.data
        stage("base")
        base = await self._in_turn(partial(self._bases.get, order.base))
        stage("blend")
        version = await self._in_turn(partial(self._put, order, base))
        return core.stored(order, version, base, clock.mono_us() - began_us)

    async def load(self, received: Received[LoadOrdered], emit: Emit) -> EffectProven | EffectMissing:
        """Load a version unless the engine has it, say so, and prove its effect."""
        order = received.data
        version = order.resident.version
        async with self._engines.lend(order.endpoint) as engine:
            self._channel.taken(order)
            began_us = clock.mono_us()
            stage("list")
            listed = await engine.models()
            plan = core.plan_load(order.resident, listed)
            if plan.load:
                await self._give(engine, order)
            took_us = clock.mono_us() - began_us
            await emit(BlendLoaded(instance=order.instance, version=version, duration_us=took_us))
            stage("prove")
            found = await self._prove(engine, order, plan.effect_print)
        if plan.load and isinstance(found, Proven):
            self._channel.proven(received, listed)
        return proof.outcome(found, order.instance, version)

    async def roll_back(self, received: Received[RollbackOrdered], emit: Emit) -> RolledBack:
        """Take a version out of an engine, if it is there."""
        del emit
        order = received.data
        async with self._engines.lend(order.endpoint) as engine:
            stage("list")
            if order.version in await engine.models():
                await _take(engine, order.version)
        return RolledBack(request=order.request, instance=order.instance, version=order.version)

    def _report(self, order: VerificationOrdered, base: Base) -> Report:
        try:
            return verify(Path(order.adapter.path), base, core.limits(order), root=self._root)
        except (OSError, EOFError) as error:
            raise MemberUnreadable(str(error)) from error

    def _put(self, order: InjectionAdmitted, base: Base) -> Version:
        def build(folder: Path) -> Manifest:
            made = combine(
                core.members(order),
                folder,
                base=base,
                max_lora_rank=order.max_lora_rank,
                residual_max_ppm=order.residual_max_ppm,
                root=self._root,
                device=self._device,
            )
            return made.manifest(order.base.digest)

        return self._with_store(lambda store: store.put(build))

    def _with_store(self, job: Callable[[Store], Version]) -> Version:
        """Open the store for one job: what an earlier crash left there is swept by the way."""
        try:
            return job(Store(self._store))
        except EOFError as error:
            raise MemberUnreadable(str(error)) from error
        except OSError as error:
            raise StoreUnusable(self._store, str(error)) from error

    async def _give(self, engine: Engine, order: LoadOrdered) -> None:
        """Check the stored version, load it, and look whether the engine has it."""
        stage("check")
        resident = order.resident
        digest = core.stored_digest(resident)
        if digest is None:
            raise NotAVersion(resident)
        checked = await self._in_turn(partial(self._with_store, lambda store: store.check(digest)))
        stage("load")
        began_us = clock.wall_us()
        try:
            await engine.load(resident.version, str(checked.path))
        except EngineRefused as error:
            if error.reason is not Refusal.ALREADY_LOADED:
                raise
        self._channel.loaded(order, began_us, clock.wall_us())
        stage("list")
        if resident.version not in await engine.models():
            raise NotListed(resident.version)

    async def _prove(self, engine: Engine, order: LoadOrdered, effect_print: EffectPrint | None) -> Proven | Missing:
        base, version, noise = order.base, order.resident.version, order.noise_micronats
        if effect_print is None:
            return await proof.prove_first(engine, base, version, self._probes, noise, self._root)
        return await proof.prove_again(engine, base, version, effect_print, self._probes, noise, self._root)

    async def _in_turn(self, job: Callable[[], Result]) -> Result:
        """Run a computation in a thread, one at a time: two on few cores take longer than one after the other.

        When the order is stopped it is waited for, since a thread cannot be: what it writes must not come afterwards.
        """
        async with self._turn:
            running = asyncio.ensure_future(asyncio.to_thread(job))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.gather(running, return_exceptions=True)
                raise


async def _take(engine: Engine, version: str) -> None:
    """Unload a version and look whether it is gone."""
    stage("unload")
    try:
        await engine.unload(version)
    except EngineRefused as error:
        if error.reason is not Refusal.MODEL_UNKNOWN:
            raise
    stage("list")
    if version in await engine.models():
        raise StillListed(version)


def _checked(ref: BaseRef) -> Base:
    path = Path(ref.path)
    base = Base.load(path)
    try:
        found = base.digest
    except OSError as error:
        raise UnreadableBase(path, str(error)) from error
    if found != ref.digest:
        raise BaseChanged(ref.path, ref.digest, found)
    return base


def _import_torch() -> None:
    import torch

    log.info("torch_ready", version=torch.__version__)


def _verification_failed(
    received: Received[VerificationOrdered], stage_name: str, code: str, message: str
) -> AdapterRefused:
    return core.refused(received.data, (core.unfinished(stage_name, code, message),), _age_us(received))


def _blend_failed(received: Received[InjectionAdmitted], stage_name: str, code: str, message: str) -> BlendFailed:
    del stage_name
    return BlendFailed(request=received.data.request, code=code, message=message, duration_us=_age_us(received))


def _load_failed(received: Received[LoadOrdered], stage_name: str, code: str, message: str) -> LoadFailed:
    order = received.data
    version = order.resident.version
    return LoadFailed(instance=order.instance, version=version, stage=stage_name, code=code, message=message)


def _rollback_failed(received: Received[RollbackOrdered], stage_name: str, code: str, message: str) -> RollbackFailed:
    del stage_name
    order = received.data
    return RollbackFailed(
        request=order.request, instance=order.instance, version=order.version, code=code, message=message
    )


def _age_us(received: Received[Order]) -> int:
    """Return how long ago the order was published: what a failure took, waiting included."""
    return max(0, clock.wall_us() - (received.deadline_us - received.data.ttl_us - GRACE_US))


async def serve(settings: Settings) -> None:
    """Carry out the orders of one node until cancelled. Raises MissingPath, and the bus's and the journal's errors."""
    if not settings.adapters.is_dir():
        raise MissingPath(f"no adapter root {settings.adapters}", hint="set KITE_ADAPTER_ROOT to the shared folder")
    origin = Origin(source=f"kite/{SERVICE}/{settings.node}", producer=f"{SERVICE}@{__version__}")
    name = f"{SERVICE}-{settings.node}"
    async with await Bus.connect(settings.nats_url, name, signer=settings.signer()) as bus, Engines() as engines:
        watched = Channel(settings.node, Shifts(engines, probes.default().prompts))
        upcycle = Upcycle(settings, engines, probes.default(), watched)
        await upcycle.warm()
        worker = Worker(
            bus=bus,
            origin=origin,
            service=SERVICE,
            node=settings.node,
            journal=settings.journal,
            handlers=upcycle.tasks(),
            notices={DecaySet: watched.hear_decay},
        )
        log.info(
            "upcycle_ready", node=settings.node, adapter_root=str(settings.adapters), probes=probes.default().digest
        )
        async with beside(watches(bus, worker, watched, settings.node)):
            await worker.run()


def watches(bus: Bus, worker: Worker, watched: Channel, node: str) -> dict[str, Watch]:
    """Return what looks on beside the orders."""

    async def say(sampled: ChannelSampled) -> None:
        await worker.publish(f"node/{node}", sampled)

    return {
        "windows": partial(channel.follow, bus, node, watched.hear),
        "shifts": watched.shifts.run,
        "channel": partial(tell, watched.sample, say),
    }
