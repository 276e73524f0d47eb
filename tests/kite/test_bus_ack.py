"""Acknowledgements after the connection broke: of the order that was meant, or of none."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite.bus import DEC, Bus, EmbeddedServer, Work, dec_filters, dec_subject
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.eventually import eventually
from kite.testing.orders import left

ACK_WAIT_S = 30.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    async with nats(tmp_path) as running:
        yield running


async def give(bus: Bus, name: str) -> None:
    await bus.publish(dec_subject("yoco", "n1", "stop_ordered", name), name.encode(), name)


def deliveries(bus: Bus) -> AsyncGenerator[Work]:
    return bus.work(DEC, "yoco-n1", dec_filters("yoco", "n1"), ack_wait_s=ACK_WAIT_S)


def another(server: EmbeddedServer) -> EmbeddedServer:
    """Return the server that takes the place of one that has ended."""
    return EmbeddedServer(server.directory, port=server.port)


async def test_an_order_is_acknowledged_over_a_restart_of_its_bus(server: EmbeddedServer) -> None:
    async with await Bus.connect(server.url, "test") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        await give(bus, "a")
        async with aclosing(deliveries(bus)) as works:
            order = await anext(works)
            await server.stop()
            async with another(server) as again:
                await eventually(lambda: bus.sessions == 2)
                assert await order.ack()
                assert await left(again.monitor_url, "yoco", "n1") == 0


async def test_an_order_of_another_bus_is_not_acknowledged_for_the_one_in_its_place(server: EmbeddedServer) -> None:
    async with await Bus.connect(server.url, "test") as bus:
        await bus.provision(facts_bytes=FACTS_BYTES)
        await give(bus, "a")
        async with aclosing(deliveries(bus)) as works:
            former = await anext(works)
            await server.stop()
            shutil.rmtree(server.directory / "store")
            async with another(server) as again:
                await eventually(lambda: bus.sessions == 2)
                await bus.provision(facts_bytes=FACTS_BYTES)
                await give(bus, "b")
                order = await anext(works)
                assert (former.message.payload, order.message.payload) == (b"a", b"b")
                assert former.message.seq == order.message.seq
                with capture_logs() as logs:
                    assert not await former.ack()
                assert [line["event"] for line in logs] == ["order_ack_lost"]
                await former.in_progress()
                await former.nak()
                assert await left(again.monitor_url, "yoco", "n1") == 1, "b is still to be done"
                assert await order.ack()
                assert await left(again.monitor_url, "yoco", "n1") == 0
