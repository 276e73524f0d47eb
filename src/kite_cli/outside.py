"""Checkpoints that are kept outside of their ledger: in a file, and on the bus. Both are untrusted."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from kite.errors import Fault, KiteError

if TYPE_CHECKING:
    from kite.bus import Message
    from kite_cli.place import Address
    from kite_incident.proofs import Copy

FILE_BYTES_MAX = 65_536
CONNECT_S = 1.0
ASK_S = 5.0
"""How long the bus is waited for in all."""

LOOKED_MSGS = 10_000
"""So many of the newest decisions are looked through: one in a thousand rows is a checkpoint."""

COPIES_MAX = 16
"""More than one, so that a forged message does not hide a genuine one."""


class CheckpointUnusable(KiteError):
    """What was given as a checkpoint is none, or not one of this ledger."""

    code = "checkpoint_unusable"
    fault = Fault.USER

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is no checkpoint to verify by: {why}",
            hint="`kite ledger checkpoint` prints one, to keep elsewhere",
        )
        self.path = path
        self.why = why


def from_file(path: Path) -> "Copy":
    """Read a checkpoint that was kept in a file. Raises CheckpointUnusable."""
    from pydantic import ValidationError

    from kite_incident.proofs import Copy, self_signed

    raw = _read(path)
    try:
        copy = Copy.model_validate_json(raw, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise CheckpointUnusable(
            path, ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        ) from None
    if not self_signed(copy):
        raise CheckpointUnusable(path, "its signature is not that of its public key")
    return copy


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CheckpointUnusable(path, error.strerror or str(error)) from error
    if len(raw) > FILE_BYTES_MAX:
        raise CheckpointUnusable(path, f"more than {FILE_BYTES_MAX} bytes")
    return raw


def from_bus(fleet: "Address") -> "tuple[list[Copy], str]":
    """Return the newest checkpoints that the bus of a fleet has, and why it could not be asked, if it could not."""
    from kite_cli.running import run

    if not fleet.nats_url:
        return [], "the fleet is not running"
    try:
        return run(_ask(fleet.nats_url)), ""
    except KiteError as error:
        return [], str(error)
    except TimeoutError:
        return [], f"no answer within {ASK_S:g} s"


async def _ask(url: str) -> "list[Copy]":
    from kite.bus import DEC, FLEET, Bus, dec_subject
    from kite_cli.place import login

    subject = dec_subject(FLEET, FLEET, "checkpointed", "ledger/fleet")
    found: list[Copy] = []
    async with asyncio.timeout(ASK_S), await Bus.connect(url, "kite-ledger", login=login(), wait_s=CONNECT_S) as bus:
        state = await bus.stream(DEC)
        after = max(state.first_seq - 1, state.last_seq - LOOKED_MSGS, 0)
        if after >= state.last_seq:
            return []
        async with aclosing(bus.pull(DEC, after)) as pulled:
            async for messages in pulled:
                found += [copy for one in messages if one.subject == subject and (copy := _copy(one)) is not None]
                if messages[-1].seq >= state.last_seq:
                    break
    return found[-COPIES_MAX:]


def _copy(message: "Message") -> "Copy | None":
    from kite_incident.proofs import Copy
    from kite_schemas.envelope import MalformedEvent, decode
    from kite_schemas.ledger import Checkpointed

    try:
        data = decode(message.payload).data
    except MalformedEvent:
        return None
    if not isinstance(data, Checkpointed) or not data.pos:
        return None
    return Copy.model_validate(data.model_dump(), extra="ignore")
