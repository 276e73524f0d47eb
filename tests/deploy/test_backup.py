"""A backup is worth what comes back from it: real ledgers, buses and a fleet are copied, destroyed, and put back."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kite.bus import Bus
from kite.events import Origin, compose, publish
from kite.ledger import Reader
from kite.testing import adapters
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.testing.postgres import DATABASE, Postgres
from kite_arbitrator.testing.running import Place, arbitrator
from kite_cli.__main__ import main
from kite_cli.asking.request import acknowledge, inject
from kite_cli.embedded.fleet import Fleet, embedded
from kite_cli.embedded.options import Options
from kite_cli.place import reading
from kite_incident.replay import verify
from kite_schemas.arbitration import Mode, ModeChanged
from kite_schemas.ledger import BusEpochChanged, EpochEnd
from kite_schemas.policy import Change, ChangeRequested, PolicySet
from kite_schemas.upcycle import Ending
from kite_schemas.yoco import OrderRequested

ORIGIN = Origin(source="kite/test/1", producer="test@0")
KEY, VALUE_US = "arbitration.idle_tick_us", 777_000
ONLINE_COPY = """
import sqlite3, sys
source, target = (sqlite3.connect(path) for path in sys.argv[1:])
source.backup(target)
"""
"""What `sqlite3 LEDGER ".backup FILE"` does, by the library's own call, in a process of its own."""
UP_S = 60.0


async def ask(bus: Bus, place: Place, actor: str) -> None:
    """Publish a request, and wait until it is a row."""
    await publish(bus, compose("base/tiny", OrderRequested(actor=actor, base="tiny"), ORIGIN))
    await eventually(lambda: actor in actors(place))


def actors(place: Place) -> list[str]:
    return [data.actor for data in place.found(OrderRequested)]


async def set_policy(bus: Bus, place: Place) -> None:
    """Change one setting of the policy."""
    request = ChangeRequested(actor="me", changes=(Change(key=KEY, value=VALUE_US),))
    await publish(bus, compose("policy/fleet", request, ORIGIN))
    await eventually(lambda: policy(place) == VALUE_US)


def policy(place: Place) -> int:
    return place.found(PolicySet)[-1].policy.arbitration.idle_tick_us


def whole(url: str) -> int:
    """Check chain and replay, and return the last position."""
    with Reader.open(url) as reader:
        assert verify(reader).identical
        return reader.head.pos


def copy_online(ledger: Path, file: Path) -> None:
    """Copy a SQLite ledger that may be in use."""
    subprocess.run([sys.executable, "-c", ONLINE_COPY, ledger, file], check=True)


async def kite(*arguments: str) -> int:
    """Run a command in the environment of the test."""
    return await asyncio.to_thread(main, list(arguments))


async def test_a_ledger_on_postgresql_comes_back_from_a_dump_that_was_made_while_it_was_led(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    dump = tmp_path / "ledger.dump"
    async with nats(tmp_path / "lost") as server:
        with Postgres.start() as database:
            place = Place(server, database.create_database(DATABASE))
            async with arbitrator(place) as bus:
                await set_policy(bus, place)
                await ask(bus, place, "before")
                database.dump(DATABASE, dump)
                await ask(bus, place, "behind the backup")
    shutil.rmtree(tmp_path / "lost")

    with Postgres.start() as database:
        database.create_database(DATABASE)
        async with nats(tmp_path / "new") as server:
            place = Place(server, database.restore(DATABASE, dump))
            restored_pos = whole(place.url)
            monkeypatch.delenv("KITE_DIR", raising=False)
            monkeypatch.setenv("KITE_NATS_URL", server.url)
            monkeypatch.setenv("KITE_LEDGER_URL", place.url)
            async with arbitrator(place) as bus:
                (changed,) = await eventually(lambda: place.found(BusEpochChanged))
                assert (changed.why, changed.bus_epoch) == (EpochEnd.CREATED_ANEW, 2)
                (mode,) = await eventually(lambda: place.found(ModeChanged))
                assert mode.mode is Mode.DEGRADED
                assert await kite("gap", "acknowledge", "--reason", "restored from a dump") == 0, capsys.readouterr()
                assert place.found(ModeChanged)[-1].mode is not Mode.DEGRADED
                await ask(bus, place, "afterwards")
                assert (actors(place), policy(place)) == (["before", "afterwards"], VALUE_US)
                for command in (["ledger", "verify"], ["replay"]):
                    assert await kite(*command) == 0, capsys.readouterr()
            assert whole(place.url) > restored_pos


@pytest.mark.parametrize("copied", [False, True], ids=["the bus itself", "a later copy of the bus"])
async def test_what_came_behind_the_backup_is_read_again_from_a_bus_that_has_it(tmp_path: Path, copied: bool):
    """Ledger first, bus second: such a bus fits, it is no other one, and nobody has to acknowledge anything."""
    file = tmp_path / "ledger.backup"
    ledger = tmp_path / "ledger.db"
    async with nats(tmp_path) as server:
        place = Place.beside(server, tmp_path)
        async with arbitrator(place) as bus:
            await set_policy(bus, place)
            await ask(bus, place, "before")
            copy_online(ledger, file)
            await ask(bus, place, "behind the backup")
    store = tmp_path / "nats" / "store"
    if copied:
        shutil.copytree(store, tmp_path / "store.backup")
        shutil.rmtree(store)
        (tmp_path / "store.backup").rename(store)
    for lost in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.lock"):
        (tmp_path / lost).unlink(missing_ok=True)
    file.rename(ledger)
    restored_pos = whole(place.url)
    async with nats(tmp_path) as server:
        place.server = server
        assert actors(place) == ["before"]
        async with arbitrator(place) as bus:
            await ask(bus, place, "afterwards")
            assert actors(place) == ["before", "behind the backup", "afterwards"]
            assert (place.found(BusEpochChanged), place.found(ModeChanged)) == ([], [])
            assert policy(place) == VALUE_US
    assert whole(place.url) > restored_pos


@pytest.mark.slow
async def test_a_fleet_comes_back_with_its_blend_from_copies_of_ledger_and_adapters(tiny_base: Path, tmp_path: Path):
    adapter = adapters.adapter(tmp_path / "adapter", tiny_base, rank=4, seed=1)
    options = Options(base=tiny_base, name="tiny", engine="fake", dir=tmp_path / "fleet", dtype="float32", standbys=0)
    kept = tmp_path / "kept"
    async with embedded(options) as fleet:
        await fleet.wait_settled(UP_S)
        told = await inject(fleet, adapter=adapter, base="tiny", blend="risk")
        assert told.ending is Ending.PROMOTED
        keep(fleet, kept)
    shutil.rmtree(options.dir)  # bus, ledger, journals, keys, adapters

    shutil.copytree(kept, options.dir)
    async with embedded(options) as fleet:
        await fleet.wait_settled(UP_S)
        assert fleet.state().blends["risk"].resident.version == told.version
        await eventually(lambda: served(fleet) == told.version)
        assert (await acknowledge(fleet, reason="restored from a backup")).ok
    whole(fleet.ledger_url)


def keep(fleet: Fleet, folder: Path) -> None:
    """Make the backup while the fleet runs: the ledger, the adapters with the store, and the keys."""
    folder.mkdir()
    copy_online(fleet.dir / "ledger.db", folder / "ledger.db")
    shutil.copytree(fleet.adapter_root, folder / fleet.adapter_root.name)
    shutil.copytree(fleet.dir / "keys", folder / "keys")


def served(fleet: Fleet) -> str:
    """Return the version that the blend's route names, empty without one."""
    with reading(fleet) as reader:
        return next((route.version for route in reader.routes("risk")), "")
