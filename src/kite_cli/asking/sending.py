"""How a request comes into the ledger: signed, published, and then its row; or how it is refused."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from kite import clock
from kite.bus import Bus
from kite.errors import Fault, KiteError, Unreachable
from kite.events import Composed, publish
from kite.ledger import Reader, Row
from kite.trust import Signer
from kite_cli.place import Address, bus_url, login, reading, signer
from kite_schemas.envelope import decode
from kite_schemas.ledger import REJECTED_BYTES_MAX, Refusal, Rejected

CONNECT_S = 3.0
COMMIT_S = 10.0
"""What was published is a row within milliseconds; an arbitrator that was killed is back within two seconds."""

POLL_S = 0.05

NAME_KEY = "KITE_SIGNING_KEY names the private key that signs requests; the operator's may make every one"
HINTS: Mapping[Refusal, str] = {
    Refusal.UNSIGNED: NAME_KEY,
    Refusal.KEY_UNKNOWN: f"`kite key list` shows which keys the ledger has; {NAME_KEY}",
    Refusal.SIGNATURE_WRONG: NAME_KEY,
    Refusal.NOT_OF_PRODUCER: f"a key of `kite/cli/USER` signs that user's requests only, and adds no keys; {NAME_KEY}",
}
NOTHING_DEMANDED = "the arbitrator takes keys only when KITE_OPERATOR_KEY names the operator's public key"


class ArbitratorSilent(Unreachable):
    """Nobody decided about the request."""

    code = "arbitrator_silent"

    def __init__(self, request: str, wait_s: float) -> None:
        super().__init__(
            f"no arbitrator answers request {request} within {wait_s:g} s",
            hint="it is kept on the bus and will be decided; `kite status` says whether the fleet runs",
        )
        self.request = request
        self.wait_s = wait_s


class RequestRefused(KiteError):
    """The arbitrator did not take the request; `signed` says whether it carried a signature."""

    code = "request_refused"
    fault = Fault.USER

    def __init__(self, refused: Rejected, *, signed: bool) -> None:
        nothing_demanded = signed and refused.code is Refusal.UNSIGNED
        super().__init__(
            f"the arbitrator refuses the request ({refused.code}): {refused.message}",
            hint=NOTHING_DEMANDED if nothing_demanded else HINTS.get(refused.code, "is `kite` of the fleet's version?"),
        )
        self.refused = refused
        self.signed = signed


class Line:
    """A connection for one request: what it publishes is signed with the key that the fleet's address names."""

    def __init__(self, bus: Bus, fleet: Address, signer: Signer | None) -> None:
        """Use `line`."""
        self.bus = bus
        self._fleet = fleet
        self._signed = signer is not None

    async def send(self, event: Composed) -> int:
        """Publish a request and return where the ledger ended before. Raises the errors of the bus and the ledger."""
        with reading(self._fleet) as reader:
            after_pos = reader.head.pos
        await publish(self.bus, event)
        return after_pos

    async def taken(self, event: Composed, after_pos: int) -> Row:
        """Return the row of a request that was sent. Raises RequestRefused and ArbitratorSilent."""
        with reading(self._fleet) as reader:

            def check() -> None:
                if found := refusal(reader, event.raw, after_pos):
                    raise RequestRefused(found, signed=self._signed)

            return await committed(reader, event.header.id, check)


@asynccontextmanager
async def line(fleet: Address) -> AsyncGenerator[Line]:
    """Connect to the bus of a fleet. Raises NoFleet, and the errors of `Bus.connect`, `load_signer` and `login`."""
    url, own = bus_url(fleet), signer(fleet)
    async with await Bus.connect(url, "cli", signer=own, login=login(), wait_s=CONNECT_S) as bus:
        yield Line(bus, fleet, own)


async def committed(reader: Reader, event_id: str, check: Callable[[], None] = lambda: None) -> Row:
    """Return the row of an event once there is one; `check` is asked in between. Raises ArbitratorSilent."""
    until_us = clock.mono_us() + int(COMMIT_S * clock.US_PER_S)
    while (row := reader.by_event_id(event_id)) is None:
        check()
        if clock.mono_us() >= until_us:
            raise ArbitratorSilent(event_id, COMMIT_S)
        await asyncio.sleep(POLL_S)
    return row


def refusal(reader: Reader, raw: bytes, after_pos: int) -> Rejected | None:
    """Return what the ledger says after a position about bytes that were refused; an event's id is in its bytes, so
    that no other message has the same.
    """
    content = b64encode(raw[:REJECTED_BYTES_MAX]).decode()
    rows = reader.find(types=(Rejected.TYPE,), first=after_pos + 1)
    found = (data for row in rows if isinstance(data := decode(row.raw).data, Rejected))
    return next((data for data in found if data.content == content), None)
