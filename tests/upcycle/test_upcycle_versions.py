"""What becomes of a version after its proof: retired, deleted, computed again, and looked after, on a real bus."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kite.engine import Engine, EngineProcess
from kite.testing import adapters, zoo
from kite.testing.engine import BASE_NAME, tiny_spec
from kite.testing.eventually import eventually
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.upcycle import (
    BlendDeleted,
    BlendFailed,
    BlendLoaded,
    BlendStored,
    BlendUnloaded,
    DeleteFailed,
    DriftObserved,
    EffectPrint,
    LoadFailed,
    Resident,
    RetireFailed,
    RolledBack,
)
from kite_upcycle.core import STORE
from kite_upcycle.drift import Drift
from kite_upcycle.engines import Engines
from kite_upcycle.reader import TENSORS_NAME, digest
from kite_upcycle.store import Store
from kite_upcycle.testing.desk import INSTANCE, OUTCOME_S, TTL_US, Desk, residents_set, working
from kite_upcycle.testing.desk import desk as at_desk

LONG_TOKENS = 256
"""A request so long that a fake engine is still at it when the next line of a test runs."""

pytestmark = pytest.mark.usefixtures("upcycle")


@pytest_asyncio.fixture
async def desk(tmp_path: Path, tiny_base: Path) -> AsyncGenerator[Desk]:
    async with at_desk(tmp_path, tiny_base) as desk:
        yield desk


@pytest_asyncio.fixture
async def upcycle(desk: Desk) -> AsyncGenerator[None]:
    async with working(desk):
        yield


@pytest.fixture(scope="session", params=["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_url(request: pytest.FixtureRequest) -> str:
    """The address of a running engine with the tiny base."""
    server: EngineProcess = request.getfixturevalue(f"{request.param}_server")
    return server.url


async def loaded(desk: Desk, resident: Resident, url: str) -> tuple[BlendLoaded, EffectProven]:
    """Have a version loaded and proven."""
    order = await desk.load(resident, url)
    proven = await desk.outcome(EffectProven, order)
    first = (await desk.outcomes(order))[0]
    assert isinstance(first, BlendLoaded)
    return first, proven


# ------------------------------------------------------------------------------------------------------------- retire


async def test_a_retired_version_leaves_its_name_and_its_slot(desk: Desk, engine_url: str) -> None:
    resident = await desk.stored("retired")
    told, _ = await loaded(desk, resident, engine_url)
    assert told.slot is not None
    assert told.slots_taken is not None
    unloaded = await desk.outcome(BlendUnloaded, await desk.retire(resident.version, engine_url, told.slot))
    assert unloaded.slots_taken == told.slots_taken - 1
    async with Engine(engine_url) as engine:
        assert resident.version not in await engine.models()
        assert told.slot not in (await engine.held() or ())
    again = await desk.outcome(BlendUnloaded, await desk.retire(resident.version, engine_url, told.slot))
    assert again.slots_taken == unloaded.slots_taken


async def test_without_its_number_an_unloaded_version_keeps_its_slot_until_the_engine_evicts_it(
    desk: Desk, fake_server: EngineProcess
) -> None:
    resident = await desk.stored("unnumbered")
    told, _ = await loaded(desk, resident, fake_server.url)
    unloaded = await desk.outcome(BlendUnloaded, await desk.retire(resident.version, fake_server.url))
    assert unloaded.slots_taken == told.slots_taken
    async with Engine(fake_server.url) as engine:
        assert told.slot is not None
        await engine.drop(told.slot)


async def test_a_retirement_waits_for_the_requests_that_use_the_version(desk: Desk, engine_url: str) -> None:
    resident = await desk.stored("drained")
    await loaded(desk, resident, engine_url)
    async with Engine(engine_url) as engine:
        request = asyncio.create_task(engine.complete(resident.version, [1, 2, 3], LONG_TOKENS))
        await eventually(lambda: engine.in_use(resident.version), OUTCOME_S)
        order = await desk.retire(resident.version, engine_url)

        async def unlisted() -> bool:
            return resident.version not in await engine.models()

        await eventually(unlisted, OUTCOME_S)
        assert request.done() or await desk.ended(order) is None
        assert await request == LONG_TOKENS
    await desk.outcome(BlendUnloaded, order)


async def test_an_engine_that_is_gone_fails_the_retirement(desk: Desk) -> None:
    failed = await desk.outcome(RetireFailed, await desk.retire("risk@" + "0" * 12, "http://127.0.0.1:9"))
    assert failed.code == "engine_unreachable"


# ------------------------------------------------------------------------------------------------------------- delete


async def test_a_version_is_deleted_with_its_print_and_a_second_time_is_fine(
    desk: Desk, fake_server: EngineProcess
) -> None:
    resident = await desk.stored("deleted")
    _, proven = await loaded(desk, resident, fake_server.url)
    size = sum(path.stat().st_size for path in (desk.root / resident.path).iterdir())
    refused = await desk.outcome(DeleteFailed, await desk.delete(resident))
    assert refused.code == "in_use"
    assert (desk.root / resident.path).is_dir()

    await desk.outcome(BlendUnloaded, await desk.retire(resident.version, fake_server.url))
    deleted = await desk.outcome(BlendDeleted, await desk.delete(resident, proven.effect_print))
    assert deleted.freed_bytes == size
    assert not (desk.root / resident.path).exists()
    assert not (desk.root / proven.effect_print.path).exists()
    assert (await desk.outcome(BlendDeleted, await desk.delete(resident, proven.effect_print))).freed_bytes == 0
    assert not list((desk.root / "store" / "incoming").iterdir())


async def test_nothing_but_a_version_under_its_own_name_is_deleted(desk: Desk) -> None:
    resident = await desk.stored("named")
    other = resident.model_copy(update={"version": "named@" + "0" * 12})
    assert (await desk.outcome(DeleteFailed, await desk.delete(other))).code == "not_a_version"
    adapter = desk.adapter("mine")
    elsewhere = EffectPrint(path=f"{adapter.path}/{TENSORS_NAME}", digest="0" * 64, distance_micronats=1)
    assert (await desk.outcome(DeleteFailed, await desk.delete(resident, elsewhere))).code == "not_a_version"
    assert (desk.root / elsewhere.path).is_file()
    assert (desk.root / resident.path).is_dir()


async def test_a_restarted_upcycle_asks_the_engines_that_it_was_told_of_before_it_deletes(
    desk: Desk, fake_server: EngineProcess
) -> None:
    assert desk.service is not None
    resident = await desk.stored("listed")
    await loaded(desk, resident, fake_server.url)
    await desk.expect(fake_server.url, interval_us=TTL_US)
    await desk.drifted(1)
    desk.service.cancel()
    await asyncio.gather(desk.service, return_exceptions=True)
    async with working(desk):
        assert (await desk.outcome(DeleteFailed, await desk.delete(resident))).code == "in_use"
        await desk.outcome(BlendUnloaded, await desk.retire(resident.version, fake_server.url))


# ------------------------------------------------------------------------------------------------------------ rebuild


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def cut(folder: Path) -> None:
    tensors = folder / TENSORS_NAME
    content = tensors.read_bytes()
    tensors.chmod(0o644)
    tensors.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("harm", [remove, cut])
async def test_a_damaged_version_is_computed_again_byte_for_byte(desk: Desk, harm: Callable[[Path], None]) -> None:
    credit = desk.adapter("credit")
    stored = await desk.outcome(BlendStored, await desk.admit((credit, 1_000_000)))
    folder = desk.root / stored.resident.path
    assert stored.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    harm(folder)
    rebuilt = await desk.outcome(BlendStored, await desk.rebuild(stored.resident.version, (credit, 1_000_000)))
    assert rebuilt.resident == stored.resident
    assert digest(folder) == stored.digest
    assert Store(desk.settings.store).check(stored.digest).digest == stored.digest


async def test_members_that_give_another_version_are_no_repair(desk: Desk) -> None:
    stored = await desk.stored("changed")
    other = desk.adapter("other", seed=7)
    before = sorted((desk.root / "store" / "sha256").iterdir())
    failed = await desk.outcome(BlendFailed, await desk.rebuild(stored.version, (other, 1_000_000)))
    assert failed.code == "differs"
    assert sorted((desk.root / "store" / "sha256").iterdir()) == before


async def test_a_damaged_version_is_not_loaded(desk: Desk, fake_server: EngineProcess) -> None:
    resident = await desk.stored("cut")
    cut(desk.root / resident.path)
    failed = await desk.outcome(LoadFailed, await desk.load(resident, fake_server.url))
    assert failed.code == "store_damaged"


# -------------------------------------------------------------------------------------------------------------- drift


async def test_a_drift_is_said_once_and_its_end_as_well(desk: Desk, fake_server: EngineProcess) -> None:
    resident = await desk.stored("drifting")
    decision = await desk.expect(fake_server.url, resident)
    first = await desk.drifted(1)
    assert (first.told, first.instance, first.expected) == (decision, INSTANCE, (resident.version,))
    assert resident.version not in first.found
    await loaded(desk, resident, fake_server.url)
    second = await desk.drifted(2)
    assert resident.version in second.found
    assert not second.missing


async def test_what_is_told_of_right_after_it_was_seen_is_no_drift(desk: Desk, fake_server: EngineProcess) -> None:
    """A look between a load and the word about it finds what nobody has told of yet."""
    resident, said = await desk.stored("late"), list[DriftObserved]()

    async def report(found: DriftObserved) -> None:
        said.append(found)

    async def reported() -> list[DriftObserved]:
        await drift.look(report)
        return said

    async with Engines() as engines, Engine(fake_server.url) as engine:
        drift = Drift(engines, desk.root / STORE)
        await engine.load(resident.version, str(desk.root / resident.path))
        for _ in range(3):  # each time it is seen, and told of before it is looked at again
            drift.hear(residents_set(fake_server.url), desk.request)
            assert await reported() == []
        (found,) = await eventually(reported, OUTCOME_S)
        assert (found.told, found.expected) == (desk.request, ())
        assert resident.version in found.found
        await engine.unload(resident.version)


async def test_a_folder_that_is_gone_or_changed_is_noticed_though_the_engine_lists_the_version(
    desk: Desk, fake_server: EngineProcess
) -> None:
    resident = await desk.stored("eroding")
    await loaded(desk, resident, fake_server.url)
    await desk.expect(fake_server.url, resident)
    cut(desk.root / resident.path)

    async def said() -> bool:
        return any(drift.missing == (resident.version,) for drift in await desk.drifts())

    await eventually(said, OUTCOME_S)
    await desk.outcome(BlendUnloaded, await desk.retire(resident.version, fake_server.url))


async def test_a_restarted_upcycle_knows_what_it_was_told(desk: Desk, fake_server: EngineProcess) -> None:
    """The notice was acknowledged: the bus does not deliver it again."""
    assert desk.service is not None
    resident = await desk.stored("remembered")
    await desk.expect(fake_server.url, resident)
    await desk.drifted(1)
    desk.service.cancel()
    await asyncio.gather(desk.service, return_exceptions=True)
    async with working(desk):
        again = await desk.drifted(2)
    assert again.expected == (resident.version,)


# ---------------------------------------------------------------------------------------------------------------- NaN


async def test_numbers_that_are_not_finite_are_taken_out_and_leave_nothing_behind(
    desk: Desk, engine_url: str, tiny_base: Path
) -> None:
    """An adapter of NaN that got past verification: forced into the store, as a disk that lies would do it."""
    good = await desk.stored("good")
    _, proven = await loaded(desk, good, engine_url)
    bad = nan_version(desk, tiny_base)
    order = await desk.load(bad, engine_url)
    assert (await desk.outcome(EffectMissing, order)).code is Missing.NOT_FINITE
    undone = await desk.outcome(RolledBack, await desk.roll_back(bad.version, engine_url, base=BASE_NAME))
    assert undone.healed is True
    printed = good.model_copy(update={"effect_print": proven.effect_print})
    again = await desk.outcome(EffectProven, await desk.load(printed, engine_url))
    assert again.print_micronats == 0 or (again.print_micronats or 0) < 1_000
    await desk.outcome(BlendUnloaded, await desk.retire(good.version, engine_url))


def nan_version(desk: Desk, tiny_base: Path) -> Resident:
    """Put an adapter of NaN into the store, under its own digest."""
    good = adapters.adapter(desk.root / "adapters" / "sound", tiny_base, seed=5)
    broken = zoo.defective(good, desk.root / "adapters" / "nan", "nan")
    made = desk.root / "store" / "sha256" / "made"
    manifest = next((desk.root / "store" / "sha256").iterdir()) / "manifest.json"
    shutil.copytree(broken, made)
    shutil.copy(manifest, made / "manifest.json")
    found = digest(made)
    made.rename(made.with_name(found))
    return Resident(blend="bad", version=f"bad@{found[:12]}", path=f"store/sha256/{found}")


# --------------------------------------------------------------------------------------------------- the engine's words


@pytest_asyncio.fixture
async def mortal_fake(tiny_base: Path, tmp_path: Path) -> AsyncGenerator[EngineProcess]:
    """A fake of two slots that may die."""
    spec = tiny_spec("fake", tiny_base).model_copy(update={"max_loras": 2})
    process = await EngineProcess.start(spec, log=tmp_path / "mortal.log")
    try:
        await process.wait_healthy(OUTCOME_S)
        yield process
    finally:
        await process.stop()


async def test_the_fake_dies_of_an_evicted_adapter_whose_folder_is_gone(desk: Desk, mortal_fake: EngineProcess) -> None:
    """As vLLM does: this is why nothing is deleted that an engine lists."""
    async with Engine(mortal_fake.url) as engine:
        residents = [await desk.stored("evicted", seed=seed) for seed in range(mortal_fake.spec.max_loras + 1)]
        for resident in residents:
            await engine.load(resident.version, str(desk.root / resident.path))
        assert len(await engine.held() or ()) == mortal_fake.spec.max_loras
        shutil.rmtree(desk.root / residents[0].path)
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(base_url=mortal_fake.url) as client:
                await client.post("/v1/completions", json={"model": residents[0].version, "prompt": [1]})
    assert await mortal_fake.wait() != 0
