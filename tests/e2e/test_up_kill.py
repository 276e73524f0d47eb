"""Services that are killed: they come back, and the ledger shows that nothing was lost or done twice."""

import signal
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from kite.ledger import Reader
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_cli.asking.capacity import order
from kite_cli.asking.request import Injection, change, inject
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import Options
from kite_cli.embedded.supervisor import RESTARTS_MAX, ServiceFailed
from kite_cli.testing import left
from kite_incident.replay import verify
from kite_schemas.envelope import Event, decode
from kite_schemas.ledger import LeaseTaken
from kite_schemas.upcycle import AdapterVerified, BlendStored, Ending, InjectionClosed, LoadOrdered
from kite_schemas.yoco import StartOrdered


@pytest.fixture
def options(tiny_base: Path, tmp_path: Path) -> Options:
    return Options(base=tiny_base, name="tiny", engine="fake", dir=tmp_path / "fleet", max_lora_rank=16)


@pytest_asyncio.fixture
async def fleet(options: Options) -> AsyncGenerator[Fleet]:
    async with embedded(options) as fleet:
        await fleet.wait_settled()
        yield fleet
    assert left(fleet.dir) == []


@pytest.fixture
def brought(tiny_base: Path, tmp_path: Path) -> list[Path]:
    """Three adapters, to be injected one after the other."""
    names = ("one", "two", "three")
    return [adapters.adapter(tmp_path / name, tiny_base, seed=seed) for seed, name in enumerate(names)]


def check_history(fleet: Fleet, *, epochs: int) -> Counter[str]:
    """Dense, chained, each event once, every decision as replay takes it; return how often each type is there."""
    with Reader.open(fleet.ledger_url) as reader:
        reader.verify_chain()
        rows = list(reader.rows())
        assert [row.pos for row in rows] == list(range(1, len(rows) + 1))
        assert max(Counter(row.event_id for row in rows).values()) == 1
        assert verify(reader).identical
        kinds = Counter(row.type for row in rows)
        assert kinds[LeaseTaken.TYPE] == reader.head.epoch == epochs
    return kinds


async def inject_and_kill(fleet: Fleet, adapter: Path, service: str, moment: type[object]) -> Injection:
    """Inject, and kill a service when an event of this type is seen."""
    killed: list[int] = []

    def see(event: Event) -> None:
        if isinstance(event.data, moment) and not killed:
            killed.append(fleet.pid(service))
            fleet.kill(service, signal.SIGKILL)

    outcome = await inject(fleet, adapter=adapter, base="tiny", blend="risk", on_event=see)
    assert killed, outcome.detail
    await eventually(lambda: fleet.pid(service) != killed[0])
    return outcome


async def test_a_killed_arbitrator_loses_and_doubles_nothing(fleet: Fleet, brought: list[Path]):
    for adapter, moment in zip(brought, (AdapterVerified, BlendStored, LoadOrdered), strict=True):
        outcome = await inject_and_kill(fleet, adapter, "arbitrator", moment)
        assert outcome.ending is Ending.PROMOTED
    kinds = check_history(fleet, epochs=4)
    assert kinds[InjectionClosed.TYPE] == 3
    assert {m.adapter.name for m in fleet.state().blends["risk"].members} == {"one", "two", "three"}


async def test_every_service_comes_back(fleet: Fleet, brought: list[Path]):
    told: list[str] = []
    fleet.listen(told.append)
    before = {name: fleet.pid(name) for name in fleet.services}
    for name in before:
        fleet.kill(name)
    await eventually(lambda: all(fleet.pid(name) != pid for name, pid in before.items()), deadline_s=30)
    await fleet.wait_settled(60)
    assert len(told) == len(before)
    assert (await inject(fleet, adapter=brought[0], base="tiny")).ok
    assert (await order(fleet, "tiny")).ok
    assert (await change(fleet, [("upcycle.weight_min_ppm", 20_000)])).ok
    check_history(fleet, epochs=2)


async def test_a_killed_yoco_keeps_its_engines(fleet: Fleet) -> None:
    endpoints = {one.id: (one.state, one.endpoint) for one in fleet.state().instances.values()}
    assert len(endpoints) == 2
    before = fleet.pid("yoco")
    fleet.kill("yoco")
    await eventually(lambda: fleet.pid("yoco") != before)
    await fleet.wait_settled(60)
    assert {one.id: (one.state, one.endpoint) for one in fleet.state().instances.values()} == endpoints
    assert (await order(fleet, "tiny")).ok, "the standby can be woken by the yoco that found it"
    kinds = check_history(fleet, epochs=1)
    assert kinds[StartOrdered.TYPE] == 2


async def kill_for_ever(options: Options, service: str) -> None:
    """Run a fleet, and kill one of its services whenever it is there."""
    async with embedded(options) as fleet:
        while True:
            pid = fleet.pid(service)
            fleet.kill(service)
            await eventually(lambda pid=pid: fleet.pid(service) != pid)


async def test_a_service_that_keeps_ending_ends_the_fleet(options: Options):
    with pytest.raises(ServiceFailed, match=f"guard ended {RESTARTS_MAX + 1} times within a minute") as caught:
        await kill_for_ever(options, "guard")
    assert "guard.log" in caught.value.hint
    assert left(options.dir) == []


async def test_an_error_of_the_block_ends_the_fleet(options: Options):
    with pytest.raises(ZeroDivisionError):
        async with embedded(options):
            _ = 1 / 0
    assert left(options.dir) == []


async def test_events_reach_whoever_waits(fleet: Fleet, brought: list[Path]):
    seen: list[str] = []
    outcome = await inject(
        fleet, adapter=brought[0], base="tiny", on_event=lambda event: seen.append(event.header.type.split(".")[2])
    )
    assert seen[-1] == "injection_closed"
    assert set(seen) >= {"adapter_verified", "injection_admitted", "blend_stored", "effect_proven", "blend_promoted"}
    with Reader.open(fleet.ledger_url) as reader:
        own = [row for row in reader.rows() if decode(row.raw).header.correlationid == outcome.story.request]
    assert [fact.pos for fact in outcome.story.facts][1:] == [row.pos for row in own][: len(outcome.story.facts) - 1]
