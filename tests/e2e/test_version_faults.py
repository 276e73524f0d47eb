"""What befalls versions in a fleet: injections that meet, files that vanish, an upcycle that is killed."""

import asyncio
import shutil
from pathlib import Path

from kite.engine import Engine
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_cli.asking.request import change, inject
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import Options
from kite_cli.place import reading
from kite_incident.replay import verify
from kite_schemas.envelope import Event
from kite_schemas.upcycle import BlendLoaded, DriftObserved, Ending, RebuildOrdered
from kite_upcycle.reader import digest

UP_S = 60.0
REPAIRED_S = 30.0
LOOK_US = 500_000
HALF_PPM = 500_000


async def test_injections_at_once_exclude_each_other_only_within_a_blend(tiny_base: Path, tmp_path: Path):
    one, two, three = (adapters.adapter(tmp_path / f"a{n}", tiny_base, rank=4, seed=n) for n in (1, 2, 3))
    options = Options(base=tiny_base, name="tiny", engine="fake", dir=tmp_path / "fleet", dtype="float32", blends=3)
    async with embedded(options) as fleet:
        await fleet.wait_settled(UP_S)

        first, second, other = await asyncio.gather(
            inject(fleet, adapter=one, base="tiny", blend="risk", weight_ppm=HALF_PPM),
            inject(fleet, adapter=two, base="tiny", blend="risk", weight_ppm=HALF_PPM),
            inject(fleet, adapter=three, base="tiny", blend="fraud", weight_ppm=HALF_PPM),
        )
        promoted, refused = sorted((first, second), key=lambda ended: ended.ending is not Ending.PROMOTED)
        assert (promoted.ending, other.ending) == (Ending.PROMOTED, Ending.PROMOTED)
        assert refused.ending is Ending.REJECTED
        assert refused.reason == "blend_busy"
        assert set(fleet.state().blends) == {"risk", "fraud"}

        await a_folder_that_vanishes_is_computed_again(fleet)
        await an_injection_goes_on_though_its_upcycle_is_killed(fleet, two)
        with reading(fleet) as reader:
            assert verify(reader).identical


async def a_folder_that_vanishes_is_computed_again(fleet: Fleet) -> None:
    """The engine knows the name still, and would die of it at the next request that had been evicted."""
    assert (await change(fleet, [("upcycle.drift_interval_us", LOOK_US)])).ok
    resident = fleet.state().blends["fraud"].resident
    folder = fleet.adapter_root / resident.path
    shutil.rmtree(folder)

    def repaired() -> bool:
        stored = fleet.state().versions[resident.version]
        return folder.is_dir() and not stored.damaged and not fleet.state().orders

    await eventually(repaired, REPAIRED_S)
    assert digest(folder) == resident.path.rpartition("/")[2]
    with reading(fleet) as reader:
        kinds = {row.type for row in reader.find(types={DriftObserved.TYPE, RebuildOrdered.TYPE})}
        (route,) = reader.routes("fraud")
    assert kinds == {DriftObserved.TYPE, RebuildOrdered.TYPE}
    async with Engine(route.endpoint) as engine:
        assert await engine.complete(route.version, [1, 2, 3], 4) == 4


async def an_injection_goes_on_though_its_upcycle_is_killed(fleet: Fleet, adapter: Path) -> None:
    """Killed as soon as the version is loaded: between the load and its outcome, or between the proof and it."""

    def kill(event: Event) -> None:
        if isinstance(event.data, BlendLoaded) and event.data.attempt == 1:
            fleet.kill("upcycle")

    ended = await inject(fleet, adapter=adapter, base="tiny", blend="kyc", weight_ppm=HALF_PPM, on_event=kill)
    assert ended.ending is Ending.PROMOTED
    assert fleet.state().blends["kyc"].resident.version == ended.version
