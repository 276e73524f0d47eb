"""The keys of producers: which the ledger has, and adding one."""

from dataclasses import dataclass

from kite.trust import ProducerKey, key_id
from kite_cli.asking.following import Story, enter, make
from kite_cli.place import Address, reading
from kite_schemas.envelope import decode
from kite_schemas.ledger import ProducerKeyAdded
from kite_schemas.why import Request


@dataclass(frozen=True, slots=True)
class Known:
    """A key as the ledger knows it: the source it speaks for, and since which position."""

    id: str
    source: str
    pos: int
    at_us: int
    actor: str
    reason: str


def known(fleet: Address) -> list[Known]:
    """Return every key of the ledger, by position; of one that was added twice, what holds: the last."""
    found: dict[str, Known] = {}
    with reading(fleet) as reader:
        for row in reader.find(types=(ProducerKeyAdded.TYPE,)):
            data = decode(row.raw).data
            if isinstance(data, ProducerKeyAdded):
                key = ProducerKey.of(data)
                found[key.id] = Known(key.id, key.source, row.pos, row.ledger_us, data.actor, data.reason)
    return sorted(found.values(), key=lambda key: key.pos)


def holds(fleet: Address, source: str, public: bytes) -> Known | None:
    """Return the key as the ledger has it for this source, None when it does not."""
    wanted = key_id(public)
    return next((key for key in known(fleet) if key.id == wanted and key.source == source), None)


async def add(fleet: Address, source: str, public: bytes, *, reason: str) -> Story:
    """Let a public key (32 bytes) speak for a source from its place in the ledger on; the operator's key must sign it.

    Raises UsageError for a source that cannot be, and what `enter` raises.
    """
    return await enter(fleet, f"key/{key_id(public)}", request(source, public, reason))


def request(source: str, public: bytes, reason: str) -> Request:
    """Return the request that adds a key. Raises UsageError for a source that cannot be."""
    return make(ProducerKeyAdded, reason, source=source, public_key=public.hex())
