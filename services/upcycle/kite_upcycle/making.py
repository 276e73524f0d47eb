"""What is done with files: adapters verified, blends computed, stored, computed again and deleted."""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from kite import clock
from kite.errors import MissingPath
from kite.orders import Emit, Received, stage
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BaseRef,
    BlendDeleted,
    BlendStored,
    DeleteOrdered,
    InjectionAdmitted,
    RebuildOrdered,
    Resident,
    VerificationOrdered,
)
from kite_upcycle import core
from kite_upcycle.base import Base, UnreadableBase
from kite_upcycle.blend import Device, combine
from kite_upcycle.engines import Engines
from kite_upcycle.errors import BaseChanged, MemberUnreadable, NotAVersion, RebuiltOtherwise, StillUsed, StoreUnusable
from kite_upcycle.settings import Settings
from kite_upcycle.store import Manifest, Store, Version
from kite_upcycle.verify import Report, verify

BASES_MAX = 8  # bases of a node whose layout is kept

Result = TypeVar("Result")
Blended = TypeVar("Blended", InjectionAdmitted, RebuildOrdered)

log: structlog.stdlib.BoundLogger = structlog.get_logger()


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


class Making:
    """The handlers that work on the adapter root and the store; long computations take turns."""

    def __init__(self, settings: Settings, engines: Engines, endpoints: Callable[[], Collection[str]]) -> None:
        """`endpoints` are those of the node's instances that the arbitrator last told of."""
        self._root = settings.adapters
        self._store = settings.store
        self._device: Device = settings.device
        self._engines = engines
        self._endpoints = endpoints
        self._bases = Bases()
        self._turn = asyncio.Lock()

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
        return await self._made(received.data, self._put)

    async def rebuild(self, received: Received[RebuildOrdered], emit: Emit) -> BlendStored:
        """Compute a version again whose files are gone or damaged. Raises RebuiltOtherwise, and as `blend`."""
        del emit
        return await self._made(received.data, self._put_again)

    async def delete(self, received: Received[DeleteOrdered], emit: Emit) -> BlendDeleted:
        """Delete a version and its print; what is gone already is fine. Raises StillUsed, NotAVersion, StoreUnusable.

        The arbitrator orders it once no instance holds the version; the engines of this node are asked once more.
        """
        del emit
        order = received.data
        if not core.deletable(order):
            raise NotAVersion(core.resident(order.blend, order.digest))
        stage("list")
        where = await self._engines.holding(order.version, self._endpoints())
        if where is not None:
            raise StillUsed(order.version, where)
        stage("delete")
        freed_bytes = await self._in_turn(partial(self._delete, order))
        return BlendDeleted(version=order.version, digest=order.digest, freed_bytes=freed_bytes)

    async def checked(self, resident: Resident) -> Version:
        """Hash the stored version that a resident is. Raises NotAVersion, MissingPath, StoreDamaged, StoreUnusable."""
        digest = core.stored_digest(resident)
        if digest is None:
            raise NotAVersion(resident)
        return await self._in_turn(partial(self._with_store, lambda store: store.check(digest)))

    async def _made(self, order: Blended, put: Callable[[Blended, Base], Version]) -> BlendStored:
        """Read the base, have the blend computed and put into the store, and tell what came of it."""
        began_us = clock.mono_us()
        stage("base")
        base = await self._in_turn(partial(self._bases.get, order.base))
        stage("blend")
        version = await self._in_turn(partial(put, order, base))
        return core.stored(order, version, base, clock.mono_us() - began_us)

    def _report(self, order: VerificationOrdered, base: Base) -> Report:
        try:
            return verify(Path(order.adapter.path), base, core.limits(order), root=self._root)
        except (OSError, EOFError) as error:
            raise MemberUnreadable(str(error)) from error

    def _put(self, order: InjectionAdmitted, base: Base) -> Version:
        return self._with_store(lambda store: store.put(self._builder(order, base)))

    def _put_again(self, order: RebuildOrdered, base: Base) -> Version:
        def is_it(digest: str) -> None:
            if core.resident(order.blend, digest).version != order.version:
                raise RebuiltOtherwise(order.version, digest)

        return self._with_store(lambda store: store.restore(self._builder(order, base), is_it))

    def _builder(self, order: InjectionAdmitted | RebuildOrdered, base: Base) -> Callable[[Path], Manifest]:
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

        return build

    def _delete(self, order: DeleteOrdered) -> int:
        freed_bytes = self._with_store(lambda store: store.delete(order.digest))
        if order.effect_print is not None:
            (self._root / order.effect_print.path).unlink(missing_ok=True)
        return freed_bytes

    def _with_store(self, job: Callable[[Store], Result]) -> Result:
        """Open the store for one job: what an earlier crash left there is swept by the way."""
        try:
            return job(Store(self._store))
        except EOFError as error:
            raise MemberUnreadable(str(error)) from error
        except OSError as error:
            raise StoreUnusable(self._store, str(error)) from error

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


def require_root(settings: Settings) -> None:
    """Raise MissingPath unless the adapter root is there."""
    if not settings.adapters.is_dir():
        raise MissingPath(f"no adapter root {settings.adapters}", hint="set KITE_ADAPTER_ROOT to the shared folder")


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
