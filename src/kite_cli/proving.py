"""How `kite ledger verify` goes over a ledger, and tells what it found."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kite.errors import Fault, KiteError, UsageError
from kite.ledger import GENESIS, ChainBroken, NotALedger
from kite_cli.output import Progress, count, fail, note, say
from kite_cli.outside import CheckpointUnusable
from kite_incident import proofs
from kite_incident.proofs import Copy, Proof, Scope, Standing
from kite_schemas.ledger import ProducerKeyAdded

if TYPE_CHECKING:
    from kite.ledger import Reader, Row

PROGRESS_ROWS = 1_000
ASIDE = {
    Standing.NOT_GENUINE: "its signature is not that of an arbitrator's key",
    Standing.OTHER_LEDGER: "it is of another ledger",
}


class NothingToVerify(KiteError):
    """The ledger is empty: that is a failure, not a success."""

    code = "nothing_to_verify"
    fault = Fault.USER


def prove(reader: "Reader", scope: Scope, progress: Progress) -> Proof:
    """Check the rows of the scope, telling how far it is."""
    return proofs.prove(_walked(reader, scope, progress), scope)


def scope(
    reader: "Reader", span: tuple[int, int | None], operator: bytes | None, copies: Sequence[tuple[str, Copy]]
) -> Scope:
    """Return what is to be proven. Raises UsageError for a range that the ledger does not have, and NothingToVerify."""
    head = reader.head.pos
    first, last = span[0], head if span[1] is None else span[1]
    if not head and not copies:
        raise NothingToVerify("the ledger is empty", hint="`kite up` writes its first rows")
    if last > head or first > max(last, 1):
        raise UsageError(f"positions {first} to {last} are no range of a ledger that ends at {head}")
    before = reader.row(first - 1) if first > 1 else None
    return Scope(
        ledger=proofs.born(_row(reader, 1)),
        first=first,
        last=last,
        head=head,
        hash_at=lambda pos: _hash_at(reader, pos),
        previous=GENESIS if first == 1 else before and before.hash,
        operator=operator,
        keys=tuple(reader.find(types=[ProducerKeyAdded.TYPE], last=first - 1)),
        copies=copies,
    )


def require_own(path: Path, scope: Scope) -> None:
    """Raise CheckpointUnusable when the checkpoint of the file is of another ledger."""
    _, copy = scope.copies[0]
    if scope.ledger and copy.ledger != scope.ledger:
        raise CheckpointUnusable(path, f"it is of ledger {copy.ledger}, and this is {scope.ledger}")


def require_genuine(path: Path, proof: Proof) -> None:
    """Raise CheckpointUnusable when a key of the ledger shows that the file was altered."""
    if proof.outside[0].standing is Standing.NOT_GENUINE:
        raise CheckpointUnusable(path, ASIDE[Standing.NOT_GENUINE])


def tell(proof: Proof, unasked: str) -> None:
    """Print what was checked and the first break; `unasked` is why the bus could not be asked."""
    scope = proof.scope
    known = proof.checkpoints - proof.unchecked_checkpoints
    say(f"rows: {proof.rows} checked, positions {scope.first} to {scope.last} of {scope.head}")
    say(f"signatures: {proof.signatures} checked, {proof.unchecked_signatures} not checked")
    say(f"checkpoints: {proof.checkpoints}, the signatures of {known} checked{_behind(proof)}")
    say(f"outside: {_kept(proof)}")
    if unasked:
        note(f"the bus was not asked for its newest checkpoint: {unasked}")
    for one in proof.outside:
        if one.standing in ASIDE:
            note(f"the checkpoint {one.origin} of position {one.copy.pos} is set aside: {ASIDE[one.standing]}")
    if proof.broken is not None:
        found = proof.broken
        what = f"{found.what.replace('_', ' ')}: expected {found.expected}; found {found.found}"
        fail(f"broken at position {found.pos}, {what}", "nothing was repaired; restore the ledger from a copy")


def record(proof: Proof, unasked: str) -> dict[str, object]:
    """Return the same as one object."""
    scope = proof.scope
    return {
        "ledger": scope.ledger or None,
        "first": scope.first,
        "last": scope.last,
        "head": scope.head,
        "rows": proof.rows,
        "signatures": proof.signatures,
        "unchecked_signatures": proof.unchecked_signatures,
        "checkpoints": proof.checkpoints,
        "unchecked_checkpoints": proof.unchecked_checkpoints,
        "checkpoint_pos": proof.checkpoint_pos or None,
        "kept_pos": proof.kept_pos or None,
        "outside": [{"origin": one.origin, "pos": one.copy.pos, "standing": one.standing} for one in proof.outside],
        "bus_unasked": unasked or None,
        "ok": proof.broken is None,
        "broken": asdict(proof.broken) if proof.broken else None,
    }


def _behind(proof: Proof) -> str:
    if not proof.checkpoint_pos:
        return ""
    behind = count(proof.scope.head - proof.checkpoint_pos, "row")
    return f"; the last is of position {proof.checkpoint_pos}, {behind} behind it"


def _kept(proof: Proof) -> str:
    if not proof.kept_pos:
        return "no checkpoint to compare with: a tail that was cut off would not be noticed"
    behind = count(proof.scope.head - proof.kept_pos, "row")
    return f"position {proof.kept_pos} is there, {behind} behind it: a tail cut off there would not be noticed"


def _hash_at(reader: "Reader", pos: int) -> bytes | None:
    try:
        row = reader.row(pos)
    except NotALedger:
        return b""  # such a row is there, and is none that was written
    return row.hash if row else None


def _row(reader: "Reader", pos: int) -> "Row | None":
    try:
        return reader.row(pos)
    except NotALedger:
        return None  # the walk names it


def _walked(reader: "Reader", scope: Scope, progress: Progress) -> "Iterator[Row]":
    """Yield the rows of the scope; where a page cannot be read, one by one up to the row at fault."""
    pos = scope.first - 1
    try:
        for row in reader.rows(scope.first, scope.last):
            yield row
            pos = row.pos
            if pos % PROGRESS_ROWS == 0:
                progress.waiting(f"verifying {pos} of {scope.last}")
    except NotALedger:
        for single in range(pos + 1, scope.last + 1):
            try:
                found = reader.row(single)
            except NotALedger as error:
                raise ChainBroken(single, error.detail) from error
            if found is not None:
                yield found
