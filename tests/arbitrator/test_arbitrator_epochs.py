"""The bus under a running ledger is another one: deleted, put back from an older copy, filled again behind it."""

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kite.bus import DEC, EVT, Bus, EmbeddedServer
from kite.events import Composed, Origin, compose, publish
from kite.ledger import Reader
from kite.testing.eventually import eventually
from kite_arbitrator.testing import Story
from kite_arbitrator.testing.running import Place, arbitrator
from kite_incident.replay import verify
from kite_schemas.arbitration import Mode, ModeChanged
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusEpochChanged, BusGap, EpochEnd, EventIdConflict
from kite_schemas.policy import Change, ChangeRejected, ChangeRequested
from kite_schemas.yoco import NodeRegistered, OrderRequested, StartOrdered

ORIGIN = Origin(source="kite/test/1", producer="test@0")


class Bench:
    """One server that always comes back on its port, whatever was done to its store meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = EmbeddedServer(folder / "nats")

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        port = self.server.port
        await self.server.stop()
        self.server = EmbeddedServer(self.folder / "nats", port=port)

    def save(self) -> None:
        shutil.copytree(self.folder / "nats" / "store", self.folder / "copy")

    def restore(self) -> None:
        self.delete()
        shutil.copytree(self.folder / "copy", self.folder / "nats" / "store")

    def delete(self) -> None:
        shutil.rmtree(self.folder / "nats" / "store")

    @property
    def place(self) -> Place:
        return Place.beside(self.server, self.folder)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncGenerator[Bench]:
    bench = Bench(tmp_path)
    await bench.start()
    yield bench
    await bench.server.stop()


def asked(actor: str) -> Composed:
    return compose("base/tiny", OrderRequested(actor=actor, base="tiny"), ORIGIN)


def actors(place: Place) -> list[str]:
    return [data.actor for data in place.found(OrderRequested)]


async def tell(bus: Bus, place: Place, *names: str) -> list[Composed]:
    """Publish one request a name, and wait until each is a row."""
    events = [asked(name) for name in names]
    for event in events:
        await publish(bus, event)
    await eventually(lambda: set(names) <= set(actors(place)))
    return events


def epoch(place: Place) -> BusEpochChanged:
    (changed,) = place.found(BusEpochChanged)
    return changed


async def test_a_store_that_was_deleted_begins_a_new_epoch_and_nothing_comes_twice(bench: Bench):
    async with arbitrator(bench.place) as bus:
        first, second = await tell(bus, bench.place, "first", "second")
        await bench.stop()
        bench.delete()
        await bench.start()
        await eventually(lambda: bench.place.found(BusEpochChanged))
        await publish(bus, first)  # as a worker does whose acknowledgement was lost with the bus
        await tell(bus, bench.place, "third")
        assert actors(bench.place) == ["first", "second", "third"]
        assert (epoch(bench.place).why, epoch(bench.place).bus_epoch) == (EpochEnd.CREATED_ANEW, 2)
        assert epoch(bench.place).msg_id.startswith(second.header.id)
    with Reader.open(bench.place.url) as reader:
        epochs = [row.bus_epoch for row in reader.find(types=[OrderRequested.TYPE])]
        assert epochs == [1, 1, 2]
        assert verify(reader).identical


async def test_after_it_nothing_is_destroyed_until_somebody_has_looked(bench: Bench):
    async with arbitrator(bench.place) as bus:
        await tell(bus, bench.place, "first")
        await bench.stop()
        bench.delete()
        await bench.start()
        (changed,) = await eventually(lambda: bench.place.found(ModeChanged))
        assert changed.mode is Mode.DEGRADED


async def test_a_store_put_back_from_an_older_copy_is_noticed_by_its_length(bench: Bench):
    async with arbitrator(bench.place) as bus:
        (first,) = await tell(bus, bench.place, "first")
        await bench.stop()
        bench.save()
        await bench.start()
        await tell(bus, bench.place, "second", "third")
        await bench.stop()
        bench.restore()
        await bench.start()
        await eventually(lambda: bench.place.found(BusEpochChanged))
        assert epoch(bench.place).why is EpochEnd.SHORTER
        await tell(bus, bench.place, "fourth")
        assert actors(bench.place) == ["first", "second", "third", "fourth"]
    with Reader.open(bench.place.url) as reader:
        stored = reader.by_event_id(first.header.id)
        assert stored is not None
        assert stored.bus_epoch == 1
        assert verify(reader).identical


async def test_an_older_copy_that_was_filled_past_the_cursor_is_noticed_by_the_message_there(bench: Bench):
    async with arbitrator(bench.place) as bus:
        await tell(bus, bench.place, "first")
        await bench.stop()
        bench.save()
        await bench.start()
        await tell(bus, bench.place, "second")
    await bench.stop()
    bench.restore()
    await bench.start()
    async with await Bus.connect(bench.server.url, "test") as bus:
        for name in ("third", "fourth", "fifth"):
            await publish(bus, asked(name))
    async with arbitrator(bench.place):
        await eventually(lambda: "fifth" in actors(bench.place))
        assert epoch(bench.place).why is EpochEnd.OTHER_MESSAGE
        assert actors(bench.place) == ["first", "second", "third", "fourth", "fifth"]
        assert bench.place.found(BusGap) == []
    async with arbitrator(bench.place) as bus:
        await tell(bus, bench.place, "sixth")
        assert epoch(bench.place).bus_epoch == 2, "a restart does not find it changed once more"


async def test_an_order_that_the_bus_has_lost_is_published_again(bench: Bench):
    inputs = [row for row in Story().begin(standbys=0).rows if isinstance(row.data, ChangeRequested | NodeRegistered)]
    async with arbitrator(bench.place) as bus:
        for row in inputs[1:]:
            assert row.data is not None
            await publish(bus, compose(row.subject, row.data, ORIGIN))
        await eventually(lambda: bench.place.found(StartOrdered))
        await bench.stop()
        bench.delete()
        await bench.start()
        await eventually(lambda: bench.place.found(BusEpochChanged))

        async def given() -> list[bytes]:
            last = (await bus.stream(DEC)).last_seq
            found = [await bus.message(DEC, seq) for seq in range(1, last + 1)]
            return [one.payload for one in found if one and isinstance(decode(one.payload).data, StartOrdered)]

        (payload,) = await eventually(given)
    with Reader.open(bench.place.url) as reader:
        (row,) = reader.find(types=[StartOrdered.TYPE])
        assert row.raw == payload


async def test_an_id_that_somebody_took_first_is_a_conflict_of_the_second(bench: Bench):
    genuine = compose("policy/fleet", ChangeRequested(actor="me", changes=(Change(key="a.b", value=1),)), ORIGIN)
    squatter = Composed(genuine.header, genuine.raw.replace(b'"me"', b'"no"'))
    async with arbitrator(bench.place) as bus:
        await publish(bus, squatter)
        await publish(bus, genuine)
        (conflict,) = await eventually(lambda: bench.place.found(EventIdConflict))
        assert conflict.event_id == genuine.header.id
        assert len(bench.place.found(ChangeRejected)) == 1
        assert (await bus.stream(EVT)).last_seq == 2
