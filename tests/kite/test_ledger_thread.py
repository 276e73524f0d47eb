"""The ledger on its own thread, for asynchronous code."""

import asyncio
from pathlib import Path

import pytest

from kite.ledger import AsyncLedger, Cursor, DuplicateEvent, Lease, Ledger, LedgerHeld, Outgoing, Reader
from kite.ledger.backend import here
from kite.testing.eventually import eventually
from kite.testing.ledger import drafts


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


async def test_calls_run_in_the_order_they_were_made(url: str):
    ledger = await AsyncLedger.open(url)
    appends = await asyncio.gather(*(ledger.append(drafts([number])) for number in range(1, 51)))
    assert [row.pos for rows in appends for row in rows] == list(range(1, 51))
    assert ledger.head.pos == 50
    assert await ledger.run(lambda inner: [row.event_id for row in inner.rows(49)]) == ["event-000049", "event-000050"]
    await ledger.close()


async def test_it_does_all_that_a_ledger_does(url: str):
    ledger = await AsyncLedger.open(url)
    cursor = Cursor(stream="KITE_EVT", bus_epoch=1, seq=1, msg_id="event-000001", created="then")
    await ledger.append(drafts([1]), sends=[Outgoing(draft=0, subject="kite.dec.v1.x")], cursors=[cursor])
    assert await ledger.cursor("KITE_EVT") == cursor
    assert list(await ledger.known(["event-000001", "event-000002"])) == ["event-000001"]
    assert [send.pos for send in await ledger.pending(10)] == [1]
    await ledger.sent(1)
    assert await ledger.pending(10) == []
    await ledger.renew()
    with Reader.open(url) as reader:
        assert reader.lease == Lease(1, here(), 4)
    with pytest.raises(DuplicateEvent):
        await ledger.append(drafts([1]))
    await ledger.close()


async def test_a_ledger_that_cannot_be_opened_leaves_no_thread_and_no_lease(url: str):
    with Ledger.open(url), pytest.raises(LedgerHeld):
        await AsyncLedger.open(url)
    await (await AsyncLedger.open(url)).close()


async def test_an_opening_that_is_cancelled_gives_the_lease_back(url: str):
    opening = asyncio.create_task(AsyncLedger.open(url))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening

    def free() -> bool:
        try:
            Ledger.open(url).close()
        except LedgerHeld:
            return False
        return True

    await eventually(free)


async def test_an_append_that_is_cancelled_is_whole_or_not_at_all(url: str):
    ledger = await AsyncLedger.open(url)
    appending = asyncio.create_task(ledger.append(drafts(range(1, 1_001))))
    await asyncio.sleep(0)
    appending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await appending
    assert await ledger.run(lambda inner: inner.head.pos) in {0, 1_000}
    await ledger.close()
