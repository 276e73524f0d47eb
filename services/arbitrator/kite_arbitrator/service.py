"""The arbitrator's life: wait for the lease, rebuild the state from the ledger, lead; and again, when it is lost."""

import asyncio
import os
import socket
from collections.abc import Coroutine, Sequence
from typing import cast

import structlog

from kite.bus import EVT, Bus, Login, require_sync
from kite.errors import Fault, KiteError, UsageError
from kite.events import new_id
from kite.ledger import AsyncLedger, Cursor, LeaseLost, LedgerUnreachable, is_shared
from kite.metrics import served
from kite.trust import Keyring, Signer, load_public
from kite_arbitrator.leader import BusAway, Leader, keep
from kite_arbitrator.ledgertime import LedgerClock
from kite_arbitrator.metrics import Meter
from kite_arbitrator.settings import Settings
from kite_arbitrator.standby import Standby
from kite_schemas.ledger import ProducerKeyAdded

FIRST_EPOCH = 1
"""The life of the bus that a ledger begins with."""

AGAIN_S = 1.0
"""How long to wait before the lease is asked for again, after it was lost."""

log = structlog.get_logger()


class OperatorKeyMissing(KiteError):
    """The ledger trusts keys, and this arbitrator was not told whose word let them in."""

    code = "operator_key_missing"
    fault = Fault.OPERATOR

    def __init__(self, keys: int) -> None:
        super().__init__(
            f"the ledger has {keys} producer keys, and no operator key is set: everything would be taken unsigned",
            hint="name the operator's public key by KITE_OPERATOR_KEY",
        )
        self.keys = keys


async def check_bus(settings: Settings) -> None:
    """Make sure that what the bus acknowledges is on disk. Raises BusNotDurable, BusUnreachable, UsageError."""
    if not settings.durable:
        return
    if settings.nats_monitor_url is None:
        raise UsageError(
            "whether the bus keeps what it acknowledges is not known: its monitoring port is not set",
            hint="name it by KITE_NATS_MONITOR_URL, or set KITE_DURABLE=false to go without",
        )
    await require_sync(settings.nats_monitor_url)


async def serve(settings: Settings) -> None:
    """Lead, or wait to lead, until cancelled. Raises the errors of bus, ledger and keys that waiting cannot heal."""
    signer, login, meter = settings.signer(), settings.login(), Meter()
    with served(meter.registry, settings):
        await _serve(settings, signer, login, meter)


async def _serve(settings: Settings, signer: Signer | None, login: Login, meter: Meter) -> None:
    async with await Bus.connect(settings.nats_url, "arbitrator", signer=signer, login=login) as bus:
        await check_bus(settings)  # behind the connection, which waits for a server that is still starting
        await bus.provision()
        candidate = Candidate(settings, bus, signer, meter)
        while True:
            await _apart(candidate.term())
            await asyncio.sleep(AGAIN_S)


async def _apart(term: Coroutine[None, None, None]) -> None:
    """Await a term as a task of its own: in Python 3.11 a TaskGroup that fails while it is cancelled forgets that."""
    task = asyncio.create_task(term)
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
        await asyncio.wait([task])
    task.result()


class Candidate:
    """One arbitrator among those of a ledger, under a name of its own, over all its terms."""

    def __init__(self, settings: Settings, bus: Bus, signer: Signer | None, meter: Meter) -> None:
        self._meter = meter
        self._url = settings.ledger_url
        self._operator = load_public(settings.operator_key) if settings.operator_key else None
        self._bus = bus
        self._signer = signer
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-12:]}"
        self._has_led = False

    async def term(self) -> None:
        """Win the lease and lead until it is lost. Before the first term an unreachable ledger is an error."""
        try:
            async with (
                Standby(self._url, self._holder, self._bus) as standby,
                await standby.win(patient=self._has_led) as ledger,
            ):
                self._has_led = True
                await self._lead(standby, ledger)
        except* (LeaseLost, LedgerUnreachable, BusAway) as ended:
            if not self._has_led:
                raise
            log.warning("term_ended", reason=_reasons(ended))
        finally:
            self._meter.state = None

    async def _lead(self, standby: Standby, ledger: AsyncLedger) -> None:
        shared = is_shared(self._url)
        async with asyncio.TaskGroup() as tasks:
            if shared:
                tasks.create_task(keep(ledger))  # from the start: a long ledger takes a while to fold
            state, keys = await standby.state(ledger.head)
            leader = Leader(
                self._bus,
                ledger,
                state,
                holder=self._holder,
                cursor=await ledger.cursor(EVT) or await self._start(ledger),
                keyring=self._keyring(keys),
                signer=self._signer,
                shared=shared,
                now=LedgerClock(ledger.head.ledger_us),
                meter=self._meter,
            )
            await leader.run()

    def _keyring(self, keys: Sequence[ProducerKeyAdded]) -> Keyring:
        if keys and self._operator is None:
            raise OperatorKeyMissing(len(keys))
        keyring = Keyring(self._operator)
        for key in keys:
            keyring.admit(key)
        return keyring

    async def _start(self, ledger: AsyncLedger) -> Cursor:
        """Return where a new ledger begins, once it has it: a bus that is gone before it was read is missed too."""
        stream = await self._bus.stream(EVT)
        cursor = Cursor(stream=EVT, bus_epoch=FIRST_EPOCH, seq=0, msg_id="", created=stream.created)
        await ledger.append([], cursors=[cursor])
        return cursor


def _reasons(ended: BaseException) -> list[str]:
    """Return what is in a group of groups, each reason once."""
    if not isinstance(ended, BaseExceptionGroup):
        return [str(ended)]
    parts = cast("BaseExceptionGroup[BaseException]", ended).exceptions
    return list(dict.fromkeys(reason for part in parts for reason in _reasons(part)))
