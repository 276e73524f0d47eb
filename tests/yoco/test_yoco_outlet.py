"""Windows on their way to a real bus that goes away for a moment: fast drops, reliable neither loses nor doubles."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite.bus import TEL, Bus, EmbeddedServer, dec_subject
from kite.engine import free_port
from kite.events import Composed, Origin, compose, new_id
from kite.testing.bus import FACTS_BYTES
from kite.testing.eventually import eventually
from kite.testing.orders import ASKED
from kite_arbitrator.records import Row
from kite_arbitrator.routing import destination
from kite_schemas.arbitration import Transport, TransportChanged
from kite_schemas.envelope import EVENT_MAX_BYTES, decode
from kite_schemas.telemetry import Window
from kite_yoco.telemetry.outlet import IN_FLIGHT_MAX, WAITING_MAX, Outlet

NODE = "n1"
BOOT = new_id()
ORIGIN = Origin("kite/yoco/n1", "yoco@test")
BACK_S = 30.0
BUSY = 200  # windows put and not acknowledged


def window(seq: int) -> Composed:
    """Return a window without anything in it."""
    return compose(
        f"node/{NODE}",
        Window(node=NODE, boot=BOOT, seq=seq, interval_us=100_000, sampled_us=1, emitted_us=1),
        ORIGIN,
    )


def changed(transport: Transport, boot: str = BOOT) -> TransportChanged:
    return TransportChanged(node=NODE, boot=boot, transport=transport, why=ASKED)


async def stored(bus: Bus) -> list[int]:
    """Return the sequence numbers of the windows on the stream, in its order."""
    last = (await bus.stream(TEL)).last_seq
    messages = [await bus.message(TEL, seq) for seq in range(1, last + 1)]
    windows = [decode(message.payload).data for message in messages if message is not None]
    return [data.seq for data in windows if isinstance(data, Window)]


@dataclass(slots=True)
class Place:
    """An outlet on a bus that can go away."""

    server: EmbeddedServer
    bus: Bus
    outlet: Outlet

    async def away(self) -> None:
        """Stop the bus."""
        await self.server.stop()
        await eventually(lambda: not self.bus.is_connected)

    async def back(self) -> None:
        """Start the bus again, on what it had stored."""
        await self.server.start()
        await self.bus.ready(BACK_S)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    server = EmbeddedServer(tmp_path / "nats", port=free_port())
    async with server, await Bus.connect(server.url, "test") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        outlet = Outlet(bus, NODE)
        yield Place(server, bus, outlet)
        await outlet.close()


async def test_fast_drops_what_comes_while_the_bus_is_away(place: Place) -> None:
    outlet = place.outlet
    outlet.put(window(1))
    await eventually(lambda: outlet.sent == 1)
    await place.away()
    for seq in range(2, 12):
        outlet.put(window(seq))
    await place.back()
    outlet.put(window(12))
    await eventually(lambda: outlet.sent == 2)
    assert outlet.dropped == 10
    assert await stored(place.bus) == [1, 12]


async def test_reliable_keeps_what_comes_while_the_bus_is_away(place: Place) -> None:
    outlet = place.outlet
    outlet.switch(BOOT, changed(Transport.RELIABLE))
    outlet.put(window(1))
    await eventually(lambda: outlet.sent == 1)
    await place.away()
    for seq in range(2, 300):
        outlet.put(window(seq))
    await place.back()
    outlet.put(window(300))
    await eventually(lambda: outlet.sent == 300, BACK_S)
    assert outlet.dropped == 0
    assert await stored(place.bus) == list(range(1, 301))


async def test_what_is_in_hand_when_the_bus_goes_is_neither_lost_nor_doubled(place: Place) -> None:
    outlet = place.outlet
    outlet.transport = Transport.RELIABLE
    put = 0

    async def feed() -> None:
        """Keep the outlet busy as long as the bus is there."""
        nonlocal put
        while place.bus.is_connected:
            if put - outlet.sent < BUSY:
                put += 1
                outlet.put(window(put))
            await asyncio.sleep(0)

    feeding = asyncio.create_task(feed())
    await eventually(lambda: outlet.sent > BUSY)
    await place.away()
    await feeding
    acknowledged = outlet.sent
    assert acknowledged < put, "some were on their way, stored or not"
    await place.back()
    kept = (await place.bus.stream(TEL)).last_seq
    await eventually(lambda: outlet.sent == put, BACK_S)
    print(f"{put} put, {acknowledged} acknowledged before the bus went, {kept} stored when it was back")
    assert await stored(place.bus) == list(range(1, put + 1))
    assert outlet.dropped == 0


async def test_a_bus_that_stays_away_costs_the_oldest_windows_and_they_are_counted(place: Place) -> None:
    outlet = place.outlet
    outlet.transport = Transport.RELIABLE
    await place.away()
    with capture_logs() as logs:
        for seq in range(1, WAITING_MAX + 8):
            outlet.put(window(seq))
    assert (outlet.sent, outlet.dropped) == (0, 7)
    assert [line["event"] for line in logs].count("telemetry_dropping") == 1
    await place.back()
    await eventually(lambda: outlet.sent == WAITING_MAX, BACK_S)
    assert await stored(place.bus) == list(range(8, WAITING_MAX + 8))


async def test_no_window_overtakes_another_when_the_transport_changes(place: Place) -> None:
    outlet, seqs = place.outlet, iter(range(1, 1_000))

    def put(count: int) -> None:
        for _ in range(count):
            outlet.put(window(next(seqs)))

    put(IN_FLIGHT_MAX)
    outlet.switch(BOOT, changed(Transport.RELIABLE))
    put(100)
    outlet.switch(BOOT, changed(Transport.FAST))
    put(100)
    await eventually(lambda: outlet.sent == IN_FLIGHT_MAX + 200)
    assert not outlet.delivering
    put(1)
    await eventually(lambda: outlet.sent == IN_FLIGHT_MAX + 201)
    assert await stored(place.bus) == list(range(1, IN_FLIGHT_MAX + 202))


async def test_a_window_that_no_bus_takes_is_dropped_and_holds_up_nothing(place: Place) -> None:
    outlet = place.outlet
    outlet.transport = Transport.RELIABLE
    good = window(2)
    outlet.put(Composed(good.header, good.raw + b" " * (8 * EVENT_MAX_BYTES)))
    outlet.put(window(3))
    await eventually(lambda: outlet.sent == 1)
    assert outlet.dropped == 1
    assert await stored(place.bus) == [3]


def test_the_decision_is_published_where_the_yoco_of_the_node_listens() -> None:
    decided = changed(Transport.RELIABLE)
    row = Row(pos=1, id=new_id(), type=decided.TYPE, subject=f"node/{NODE}", ledger_us=1, data=decided)
    assert destination(row) == dec_subject("yoco", NODE, "transport_changed", f"node/{NODE}")


async def test_what_was_decided_for_another_start_is_ignored(place: Place) -> None:
    with capture_logs() as logs:
        place.outlet.switch(BOOT, changed(Transport.RELIABLE, new_id()))
    assert place.outlet.transport is Transport.FAST
    assert [line["event"] for line in logs] == ["transport_ignored"]


async def test_a_bus_that_is_closed_ends_the_delivery(place: Place) -> None:
    outlet = place.outlet
    outlet.transport = Transport.RELIABLE
    await place.bus.close()
    for seq in range(1, 4):
        outlet.put(window(seq))
    await eventually(lambda: not outlet.delivering)
    assert (outlet.sent, outlet.dropped) == (0, 3)
