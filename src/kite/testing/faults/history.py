"""What a fault run leaves behind, as one value: ledger, bus and world, and how its processes ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kite.bus import DEC, EVT, Bus, EmbeddedServer, Message
from kite.ledger import Row
from kite.testing.faults.plan import Fault, Plan
from kite.testing.faults.yoco import Deed
from kite_schemas.envelope import decode
from kite_schemas.model import Data


@dataclass(frozen=True, slots=True)
class Stored:
    """What one store of the bus holds: requests and facts, and decisions."""

    facts: Sequence[Message] = ()
    decisions: Sequence[Message] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the ledger, and what it says."""

    row: Row
    data: Data | None

    @property
    def pos(self) -> int:
        """Its position."""
        return self.row.pos

    @property
    def id(self) -> str:
        """Id of its event."""
        return self.row.event_id

    @property
    def subject(self) -> str:
        """What its event is about."""
        return self.row.subject

    @property
    def ledger_us(self) -> int:
        """Its ledger time."""
        return self.row.ledger_us


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run. `lost` is what a store held that was replaced, `acked` what the client knows to be on the bus, by id.

    `spent` are the faults that happened, `deaths` how often the worker ended before all was over. `replay` says how a
    replay differs from the ledger, `complaints` what ended, or did not, without a fault that explains it.
    """

    plan: Plan
    spent: Sequence[Fault]
    entries: Sequence[Entry]
    bus: Stored
    lost: Stored | None
    acked: Mapping[str, bytes]
    world: Sequence[Deed]
    deaths: int
    replay: str = ""
    complaints: Sequence[str] = ()

    @property
    def stores(self) -> list[Stored]:
        """Every store that there was."""
        return [self.bus] if self.lost is None else [self.lost, self.bus]


def entry(row: Row) -> Entry:
    """Return a row with what it says."""
    return Entry(row=row, data=decode(row.raw).data)


async def stored(bus: Bus) -> Stored:
    """Read everything that the bus holds."""
    return Stored(await _all(bus, EVT), await _all(bus, DEC))


async def found(server: EmbeddedServer) -> Stored:
    """Read what a store holds that nobody uses any more."""
    async with server, await Bus.connect(server.url, "judge") as bus:
        return await stored(bus)


async def _all(bus: Bus, stream: str) -> list[Message]:
    last = (await bus.stream(stream)).last_seq
    messages: list[Message] = []
    pulled = bus.pull(stream, 0)
    try:
        while len(messages) < last:
            messages += await anext(pulled)
    finally:
        await pulled.aclose()
    return messages
