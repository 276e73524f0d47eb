"""Proofs that a ledger is what was written: its chain, who signed its rows, checkpoints, its end. Pure over rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Annotated

from pydantic import Field

from kite.ledger import GENESIS, ChainBroken, Row, rehash, verify
from kite.trust import Distrusted, Keyring, ProducerKey, Signature, verifies
from kite_schemas.envelope import Event, MalformedEvent, decode
from kite_schemas.ledger import Checkpointed, Created, KeyId, ProducerKeyAdded, PublicKey, sealed
from kite_schemas.ledger import Signature as SignatureText
from kite_schemas.model import INT64_MAX, Digest, EventId, Model
from kite_schemas.registry import TYPES

CHECKPOINTERS = "kite/arbitrator/"
"""How the source of a key begins that may sign checkpoints."""

EXPECTED = {
    Distrusted.UNSIGNED: "a signature",
    Distrusted.KEY_UNKNOWN: "a key that the operator let in before",
    Distrusted.SIGNATURE_WRONG: "a signature over these bytes",
    Distrusted.NOT_OF_PRODUCER: "a key that may say this",
}

_KINDS = tuple(field.type for field in fields(Row))
_VALUES: Callable[[Row], tuple[object, ...]] = attrgetter(*(field.name for field in fields(Row)))


class What(StrEnum):
    """How a ledger turns out not to be the one that was written."""

    MISSING = "missing"
    ALTERED = "altered"
    SIGNATURE = "signature"
    CHECKPOINT = "checkpoint"
    CUT_TAIL = "cut_tail"


@dataclass(frozen=True, slots=True)
class Break:
    """The first position that is not as it was written."""

    pos: int
    what: What
    expected: str
    found: str


class Copy(Model):
    """A checkpoint that was kept outside of its ledger: untrusted."""

    ledger: EventId
    pos: Annotated[int, Field(strict=True, ge=1, le=INT64_MAX)]
    hash: Digest
    key_id: KeyId
    signature: SignatureText
    public_key: PublicKey | None = None


class Standing(StrEnum):
    """What a ledger has at the position of a copy; the last two say nothing of the ledger."""

    THERE = "there"
    ABSENT = "absent"
    OTHER_HASH = "other_hash"
    NOT_GENUINE = "not_genuine"
    OTHER_LEDGER = "other_ledger"


@dataclass(frozen=True, slots=True)
class Compared:
    """A copy, where it came from, and how the ledger stands to it; `checked` when its key is one of the ledger's."""

    origin: str
    copy: Copy
    standing: Standing
    checked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is to be proven of a ledger: positions `first` to `last` of `head`.

    `previous` is the hash before `first` (None: that row is missing), `keys` are the rows before it that let keys in,
    `operator` is the operator's public key (None: not known), `copies` are checkpoints from outside with their origin,
    `hash_at` gives the hash at a position, None without a row.
    """

    ledger: str
    first: int
    last: int
    head: int
    hash_at: Callable[[int], bytes | None]
    previous: bytes | None = GENESIS
    operator: bytes | None = None
    keys: Sequence[Row] = ()
    copies: Sequence[tuple[str, Copy]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was checked up to the first break, if there is one; `unchecked_*` have keys that are not known.

    `checkpoint_pos` is the newest position that a checkpoint of the ledger itself vouches for, 0 without one.
    """

    scope: Scope
    rows: int
    signatures: int
    unchecked_signatures: int
    checkpoints: int
    unchecked_checkpoints: int
    checkpoint_pos: int
    outside: tuple[Compared, ...]
    broken: Break | None

    @property
    def kept_pos(self) -> int:
        """The newest position that a copy from outside vouches for: no earlier tail was cut off. 0 without one."""
        return max((one.copy.pos for one in self.outside if one.standing is Standing.THERE), default=0)


def born(row: Row | None) -> str:
    """Return the id of the ledger whose first row this is, empty when the row does not tell."""
    try:
        data = decode(row.raw).data if row else None
    except MalformedEvent:
        return ""
    return data.ledger if isinstance(data, Created) else ""


def prove(rows: Iterable[Row], scope: Scope) -> Proof:
    """Walk `rows`, those of the scope, up to the first break; then hold the copies from outside against the ledger."""
    walk = _Walk(scope)
    broken = walk.through(rows)
    outside = tuple(_compare(origin, copy, scope, walk.keys) for origin, copy in scope.copies)
    breaks = [found for one in outside if (found := _lacks(one, scope)) is not None]
    return Proof(
        scope=scope,
        rows=walk.rows,
        signatures=walk.signatures,
        unchecked_signatures=walk.unchecked_signatures,
        checkpoints=walk.checkpoints,
        unchecked_checkpoints=walk.unchecked_checkpoints,
        checkpoint_pos=walk.checkpoint_pos,
        outside=outside,
        broken=min([broken, *breaks] if broken else breaks, key=lambda one: one.pos, default=None),
    )


def self_signed(copy: Copy) -> bool:
    """Tell whether a copy fits the public key that it brings, if it brings one: a typing error then shows."""
    return copy.public_key is None or _covers(copy, bytes.fromhex(copy.public_key))


class _Walk:
    """Goes through the rows once, and knows the keys that were let in so far."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._keyring = Keyring(scope.operator)
        self.keys: dict[str, ProducerKey] = {}
        self.rows = 0
        self.signatures = 0
        self.unchecked_signatures = 0
        self.checkpoints = 0
        self.unchecked_checkpoints = 0
        self.checkpoint_pos = 0
        for row in scope.keys:
            self._let_in_before(row)

    def through(self, rows: Iterable[Row]) -> Break | None:
        scope, sound = self._scope, _Sound(rows)
        previous = scope.previous
        if previous is None:
            return Break(scope.first - 1, What.MISSING, "a row", "none")
        try:
            for row in verify(sound, after=scope.first - 1, previous=previous):
                previous = row.hash
                self.rows += 1
                if (found := self._judge(row)) is not None:
                    return found
        except ChainBroken as error:
            return _unlinked(error, sound.last, previous)
        end = scope.first + self.rows
        return None if end > scope.last else Break(end, What.MISSING, f"a row, as up to {scope.last}", "none")

    def _judge(self, row: Row) -> Break | None:
        try:
            return self._signature(row) or self._content(row)
        except MalformedEvent as error:
            return Break(row.pos, What.ALTERED, f"an event {row.type}", str(error))

    def _signature(self, row: Row) -> Break | None:
        if not self._must_be_signed(row):
            return None
        if self._scope.operator is not None:
            return self._distrusted(row)
        key = self.keys.get(row.key_id)
        if key is None:
            self.unchecked_signatures += 1
            return None
        self.signatures += 1
        if verifies(key.public, row.raw, row.signature):
            return None
        return Break(row.pos, What.SIGNATURE, f"a signature of {key.source} over these bytes", f"{key.id}: not theirs")

    def _must_be_signed(self, row: Row) -> bool:
        """Once the operator has let a key in, nothing of a producer is taken without; removing one shows too."""
        if row.key_id or row.signature or row.type == ProducerKeyAdded.TYPE:
            return True
        model = TYPES.get(row.type)
        if not self.keys or (model is not None and model.KIND in ("ledger", "decision")):
            return False
        return bool(row.bus_stream) or (model is not None and model.KIND == "fact")

    def _distrusted(self, row: Row) -> Break | None:
        """Judge as the arbitrator did when the message came."""
        header = Signature(row.key_id, row.signature).header if row.key_id or row.signature else ""
        verdict = self._keyring.check(row.raw, header, _event(row))
        self.signatures += 1
        if isinstance(verdict, Distrusted):
            return Break(row.pos, What.SIGNATURE, EXPECTED[verdict], f"{row.key_id or 'none'}: {verdict}")
        return None

    def _content(self, row: Row) -> Break | None:
        if row.type not in (ProducerKeyAdded.TYPE, Checkpointed.TYPE):
            return None
        match _event(row).data:
            case ProducerKeyAdded() as added:
                self._admit(added)
            case Checkpointed() as checkpoint:
                return self._checkpoint(row, checkpoint)
            case _:
                pass
        return None

    def _admit(self, added: ProducerKeyAdded) -> None:
        self._keyring.admit(added)
        key = ProducerKey.of(added)
        self.keys[key.id] = key

    def _let_in_before(self, row: Row) -> None:
        """Take a key from before the range, unless the operator did not sign for it."""
        event = decode(row.raw)
        header = Signature(row.key_id, row.signature).header
        trusted = not isinstance(self._keyring.check(row.raw, header, event), Distrusted)
        if isinstance(event.data, ProducerKeyAdded) and (trusted or self._scope.operator is None):
            self._admit(event.data)

    def _checkpoint(self, row: Row, data: Checkpointed) -> Break | None:
        self.checkpoints += 1
        copy = Copy.model_validate(data.model_dump(), extra="ignore") if data.pos else None
        if copy is None or copy.pos >= row.pos or copy.ledger != self._scope.ledger:
            expected = f"a position before it of ledger {self._scope.ledger or '(unnamed)'}"
            return Break(row.pos, What.CHECKPOINT, expected, f"position {data.pos} of ledger {data.ledger}")
        key = self.keys.get(copy.key_id)
        if key is not None and not _vouches(copy, key):
            return Break(row.pos, What.CHECKPOINT, "a signature of an arbitrator", f"{key.id} of {key.source}: not so")
        self.unchecked_checkpoints += key is None
        found = self._scope.hash_at(copy.pos)
        if found is None or found.hex() != copy.hash:
            expected = f"hash {copy.hash}, as signed at position {row.pos}"
            return Break(copy.pos, What.CHECKPOINT, expected, f"hash {found.hex()}" if found else "no row")
        self.checkpoint_pos = copy.pos
        return None


class _Sound:
    """Passes rows on and keeps the last one. A column of another kind than the ledger writes is no row of one."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows
        self.last: Row | None = None

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            if tuple(map(type, _VALUES(row))) != _KINDS:  # SQLite stores any kind in any column
                raise ChainBroken(row.pos, "a column of another kind")
            self.last = row
            yield row


def _unlinked(error: ChainBroken, last: Row | None, previous: bytes) -> Break:
    """Say what `verify` saw at its end; `last` is the row it saw last, `previous` the hash it had proven before."""
    if last is None or last.pos < error.pos:
        return Break(error.pos, What.ALTERED, "a row that can be read", error.what)
    if last.pos > error.pos:
        return Break(error.pos, What.MISSING, "a row", f"position {last.pos} is the next")
    (fitting,) = rehash([last], previous=previous)
    return Break(error.pos, What.ALTERED, f"hash {last.hash.hex()}", f"content with hash {fitting.hash.hex()}")


def _event(row: Row) -> Event:
    """Read the event of a row, which must be the one that the columns name. Raises MalformedEvent."""
    event = decode(row.raw)
    header = event.header
    if (header.id, header.type, header.subject) != (row.event_id, row.type, row.subject):
        raise MalformedEvent(f"{header.type} {header.id} about {header.subject}, unlike its columns")
    return event


def _compare(origin: str, copy: Copy, scope: Scope, keys: dict[str, ProducerKey]) -> Compared:
    key = keys.get(copy.key_id)
    if scope.ledger and copy.ledger != scope.ledger:
        standing = Standing.OTHER_LEDGER
    elif not (_vouches(copy, key) if key else self_signed(copy)):
        standing = Standing.NOT_GENUINE
    elif (found := scope.hash_at(copy.pos)) is None:
        standing = Standing.ABSENT
    else:
        standing = Standing.THERE if found.hex() == copy.hash else Standing.OTHER_HASH
    return Compared(origin, copy, standing, key is not None)


def _vouches(copy: Copy, key: ProducerKey) -> bool:
    return key.source.startswith(CHECKPOINTERS) and _covers(copy, key.public)


def _covers(copy: Copy, public: bytes) -> bool:
    return verifies(public, sealed(copy.ledger, copy.pos, copy.hash), bytes.fromhex(copy.signature))


def _lacks(one: Compared, scope: Scope) -> Break | None:
    expected = f"hash {one.copy.hash} at position {one.copy.pos}, as the checkpoint {one.origin} says"
    if not one.checked:
        expected += " (signed by a key that the ledger does not know)"
    match one.standing:
        case Standing.ABSENT if one.copy.pos > scope.head:
            return Break(scope.head + 1, What.CUT_TAIL, expected, f"the ledger ends at position {scope.head}")
        case Standing.ABSENT:
            return Break(one.copy.pos, What.MISSING, expected, "none")
        case Standing.OTHER_HASH:
            return Break(one.copy.pos, What.CHECKPOINT, expected, "another hash")
        case _:
            return None
