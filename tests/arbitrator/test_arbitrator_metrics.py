"""The page of a running arbitrator, and of one whose bus is away: what it waits for can be seen."""

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kite.bus import Bus
from kite.clock import US_PER_S
from kite.events import Origin, compose, publish
from kite.ledger import AsyncLedger, Outgoing, Send
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.testing.ledger import drafts
from kite_arbitrator.relay import Relay
from kite_arbitrator.testing.running import Place, arbitrator
from kite_schemas.policy import Change, ChangeRequested

ORIGIN = Origin(source="kite/test/1", producer="test@0")


@pytest.fixture
async def place(tmp_path: Path) -> AsyncGenerator[Place]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    async with nats(tmp_path) as server:
        found = Place.beside(server, tmp_path)
        found.more["metrics_port"] = port
        yield found


async def page(place: Place) -> dict[str, float]:
    """The values of the arbitrator's page by name, with the one label that some of them have."""
    url = f"http://127.0.0.1:{place.more['metrics_port']}/metrics"
    text = await asyncio.to_thread(lambda: urlopen(url).read().decode())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join([one.name, *one.labels.values()]): one.value for one in samples}


async def test_a_leader_tells_how_long_it_decides_and_how_full_the_bus_is(place: Place):
    async with arbitrator(place) as bus:
        request = ChangeRequested(actor="me", changes=(Change(key="nonsense", value=1),))
        await publish(bus, compose("policy/fleet", request, ORIGIN))

        async def told() -> dict[str, float]:
            found = await page(place)
            measured = "kite_stream_fill_ratio KITE_EVT" in found and found["kite_ledger_lag_messages"] == 0
            return found if measured and found["kite_decision_latency_seconds_count"] >= 1 else {}

        found = await eventually(told)
    assert found["kite_arbitrator_leading"] == 1
    assert found["kite_ledger_position"] >= 5
    assert found["kite_ledger_age_seconds"] < 15
    assert found["kite_bus_gap"] == 0
    assert 0 < found["kite_decision_latency_seconds_sum"] < 15
    for stream in ("KITE_EVT", "KITE_DEC"):
        assert 0 <= found[f"kite_stream_fill_ratio {stream}"] < 0.01
    assert not any("KITE_TEL" in name for name in found), "it drops its oldest: full is how it should be"


async def test_a_leader_whose_bus_stands_tells_how_long_it_waits(tmp_path: Path):
    ledger = await AsyncLedger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test", ack_s=0.2) as bus:
        await bus.provision()
        relay = Relay(bus, ledger)
        assert relay.waiting_us() == 0
        running = asyncio.create_task(relay.run())
        try:
            await eventually(lambda: relay.waiting_us() == 0)
            psutil.Process(server.pid).send_signal(signal.SIGSTOP)
            relay.put(await committed(ledger))
            await eventually(lambda: relay.waiting_us() > US_PER_S)
            psutil.Process(server.pid).send_signal(signal.SIGCONT)
            await eventually(lambda: relay.done_pos == 1)
            await eventually(lambda: relay.waiting_us() == 0)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    await ledger.close()


async def committed(ledger: AsyncLedger) -> list[Send]:
    """Append one decision; return what the leader would hand over."""
    subject = "kite.dec.v1.yoco.n1.wake.i"
    (row,) = await ledger.append(drafts([1]), sends=[Outgoing(draft=0, subject=subject)])
    return [Send(row.pos, subject, row.raw, row.event_id, "")]
