"""Two nodes on one bus: a guard and an engine on each, and the core that tells them what to do.

The engines are real processes, and so is the bus; the arbitrator is its pure core, which the test feeds and whose
orders it publishes.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import pytest
import pytest_asyncio

from kite import probes, proof
from kite.bus import Bus
from kite.engine import Distribution, Engine, EngineProcess
from kite.events import compose
from kite.proof import Pair, read_pair, summary
from kite.testing import adapters
from kite.testing.engine import Adapters
from kite.testing.eventually import eventually
from kite.testing.llama import Llama, read_json, tensors
from kite.testing.orders import ARBITRATOR, facts, relay
from kite_arbitrator.state import current
from kite_arbitrator.testing import BASE, Story
from kite_guard.service import serve
from kite_guard.settings import Settings
from kite_schemas.guard import (
    Compared,
    ComparisonFailed,
    ComparisonOrdered,
    ComparisonRequested,
    DistributionMeasured,
    MeasurementOrdered,
)
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRequested, flatten
from kite_schemas.probes import Registered
from kite_schemas.upcycle import Frozen
from kite_schemas.yoco import Device, InstanceReady, NodeRegistered, SleepMode
from kite_schemas.yoco import Path as HowReady

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[Llama], "list[Tensor]"]

NODES = ("n1", "n2")
FIRST, SECOND = (f"{node}-{BASE}-0" for node in NODES)
FACT_S = 30.0
MAX_MICRONATS = 320_000
EXACT = 1e-6
GAP_MICRONATS = 4_000
"""How near the two blends of the threshold test are to each other, with the threshold between them."""


def fleet_of(first_url: str, second_url: str) -> Story:
    """One ready instance on each of two nodes, both with one promoted blend; the guard is off."""
    fleet = Story().begin(ready=1, standbys=0)
    (pool,) = cast("list[dict[str, object]]", flatten(current(fleet.state))["fleet.pools"])
    pools = [{**pool, "node": node} for node in NODES]
    change(fleet, "fleet.pools", pools)
    device = Device(id="cpu0", kind="cpu", memory_bytes=1 << 34)
    for number, (node, url) in enumerate(zip(NODES, (first_url, second_url), strict=True)):
        boot = f"00000000-0000-4000-8000-{number:012}"
        modes = (SleepMode.PAUSED,)
        fleet.tell(
            NodeRegistered(node=node, boot=boot, devices=(device,), memory_bytes=1 << 34, sleep_modes=modes),
            f"node/{node}",
        )
        fleet.tell(ready(node, url, fleet.open(f"instance/{node}-{BASE}-0")))
    fleet.promote("credit", weight_ppm=500_000)
    return fleet


def ready(node: str, url: str, order: str) -> InstanceReady:
    return InstanceReady(
        order=order,
        done=True,
        instance=f"{node}-{BASE}-0",
        node=node,
        path=HowReady.COLD,
        pid=1,
        endpoint=url,
        versions=(),
        noise_micronats=0,
        t_wake_us=1,
        t_first_token_us=2,
    )


def change(fleet: Story, key: str, value: object) -> None:
    wanted = Change.model_validate({"key": key, "value": value})
    fleet.tell(ChangeRequested(actor="t", changes=(wanted,)), "policy/fleet")


def version(fleet: Story) -> str:
    return fleet.state.blends["risk"].resident.version


@pytest_asyncio.fixture
async def guards(bus: Bus, tmp_path: Path) -> AsyncGenerator[dict[str, Path]]:
    """The guards of both nodes; gives their adapter roots, which are not shared here."""
    roots = {node: tmp_path / f"root-{node}" for node in NODES}
    tasks: list[asyncio.Task[None]] = []
    for node, root in roots.items():
        (state := tmp_path / f"state-{node}").mkdir()
        settings = Settings(nats_url=bus.url, node=node, state_dir=state, adapter_root=root)
        tasks.append(asyncio.create_task(serve(settings)))
    yield roots
    assert not [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


GUARDED = (MeasurementOrdered, ComparisonOrdered)
Guarded = MeasurementOrdered | ComparisonOrdered
Hook = Callable[[Guarded], Awaitable[None]]


async def carried_out(bus: Bus, fleet: Story, hook: Hook | None = None) -> list[Data]:
    """Publish the orders that were just given, tell the core what comes of them, and so on; return the facts.

    `hook` is awaited beside each order's work.
    """
    told: list[Data] = []
    while found := [row for row in fleet.last if isinstance(row.data, GUARDED)]:
        (row,) = found
        assert isinstance(row.data, GUARDED)
        told.append(await done(bus, fleet, row.id, row.data, hook))
    return told


async def done(bus: Bus, fleet: Story, order_id: str, order: Guarded, hook: Hook | None = None) -> Data:
    """Publish one order, tell the core what comes of it, and return that."""
    subject = f"instance/{FIRST}"
    await relay(bus, "guard", compose(subject, order, ARBITRATOR, event_id=order_id, correlation=order_id))
    if hook is not None:
        await hook(order)
    fact = await eventually(lambda: answer(bus, order_id), FACT_S)
    assert fact is not None
    fleet.tell(fact, subject)
    return fact


async def answer(bus: Bus, order: str) -> Data | None:
    events = [said.event for said in await facts(bus)]
    return next((event.data for event in events if event.header.causationid == order), None)


async def asked_for(bus: Bus, fleet: Story, hook: Hook | None = None) -> Data:
    """Have the two instances compared on request, and return the last fact."""
    fleet.tell(ComparisonRequested(actor="t", first=FIRST, second=SECOND), f"instance/{FIRST}")
    return (await carried_out(bus, fleet, hook))[-1]


@pytest.mark.usefixtures("guards")
async def test_equal_instances_of_two_nodes_agree_exactly(
    bus: Bus, sides: tuple[Engine, Engine], tiny_adapters: Adapters
) -> None:
    fleet = fleet_of(sides[0].url, sides[1].url)
    for side in sides:
        await side.load(version(fleet), str(tiny_adapters.good))
    change(fleet, "guard.enabled", value=True)
    one, other, last = await carried_out(bus, fleet)
    assert isinstance(one, DistributionMeasured)
    assert isinstance(other, DistributionMeasured)
    assert (one.instance, other.instance) == (FIRST, SECOND)
    assert {len(position.tokens) for position in one.positions} == {20}
    assert isinstance(last, Compared)
    assert (last.first, last.second, last.model) == (FIRST, SECOND, version(fleet))
    assert (last.kl_micronats, last.p99_micronats) == (0, 0)
    assert (last.positions, last.probes) == (len(probes.default().prompts), probes.default().digest)
    assert last.covered_ppm > 800_000
    assert fleet.state.watches["risk"].verdict_us > 0
    assert fleet.state.freeze is None


@pytest.mark.usefixtures("guards")
async def test_across_nodes_the_divergence_is_that_of_one_node(
    bus: Bus, sides: tuple[Engine, Engine], tiny_adapters: Adapters
) -> None:
    """Integers on the way cost a millionth of a nat, and no probe is told to the bus."""
    fleet = fleet_of(sides[0].url, sides[1].url)
    await sides[0].load(version(fleet), str(tiny_adapters.good))
    await sides[1].load(version(fleet), str(tiny_adapters.matchless))
    found = await asked_for(bus, fleet)
    direct = await read_pair(sides[0], version(fleet), sides[1], version(fleet), probes.default().prompts)
    assert isinstance(found, Compared)
    assert abs(found.kl_micronats - direct.kl_micronats) <= 1
    assert found.p99_micronats == pytest.approx(direct.p99_micronats, rel=EXACT)
    assert abs(found.covered_ppm - direct.covered_ppm) <= 1
    assert found.kl_micronats > MAX_MICRONATS
    everything = b"".join(said.raw for said in await facts(bus))
    assert not [prompt for prompt in probes.default().prompts if len(prompt) > 7 and prompt.encode() in everything]


def strength(folder: Path, good: Path, share: float) -> Path:
    """Write an adapter whose change is so much of another's, in float32."""
    scaled = {
        key: tensor * share if key.endswith(".lora_B.weight") else tensor
        for key, tensor in tensors(good / "adapter_model.safetensors").items()
    }
    return adapters.write_adapter(folder, scaled, dict(read_json(good / "adapter_config.json")))


@pytest.fixture(scope="module")
def around(tiny_model: Llama, read: Read, tiny_adapters: Adapters) -> dict[str, float]:
    """Two shares of an adapter: by torch one is just over the limit from the whole of it, the other just under."""
    whole = read(tiny_model.merged([(tiny_adapters.good, 1.0)]))

    def shift(share: float) -> int:
        part = read(tiny_model.merged([(tiny_adapters.good, share)]))
        return summary([union(p, q) for p, q in zip(whole, part, strict=True)]).kl_micronats

    over, under = (0.0, shift(0.0)), (1.0, 0)
    while over[1] - under[1] > GAP_MICRONATS:
        share = (over[0] + under[0]) / 2
        middle = share, shift(share)
        over, under = (middle, under) if middle[1] > MAX_MICRONATS else (over, middle)
    return {"over": over[0], "under": under[0]}


def union(p: "Tensor", q: "Tensor") -> Pair:
    """Return two distributions over the 20 likeliest tokens of both."""
    tokens = sorted({int(token) for side in (p, q) for token in side.topk(20).indices})
    first, second = (Distribution({token: float(side[token]) for token in tokens}) for side in (p, q))
    return first, second


@pytest.mark.usefixtures("guards")
@pytest.mark.parametrize(("name", "freezes"), [("under", []), ("over", ["risk"])])
async def test_a_known_shift_is_caught_at_the_threshold_from_both_sides(  # noqa: PLR0917 - fixtures
    bus: Bus,
    sides: tuple[Engine, Engine],
    around: dict[str, float],
    tiny_adapters: Adapters,
    tmp_path: Path,
    name: str,
    freezes: list[str],
) -> None:
    """A blend that lost some of its strength on one node: just under 0.32 nats nothing happens, just over it does."""
    fleet = fleet_of(sides[0].url, sides[1].url)
    weak = strength(tmp_path / name, tiny_adapters.good, around[name])
    await sides[0].load(version(fleet), str(tiny_adapters.good))
    await sides[1].load(version(fleet), str(weak))
    change(fleet, "guard.enabled", value=True)
    found = (await carried_out(bus, fleet))[-1]
    assert isinstance(found, Compared)
    assert abs(found.kl_micronats - MAX_MICRONATS) <= GAP_MICRONATS, f"at {around[name]} of the adapter"
    assert [row.data.blend for row in fleet.decided if isinstance(row.data, Frozen)] == freezes


@pytest.mark.usefixtures("guards")
async def test_what_cannot_be_measured_on_one_node_is_no_agreement(
    bus: Bus, sides: tuple[Engine, Engine], tiny_adapters: Adapters
) -> None:
    fleet = fleet_of(sides[0].url, sides[1].url)
    change(fleet, "expiry.compare_us", value=2_000_000)
    first, second = sides
    await first.load(version(fleet), str(tiny_adapters.good))

    async def code() -> str:
        found = await asked_for(bus, fleet)
        assert isinstance(found, ComparisonFailed)
        assert (found.first, found.second) == (FIRST, SECOND)
        return found.code

    assert await code() == "model_unknown"
    await second.load(version(fleet), str(tiny_adapters.nan))
    assert await code() == "not_finite"
    await second.pause()
    assert await code() == "timeout"
    await second.resume()
    await first.pause()
    assert await code() == "timeout"
    assert fleet.state.watches["risk"].verdict_us == 0


@pytest.mark.usefixtures("guards")
async def test_an_instance_that_goes_in_mid_comparison_is_no_agreement(
    bus: Bus, sides: tuple[Engine, Engine], going: EngineProcess, tiny_adapters: Adapters
) -> None:
    fleet = fleet_of(sides[0].url, going.url)
    change(fleet, "guard.enabled", value=True)
    await sides[0].load(version(fleet), str(tiny_adapters.good))
    async with Engine(going.url) as other:
        await other.load(version(fleet), str(tiny_adapters.good))
        await other.pause()  # it takes the question, and has not answered when it goes

    async def end(order: Guarded) -> None:
        if order.node == NODES[1]:
            await eventually(lambda: connected(going), FACT_S)
            await going.stop(0)

    first, last = await carried_out(bus, fleet, end)
    assert isinstance(first, DistributionMeasured)
    assert isinstance(last, ComparisonFailed)
    assert last.code == "unreachable"
    assert fleet.state.orders == {}
    assert fleet.state.watches["risk"].verdict_us == 0


def connected(server: EngineProcess) -> bool:
    """Say whether this process is connected to a server."""
    port = int(server.url.rpartition(":")[2])
    return any(one.raddr and one.raddr.port == port for one in psutil.Process().net_connections("tcp4"))


async def test_both_nodes_ask_the_set_that_is_in_force(
    bus: Bus, sides: tuple[Engine, Engine], guards: dict[str, Path], tiny_adapters: Adapters
) -> None:
    fleet = fleet_of(sides[0].url, sides[1].url)
    for side in sides:
        await side.load(version(fleet), str(tiny_adapters.good))
    own = probes.read("\n".join(probes.default().prompts[4:]).encode(), "set.txt")
    path = proof.keep_probes(guards[NODES[0]], own)
    fleet.tell(Registered(actor="t", base=BASE, digest=own.digest, path=path, probes=len(own.prompts)), f"base/{BASE}")
    absent = await asked_for(bus, fleet)  # the second node does not mount the same adapter root
    assert isinstance(absent, ComparisonFailed)
    assert absent.code == "probes_missing"
    proof.keep_probes(guards[NODES[1]], own)
    found = await asked_for(bus, fleet)
    assert isinstance(found, Compared)
    assert (found.positions, found.probes, found.kl_micronats) == (13, own.digest, 0)
