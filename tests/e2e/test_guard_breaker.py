"""The breaker on real parts: one instance answers otherwise; admissions stop, it is found out, they go on."""

from pathlib import Path

from kite.engine import Engine
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_cli.asking.capacity import order
from kite_cli.asking.request import change, inject
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import Options
from kite_cli.place import reading
from kite_incident.replay import verify
from kite_schemas.envelope import decode
from kite_schemas.model import Data
from kite_schemas.proof import EffectMissing
from kite_schemas.upcycle import Ending, Frozen, InjectionDeferred, Unfrozen
from kite_schemas.yoco import State

UP_S = 60.0
SECOND_US = 1_000_000


def found(fleet: Fleet, kind: type[Data]) -> list[Data | None]:
    with reading(fleet) as reader:
        return [decode(row.raw).data for row in reader.find(types=[kind.TYPE])]


async def swap(endpoint: str, version: str, other: Path) -> None:
    """Put another adapter behind a version's name, behind KITE's back."""
    async with Engine(endpoint) as engine:
        await engine.unload(version)
        await engine.load(version, str(other))


async def test_an_instance_that_answers_otherwise_freezes_admissions_until_it_is_out(tiny_base: Path, tmp_path: Path):
    good = adapters.adapter(tmp_path / "credit", tiny_base, seed=1)
    other = adapters.adapter(tmp_path / "other", tiny_base, seed=2)
    options = Options(base=tiny_base, name="tiny", engine="fake", dir=tmp_path / "fleet", dtype="float32")
    async with embedded(options) as fleet:
        await fleet.wait_settled(UP_S)
        assert (await inject(fleet, adapter=good, base="tiny", blend="risk", weight_ppm=500_000)).ok
        handover = await order(fleet, "tiny")
        assert handover.ready is not None
        await swap(handover.ready.endpoint, fleet.state().blends["risk"].resident.version, other)

        changes = [("guard.enabled", True), ("guard.freeze_us", 3 * SECOND_US), ("guard.interval_us", SECOND_US)]
        assert (await change(fleet, changes)).ok
        await eventually(lambda: found(fleet, Frozen), UP_S)
        late = await inject(fleet, adapter=other, base="tiny", blend="risk", weight_ppm=300_000)
        assert late.ending is Ending.PROMOTED  # it waited for the end of the freeze
        assert found(fleet, InjectionDeferred)
        assert found(fleet, Unfrozen)
        assert found(fleet, EffectMissing)  # the reload proved the version again, and it was another one
        assert fleet.state().instances[handover.ready.instance].state is State.QUARANTINED
        with reading(fleet) as reader:
            assert verify(reader).identical
