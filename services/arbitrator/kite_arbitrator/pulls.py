"""What is pulled from the bus into the intake: facts from the cursor on without a hole, windows from now on."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Never

import structlog

from kite.bus import EVT, TEL, Bus, BusGap, BusUnreachable, Mark, StreamChanged, StreamMissing
from kite.ledger import Cursor
from kite.trust import Keyring
from kite_arbitrator.intake import WINDOWS_MAX, Intake, arrive
from kite_schemas.ledger import BusEpochChanged
from kite_schemas.ledger import BusGap as GapRow

RETRY_S = 1.0
"""Before streams are asked for again that somebody else has to make."""

Trusted = Callable[[], Keyring]
"""Gives the keys that are trusted by now."""

log = structlog.get_logger()


async def facts(bus: Bus, intake: Intake, keyring: Trusted, cursor: Cursor) -> Never:
    """Pull facts after the cursor, for ever. What can no longer be read, and a bus that is another, are rows too."""
    mark, epoch = Mark(cursor.seq, cursor.msg_id, cursor.created, cursor.published_us), cursor.bus_epoch
    while True:
        try:
            async with aclosing(bus.pull(EVT, mark)) as batches:
                async for messages in batches:
                    await intake.fact(arrive(messages, keyring()))
                    mark = Mark.at(messages[-1], mark.created)
        except BusGap as gap:
            log.error("bus_gap", stream=EVT, first=gap.first_seq, last=gap.last_seq)
            await intake.fact(GapRow(stream=EVT, first=gap.first_seq, last=gap.last_seq))
            mark = Mark(gap.last_seq, created=mark.created)
        except StreamChanged as changed:
            epoch += 1
            log.error("bus_epoch_changed", stream=EVT, bus_epoch=epoch, why=changed.why)
            await intake.fact(_epoch(changed, mark, epoch))
            mark = Mark(0, created=changed.state.created)
        except (StreamMissing, BusUnreachable) as error:
            await _provision(bus, error)


async def windows(bus: Bus, intake: Intake, keyring: Trusted) -> Never:
    """Pull from the end: what came while nobody led is old news. What is lost is lost, and its source counts it."""
    while True:
        try:
            await _windows_after(bus, intake, keyring, (await bus.stream(TEL)).last_seq)
        except StreamChanged as changed:
            log.warning("telemetry_interrupted", stream=TEL, error=str(changed))
        except (StreamMissing, BusUnreachable) as error:
            await _provision(bus, error)


async def _windows_after(bus: Bus, intake: Intake, keyring: Trusted, seq: int) -> Never:
    while True:
        try:
            async with aclosing(bus.pull(TEL, seq, batch=WINDOWS_MAX)) as batches:
                async for messages in batches:
                    await intake.window(arrive(messages, keyring()))
                    seq = messages[-1].seq
        except BusGap as gap:
            log.info("windows_lost", stream=TEL, first=gap.first_seq, last=gap.last_seq)
            seq = gap.last_seq


async def _provision(bus: Bus, error: Exception) -> None:
    log.warning("bus_provisioned_again", error=str(error))
    await bus.ready()
    try:
        await bus.provision()
    except StreamMissing as missing:  # this arbitrator may not make it
        log.error("bus_unprovisioned", error=str(missing), hint=missing.hint)
        await asyncio.sleep(RETRY_S)
    except BusUnreachable as unreachable:  # away again already: the next pull waits for it
        log.warning("bus_away", error=str(unreachable))


def _epoch(changed: StreamChanged, mark: Mark, epoch: int) -> BusEpochChanged:
    return BusEpochChanged(
        stream=EVT,
        bus_epoch=epoch,
        why=changed.why,
        seq=mark.seq,
        msg_id=mark.msg_id,
        created=mark.created,
        found=changed.state.created,
    )
