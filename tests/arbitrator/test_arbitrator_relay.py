"""The outbox on its way to the bus: in order, each once, whatever the relay was told and whatever a crash left."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kite.bus import DEC, Bus
from kite.ledger import AsyncLedger, Outgoing, Send
from kite.testing.bus import bus as running
from kite.testing.eventually import eventually
from kite.testing.ledger import drafts
from kite_arbitrator.relay import SENDS_MAX, Relay


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with running(tmp_path) as client:
        yield client


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncGenerator[AsyncLedger]:
    ledger = await AsyncLedger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield ledger
    await ledger.close()


async def commit(ledger: AsyncLedger, numbers: Sequence[int], *, sent_pos: int = 0) -> list[Send]:
    """Append a decision a number, each to be published; return what the leader would hand over."""
    sends = [Outgoing(draft=index, subject="kite.dec.v1.yoco.n1.wake.i") for index in range(len(numbers))]
    rows = await ledger.append(drafts(numbers), sends=sends, sent_pos=sent_pos)
    return [Send(row.pos, sends[0].subject, row.raw, row.event_id, "") for row in rows]


@asynccontextmanager
async def relaying(relay: Relay) -> AsyncGenerator[None]:
    task = asyncio.create_task(relay.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def published(bus: Bus) -> list[str]:
    messages = [await bus.message(DEC, seq) for seq in range(1, (await bus.stream(DEC)).last_seq + 1)]
    return [message.event_id for message in messages if message]


def names(numbers: Sequence[int]) -> list[str]:
    return [f"event-{number:06}" for number in numbers]


async def test_what_a_crash_left_goes_first_then_what_is_handed_over(bus: Bus, ledger: AsyncLedger):
    await commit(ledger, [1, 2])
    relay = Relay(bus, ledger)
    relay.put(await commit(ledger, [3]))
    async with relaying(relay):
        await eventually(lambda: relay.done_pos == 3)
        relay.put(await commit(ledger, [4, 5]))
        await eventually(lambda: relay.done_pos == 5)
    assert await published(bus) == names([1, 2, 3, 4, 5])


async def test_more_than_fits_is_read_from_the_ledger_in_order_and_once(bus: Bus, ledger: AsyncLedger):
    relay, numbers = Relay(bus, ledger), range(1, 3 * SENDS_MAX + 1)
    async with relaying(relay):
        for start in range(0, len(numbers), 100):
            relay.put(await commit(ledger, numbers[start : start + 100]))
        await eventually(lambda: relay.done_pos == len(numbers))
    assert await published(bus) == names(numbers)


async def test_what_was_published_and_not_let_go_is_not_published_again_by_the_same_leader(
    bus: Bus, ledger: AsyncLedger
):
    relay = Relay(bus, ledger)
    async with relaying(relay):
        relay.put(await commit(ledger, [1, 2]))
        await eventually(lambda: relay.done_pos == 2)
        assert [send.pos for send in await ledger.pending(10)] == [1, 2]
        relay.put(await commit(ledger, [3], sent_pos=relay.done_pos))
        await eventually(lambda: relay.done_pos == 3)
        assert [send.pos for send in await ledger.pending(10)] == [3]
    assert await published(bus) == names([1, 2, 3])


async def test_what_a_bus_may_have_lost_is_published_again_before_the_rest_and_moves_nothing(
    bus: Bus, ledger: AsyncLedger
):
    lost = await commit(ledger, [1, 2])
    await ledger.sent(2)
    relay = Relay(bus, ledger)
    relay.put(await commit(ledger, [3]))
    relay.again(lost)
    async with relaying(relay):
        await eventually(lambda: relay.done_pos == 3)
    assert await published(bus) == names([1, 2, 3])


async def test_finishing_publishes_what_the_end_of_the_run_left_in_its_hands(bus: Bus, ledger: AsyncLedger):
    relay = Relay(bus, ledger)
    async with relaying(relay):
        pass
    relay.put(await commit(ledger, [1, 2]))
    await relay.finish(5.0)
    assert relay.done_pos == 2
    assert await published(bus) == names([1, 2])


async def test_finishing_gives_up_when_the_bus_is_away_and_the_outbox_keeps_the_rest(
    tmp_path: Path, ledger: AsyncLedger
):
    async with running(tmp_path) as client:
        relay = Relay(client, ledger)
        relay.put(await commit(ledger, [1]))
        await client.close()
        await relay.finish(0.1)
    assert relay.done_pos == 0
    assert [send.pos for send in await ledger.pending(10)] == [1]
