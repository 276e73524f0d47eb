"""The ledger's clock: a wall clock that is set is recorded, and no timer notices."""

import asyncio
from contextlib import suppress
from pathlib import Path

from kite import clock
from kite.bus import EVT, Bus
from kite.ledger import AsyncLedger, Cursor, Reader
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.trust import Keyring
from kite_arbitrator import core
from kite_arbitrator.leader import Leader
from kite_arbitrator.ledgertime import LedgerClock
from kite_arbitrator.metrics import Meter
from kite_arbitrator.testing.running import Place
from kite_incident.replay import verify
from kite_schemas.ledger import ClockStepped, Tick

HOUR_US = 3_600 * clock.US_PER_S
SECOND_US = clock.US_PER_S


class Wall:
    """A wall clock that somebody sets."""

    def __init__(self) -> None:
        self.set_by_us = 0

    def __call__(self) -> int:
        return clock.wall_us() + self.set_by_us


class Hands:
    """Two clocks under the hands of a test."""

    def __init__(self) -> None:
        self.wall_us, self.mono_us = 1_000 * SECOND_US, 0

    def ledger(self, last_us: int = 0) -> LedgerClock:
        return LedgerClock(last_us, wall_us=lambda: self.wall_us, mono_us=lambda: self.mono_us)

    def pass_us(self, us: int, drift_us: int = 0) -> None:
        self.mono_us += us
        self.wall_us += us + drift_us


def test_ledger_time_follows_the_monotonic_clock_whatever_the_wall_clock_does():
    hands = Hands()
    now = hands.ledger()
    for step_us in (HOUR_US, -HOUR_US, -HOUR_US):
        before_us = now(0)
        hands.pass_us(SECOND_US, step_us)
        assert now(0) - before_us == SECOND_US
        assert now.stepped() == step_us
        assert now.stepped() == 0, "told once"


def test_slow_drift_is_no_step_however_much_it_adds_up_to():
    hands = Hands()
    now = hands.ledger()
    for _ in range(100):
        hands.pass_us(SECOND_US, SECOND_US // 2)
        assert now.stepped() == 0


def test_a_leader_whose_wall_clock_is_behind_the_ledger_goes_on_from_the_ledger():
    hands = Hands()
    future_us = hands.wall_us + HOUR_US
    now = hands.ledger(future_us)
    assert now(future_us) == future_us + 1
    hands.pass_us(SECOND_US)
    assert now(future_us) == future_us + SECOND_US
    assert now(future_us + HOUR_US) == future_us + HOUR_US + 1, "rows are never at the same time"


async def test_a_step_is_a_row_and_ticks_go_on_at_their_pace(tmp_path: Path):
    wall = Wall()
    async with nats(tmp_path) as server, await Bus.connect(server.url, "arbitrator") as bus:
        await bus.provision()
        place = Place.beside(server, tmp_path)
        async with await AsyncLedger.open(place.url) as ledger:
            start = Cursor(stream=EVT, bus_epoch=1, seq=0, msg_id="", created=(await bus.stream(EVT)).created)
            leader = Leader(
                bus,
                ledger,
                core.initial(),
                holder="test",
                cursor=start,
                keyring=Keyring(None),
                signer=None,
                shared=False,
                now=LedgerClock(0, wall_us=wall),
                meter=Meter(),
            )
            run = asyncio.create_task(leader.run())
            for by_us in (HOUR_US, -HOUR_US):
                known = len(place.found(Tick))
                await eventually(lambda known=known: len(place.found(Tick)) > known)
                wall.set_by_us += by_us
                known = len(place.found(ClockStepped))
                await eventually(lambda known=known: len(place.found(ClockStepped)) > known)
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run
    forth, back = place.found(ClockStepped)
    assert abs(forth.by_us - HOUR_US) < SECOND_US
    assert abs(back.by_us + HOUR_US) < SECOND_US
    with Reader.open(place.url) as reader:
        times_us = [row.ledger_us for row in reader.rows()]
        assert times_us[-1] - times_us[0] < HOUR_US // 2
        assert verify(reader).identical
