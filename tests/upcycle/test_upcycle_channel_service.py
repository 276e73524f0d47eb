"""The report of the channel on a real bus and a fake engine process: two injections of one blend, and the windows that
a yoco would send meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest
import pytest_asyncio

from kite import clock
from kite.bus import Bus, tel_subject
from kite.engine import Engine, EngineProcess
from kite.events import Origin, compose, new_id
from kite.testing import adapters
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.engine import BASE_NAME
from kite.testing.eventually import eventually
from kite.testing.orders import ASKED, Said, facts, give, ordered
from kite_arbitrator.records import Row
from kite_arbitrator.routing import destination
from kite_schemas.proof import EffectProven
from kite_schemas.telemetry import InstanceWindow, Window
from kite_schemas.upcycle import (
    AdapterRef,
    BaseRef,
    BlendStored,
    ChannelSampled,
    DecaySet,
    InjectionAdmitted,
    LoadOrdered,
    Member,
    Resident,
)
from kite_upcycle.base import Base
from kite_upcycle.cache import SPAN_US
from kite_upcycle.reader import digest
from kite_upcycle.service import serve
from kite_upcycle.settings import Settings

NODE, INSTANCE, BLEND = "n1", "n1-tiny-0", "moved"
TTL_US = 60 * clock.US_PER_S
SOON_S = 60.0
YOCO = Origin("kite/yoco/n1", "yoco@test")


@dataclass
class Desk:
    """The places of arbitrator and yoco: orders, notices and windows go out, facts come in."""

    bus: Bus
    root: Path
    base: BaseRef
    engine: str
    service: asyncio.Task[None]
    boot: str = field(default_factory=new_id)
    windows: int = 0

    async def said(self, order: str) -> list[Said]:
        """Return what was said about an order so far; raise what ended the service."""
        if self.service.done():
            self.service.result()
        return [said for said in await facts(self.bus) if said.event.header.causationid == order]

    async def stored(self, seed: int) -> Resident:
        """Have one adapter blended and stored."""
        path = adapters.adapter(self.root / f"adapter-{seed}", Path(self.base.path), seed=seed)
        member = Member(adapter=AdapterRef(name=path.name, path=path.name, digest=digest(path)), weight_ppm=1_000_000)
        order = InjectionAdmitted(
            node=NODE, target=f"blend/{BLEND}", expires_us=1, ttl_us=TTL_US, why=ASKED, request=new_id(),
            blend=BLEND, base=self.base, members=(member,), base_weight_ppm=0, instances=(INSTANCE,), max_lora_rank=16,
        )  # fmt: skip
        event = await give(self.bus, "upcycle", order, f"blend/{BLEND}")
        (said,) = await eventually(lambda: self.said(event.header.id), SOON_S)
        assert isinstance(said.event.data, BlendStored), said.event.data
        return said.event.data.resident

    async def inject(self, resident: Resident) -> None:
        """Have a version loaded and proven."""
        order = LoadOrdered(
            node=NODE, target=f"load/{BLEND}@{INSTANCE}", expires_us=1, ttl_us=TTL_US, why=ASKED, request=new_id(),
            instance=INSTANCE, endpoint=self.engine, base=BASE_NAME, resident=resident, noise_micronats=0,
        )  # fmt: skip
        event = await give(self.bus, "upcycle", order, f"instance/{INSTANCE}")

        async def proven() -> bool:
            said = await self.said(event.header.id)
            return len(said) == 2 and isinstance(said[1].event.data, EffectProven)

        await eventually(proven, SOON_S)

    async def decay(self, base: str, decay_ppm: int) -> None:
        """Set a decay, as the arbitrator's relay publishes it."""
        notice = DecaySet(base=base, decay_ppm=decay_ppm, why=ASKED)
        event = ordered(notice, f"base/{base}")
        name = event.header.id
        row = Row(pos=1, id=name, type=notice.TYPE, subject=f"base/{base}", ledger_us=1, data=notice)
        await self.bus.publish(destination(row), event.raw, event_id=name)

    async def traffic(self, from_us: int, hits: int) -> None:
        """Send the windows of 5 s of traffic, from a moment on that may lie ahead; of 100 tokens in each, `hits` hit.

        A last window without anything says that the time is over.
        """
        for step in range(1, 52):
            self.windows += 1
            queries = 100 if step < 51 else 0
            told = InstanceWindow(id=INSTANCE, cache_queries=queries, cache_hits=min(hits, queries))
            at_us = from_us + step * SPAN_US // 50
            window = Window(
                node=NODE, boot=self.boot, seq=self.windows, interval_us=SPAN_US // 50, sampled_us=at_us,
                emitted_us=at_us, instances=(told,),
            )  # fmt: skip
            event = compose(f"node/{NODE}", window, YOCO)
            await self.bus.publish(tel_subject(NODE), event.raw, event_id=event.header.id)

    async def episode(self, resident: Resident, before: int, after: int) -> None:
        """Inject a version between 5 s of traffic before and 5 s after it."""
        await self.traffic(clock.wall_us() - SPAN_US - SPAN_US // 50, before)
        await self.inject(resident)
        await self.traffic(clock.wall_us(), after)

    async def reports(self) -> list[ChannelSampled]:
        """Return the reports so far, all of which are about the node."""
        if self.service.done():
            self.service.result()
        said = [said.event for said in await facts(self.bus) if isinstance(said.event.data, ChannelSampled)]
        assert {event.header.subject for event in said} <= {f"node/{NODE}"}
        return [event.data for event in said if isinstance(event.data, ChannelSampled)]

    async def report(self, **fields: int | None) -> ChannelSampled:
        """Wait for a report with these values, which must be the newest, and return it."""

        async def found() -> ChannelSampled | None:
            newest = (await self.reports())[-1:]
            fits = newest and all(getattr(newest[0], name) == value for name, value in fields.items())
            return newest[0] if fits else None

        told = await eventually(found, SOON_S)
        assert told is not None
        return told


@pytest_asyncio.fixture
async def desk(tmp_path: Path, tiny_base: Path, fake_server: EngineProcess) -> AsyncGenerator[Desk]:
    import_module("torch")  # seconds, in which no service in this loop could connect
    root = tmp_path / "root"
    root.mkdir()
    base = BaseRef(name=BASE_NAME, path=str(tiny_base), digest=Base.load(tiny_base).digest)
    async with nats(tmp_path) as server, await Bus.connect(server.url, "desk") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        settings = Settings(nats_url=server.url, node=NODE, state_dir=tmp_path / "state", adapter_root=root)
        service = asyncio.create_task(serve(settings))
        yield Desk(bus, root, base, fake_server.url, service)
        service.cancel()
        with suppress(asyncio.CancelledError):
            await service
    async with Engine(fake_server.url) as engine:
        for name in (await engine.models())[1:]:
            await engine.unload(name)


async def test_two_injections_of_one_blend_are_reported_with_what_they_did(desk: Desk) -> None:
    first, second = await desk.stored(1), await desk.stored(2)
    assert await desk.reports() == [ChannelSampled(node=NODE)]

    await desk.episode(first, before=80, after=20)
    fallen = await desk.report(kv_pollution_ppm=750_000)
    assert fallen.shifts == ()  # there was no version before it
    await desk.episode(second, before=20, after=80)  # what the first one's traffic has in this one's spans hit 20, too
    risen = await desk.report(kv_pollution_ppm=0)
    assert risen.shifts == ()  # it waits until its probes are no part of the 5 s

    await desk.decay("another", 500_000)
    await desk.decay(BASE_NAME, 710_000)
    await eventually(lambda: shifted(desk), SOON_S)
    told = await desk.report(decay_ppm=710_000, kv_pollution_ppm=0)
    (shift,) = told.shifts
    assert (shift.former, shift.version) == (first.version, second.version)
    assert shift.kl_micronats > 1_000

    reports = await desk.reports()
    assert len(reports) == len({report.model_dump_json() for report in reports})  # nothing is said twice


async def shifted(desk: Desk) -> bool:
    return bool((await desk.reports())[-1].shifts)


async def test_without_windows_the_pollution_is_absent_and_orders_go_on(desk: Desk) -> None:
    resident = await desk.stored(3)
    await desk.bus.publish(tel_subject(NODE), b"no window", event_id=new_id())
    await desk.decay(BASE_NAME, 930_000)
    await desk.inject(resident)
    told = await desk.report(decay_ppm=930_000)
    assert told == ChannelSampled(node=NODE, decay_ppm=930_000)


async def test_a_service_ends_at_once_though_a_shift_is_to_be_measured(desk: Desk) -> None:
    await desk.inject(await desk.stored(4))
    await desk.inject(await desk.stored(5))
    desk.service.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await desk.service
