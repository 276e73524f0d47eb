"""The arbitrator's place in tests of upcycle: it orders as the arbitrator does, and reads what is told."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from kite import clock
from kite.bus import EVT, Bus, dec_subject
from kite.events import Origin, compose, new_id
from kite.testing import adapters, zoo
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.engine import BASE_NAME
from kite.testing.eventually import eventually
from kite_schemas.envelope import Event, decode
from kite_schemas.upcycle import (
    AdapterLimits,
    AdapterRef,
    BaseRef,
    BlendLoaded,
    BlendStored,
    DeleteOrdered,
    DriftObserved,
    EffectPrint,
    InjectionAdmitted,
    LoadOrdered,
    Member,
    RebuildOrdered,
    Resident,
    ResidentsSet,
    RetireOrdered,
    RollbackOrdered,
    VerificationOrdered,
)
from kite_schemas.why import Order, Outcome, Reason, Why
from kite_upcycle.base import Base
from kite_upcycle.reader import digest
from kite_upcycle.service import SERVICE, serve
from kite_upcycle.settings import Settings

NODE, INSTANCE = "n1", "n1-tiny-0"
TTL_US = 60 * clock.US_PER_S
LOOK_US = 200_000
OUTCOME_S = 60.0
ARBITRATOR = Origin(source="kite/arbitrator/test", producer="arbitrator@test")
WHY = Why(reason=Reason.ASKED)
TRACEPARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

Told = TypeVar("Told", bound=Outcome)


@dataclass
class Desk:
    """The arbitrator's place: it publishes orders as the arbitrator does, and reads what is told about them."""

    bus: Bus
    url: str
    root: Path
    state: Path
    base: BaseRef
    request: str = field(default_factory=new_id)
    service: asyncio.Task[None] | None = None

    @property
    def settings(self) -> Settings:
        return Settings(nats_url=self.url, node=NODE, state_dir=self.state, adapter_root=self.root)

    async def publish(self, order: Order, subject: str) -> str:
        """Publish an order; return its id."""
        event = compose(
            subject, order, ARBITRATOR, correlation=self.request, causation=self.request, traceparent=TRACEPARENT
        )
        name = event.header.id
        kind = order.TYPE.split(".")[2]
        await self.bus.publish(dec_subject(SERVICE, NODE, kind, order.target), event.raw, event_id=name)
        return name

    async def facts(self, order: str) -> list[Event]:
        """Return what was told about an order so far."""
        last = (await self.bus.stream(EVT)).last_seq
        messages = [await self.bus.message(EVT, seq) for seq in range(1, last + 1)]
        events = [decode(message.payload) for message in messages if message is not None]
        return [event for event in events if isinstance(event.data, Outcome) and event.data.order == order]

    async def outcomes(self, order: str) -> list[Outcome]:
        return [event.data for event in await self.facts(order) if isinstance(event.data, Outcome)]

    async def ended(self, order: str) -> Outcome | None:
        if self.service is not None and self.service.done():
            self.service.result()  # raises what ended it
        return next((outcome for outcome in await self.outcomes(order) if outcome.done), None)

    async def loaded(self, order: str) -> bool:
        return any(isinstance(outcome, BlendLoaded) for outcome in await self.outcomes(order))

    async def outcome(self, kind: type[Told], order: str) -> Told:
        """Wait for the last outcome of an order, which must be of this kind."""
        found = await eventually(lambda: self.ended(order), OUTCOME_S)
        assert isinstance(found, kind), found  # noqa: S101 # for tests
        return found

    # --- orders

    def adapter(self, name: str, *, seed: int = 1, rank: int = 4) -> AdapterRef:
        """Write a good adapter below the root."""
        path = adapters.adapter(self.root / "adapters" / name, Path(self.base.path), seed=seed, rank=rank)
        return self.reference(path)

    def defective(self, good: AdapterRef, kind: str) -> AdapterRef:
        return self.reference(zoo.defective(self.root / good.path, self.root / "adapters" / kind, kind))

    def reference(self, path: Path) -> AdapterRef:
        return AdapterRef(name=path.name, path=str(path.relative_to(self.root)), digest=digest(path))

    async def verify(self, adapter: AdapterRef, *, base: BaseRef | None = None, rank: int = 16) -> str:
        order = VerificationOrdered(
            node=NODE, target="blend/risk", expires_us=1, ttl_us=TTL_US, why=WHY,
            request=self.request, blend="risk", adapter=adapter, base=base or self.base,
            limits=AdapterLimits(max_lora_rank=rank, params_share_max_ppm=8_000),
        )  # fmt: skip
        return await self.publish(order, "blend/risk")

    async def admit(
        self, *members: tuple[AdapterRef, int], blend: str = "risk", rank: int = 16, residual_max_ppm: int | None = None
    ) -> str:
        order = InjectionAdmitted(
            node=NODE, target=f"blend/{blend}", expires_us=1, ttl_us=TTL_US, why=WHY,
            request=self.request, blend=blend, base=self.base,
            members=tuple(Member(adapter=adapter, weight_ppm=weight) for adapter, weight in members),
            base_weight_ppm=1_000_000 - sum(weight for _, weight in members),
            instances=(INSTANCE,), max_lora_rank=rank, residual_max_ppm=residual_max_ppm,
        )  # fmt: skip
        return await self.publish(order, f"blend/{blend}")

    async def load(self, resident: Resident, endpoint: str) -> str:
        order = LoadOrdered(
            node=NODE, target=f"load/{resident.blend}@{INSTANCE}", expires_us=1, ttl_us=TTL_US, why=WHY,
            request=self.request, instance=INSTANCE, endpoint=endpoint, base=BASE_NAME, resident=resident,
            noise_micronats=0,
        )  # fmt: skip
        return await self.publish(order, f"instance/{INSTANCE}")

    async def roll_back(self, version: str, endpoint: str, *, slot: int | None = None, base: str | None = None) -> str:
        order = RollbackOrdered(
            node=NODE, target=f"load/{version.partition('@')[0]}@{INSTANCE}", expires_us=1, ttl_us=TTL_US, why=WHY,
            request=self.request, instance=INSTANCE, endpoint=endpoint, version=version, slot=slot, base=base,
        )  # fmt: skip
        return await self.publish(order, f"instance/{INSTANCE}")

    async def retire(self, version: str, endpoint: str, slot: int | None = None) -> str:
        order = RetireOrdered(
            node=NODE, target=f"retire/{version}@{INSTANCE}", expires_us=1, ttl_us=TTL_US, why=WHY,
            blend=version.partition("@")[0], instance=INSTANCE, endpoint=endpoint, version=version, slot=slot,
        )  # fmt: skip
        return await self.publish(order, f"instance/{INSTANCE}")

    async def delete(self, resident: Resident, effect_print: EffectPrint | None = None) -> str:
        order = DeleteOrdered(
            node=NODE, target=f"store/{resident.path[-64:]}", expires_us=1, ttl_us=TTL_US, why=WHY,
            blend=resident.blend, version=resident.version, digest=resident.path[-64:], effect_print=effect_print,
        )  # fmt: skip
        return await self.publish(order, f"blend/{resident.blend}")

    async def rebuild(self, version: str, *members: tuple[AdapterRef, int]) -> str:
        blend = version.partition("@")[0]
        order = RebuildOrdered(
            node=NODE, target=f"blend/{blend}", expires_us=1, ttl_us=TTL_US, why=WHY,
            request=self.request, blend=blend, version=version, base=self.base,
            members=tuple(Member(adapter=adapter, weight_ppm=weight) for adapter, weight in members),
            base_weight_ppm=1_000_000 - sum(weight for _, weight in members), max_lora_rank=16,
        )  # fmt: skip
        return await self.publish(order, f"blend/{blend}")

    async def expect(self, endpoint: str, *residents: Resident, interval_us: int = LOOK_US) -> str:
        """Tell the service what the instance should hold; return the decision's id."""
        notice = residents_set(endpoint, *residents, interval_us=interval_us)
        event = compose(f"instance/{INSTANCE}", notice, ARBITRATOR, correlation=self.request, causation=self.request)
        subject = dec_subject(SERVICE, NODE, "residents_set", f"instance/{INSTANCE}")
        await self.bus.publish(subject, event.raw, event_id=event.header.id)
        return event.header.id

    async def drifts(self) -> list[DriftObserved]:
        """Return what was said about drift so far."""
        last = (await self.bus.stream(EVT)).last_seq
        messages = [await self.bus.message(EVT, seq) for seq in range(1, last + 1)]
        found = [decode(message.payload).data for message in messages if message is not None]
        return [data for data in found if isinstance(data, DriftObserved)]

    async def drifted(self, number: int) -> DriftObserved:
        """Wait for so many words about drift, and return the last of them."""

        async def told() -> list[DriftObserved]:
            found = await self.drifts()
            return found if len(found) >= number else []

        return (await eventually(told, OUTCOME_S))[number - 1]

    async def stored(self, blend: str = "risk", *, seed: int = 1) -> Resident:
        """Let upcycle blend and store one adapter at full weight."""
        order = await self.admit((self.adapter(f"{blend}-{seed}", seed=seed), 1_000_000), blend=blend)
        return (await self.outcome(BlendStored, order)).resident


def residents_set(endpoint: str, *residents: Resident, interval_us: int = LOOK_US) -> ResidentsSet:
    """Return the word about what the instance should hold."""
    return ResidentsSet(
        node=NODE, instance=INSTANCE, endpoint=endpoint, base=BASE_NAME, residents=residents,
        interval_us=interval_us, why=WHY,
    )  # fmt: skip


@asynccontextmanager
async def desk(folder: Path, tiny_base: Path) -> AsyncGenerator[Desk]:
    """Put up a bus with its streams, an empty adapter root and a desk, in a folder."""
    import_module("torch")  # seconds, in which no service in this loop could connect
    root, state = folder / "root", folder / "state"
    root.mkdir()
    base = BaseRef(name=BASE_NAME, path=str(tiny_base), digest=Base.load(tiny_base).digest)
    async with nats(folder) as server, await Bus.connect(server.url, "desk") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        yield Desk(bus, server.url, root, state, base)


@asynccontextmanager
async def working(desk: Desk) -> AsyncGenerator[None]:
    """Run the service inside this process."""
    desk.service = asyncio.create_task(serve(desk.settings))
    try:
        yield
    finally:
        desk.service.cancel()
        with suppress(asyncio.CancelledError):
            await desk.service
