"""Proofs: whatever is done to a ledger, the first break is named; what nobody could notice is said to be so."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kite.ledger import GENESIS, Row, rehash
from kite.trust import Signer
from kite_incident.proofs import Break, Copy, Proof, Scope, Standing, What, born, prove
from kite_incident.testing import Book
from kite_schemas.ledger import Tick, sealed

ARBITRATOR, YOCO, STRANGER, OPERATOR = (Signer.of(bytes([number]) * 32) for number in (1, 2, 3, 4))
CHECKPOINT = 7
"""Position of the checkpoint in the told ledger; it signs for the row before it."""


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """1 created, 2 key of the arbitrator, 3 key of yoco, 4 and 5 facts, 6 tick, 7 checkpoint, 8 fact."""
    with Book.new(f"sqlite:///{tmp_path / 'ledger.db'}", OPERATOR) as book:
        book.let_in("kite/arbitrator/1", ARBITRATOR)
        book.let_in("kite/yoco/a", YOCO)
        book.fact(1, YOCO)
        book.fact(2, YOCO)
        book.put(Tick())
        book.checkpoint(ARBITRATOR)
        book.fact(3, YOCO)
        return book.rows


def proof(rows: Sequence[Row], **changed: Any) -> Proof:
    """Prove all rows; the operator's key is not known unless given."""
    hashes = {row.pos: row.hash for row in rows}
    head = max(hashes, default=0)
    scope = Scope(ledger=born(rows[0] if rows else None), first=1, last=head, head=head, hash_at=hashes.get)
    return prove(rows, replace(scope, **changed))


def trusting(rows: Sequence[Row], **changed: Any) -> Proof:
    return proof(rows, operator=OPERATOR.public, **changed)


def altered(rows: Sequence[Row], pos: int, **columns: Any) -> list[Row]:
    """Alter columns of a row and make the chain fit again: only signatures and checkpoints give it away."""
    return list(rehash([replace(row, **columns) if row.pos == pos else row for row in rows]))


def copy_of(name: str, row: Row, **changed: Any) -> Copy:
    digest = row.hash.hex()
    signature = ARBITRATOR.sign(sealed(name, row.pos, digest)).value.hex()
    fields = {"ledger": name, "pos": row.pos, "hash": digest, "key_id": ARBITRATOR.key_id, "signature": signature}
    return Copy.model_validate({**fields, **changed})


def flipped(row: Row) -> bytes:
    return row.raw.replace(b'"instances":1', b'"instances":9')


def broken(found: Proof) -> tuple[int, What]:
    assert found.broken is not None
    return found.broken.pos, found.broken.what


def test_an_untouched_ledger_is_proven_with_and_without_the_operators_key(rows: list[Row]):
    known = trusting(rows)
    assert (known.broken, known.rows, known.signatures, known.unchecked_signatures) == (None, 8, 5, 0)
    assert (known.checkpoints, known.unchecked_checkpoints, known.checkpoint_pos) == (1, 0, CHECKPOINT - 1)
    unknown = proof(rows)
    assert (unknown.broken, unknown.signatures, unknown.unchecked_signatures) == (None, 3, 2), "not the operator's two"
    assert (unknown.kept_pos, unknown.outside) == (0, ())


def test_an_altered_row_is_named_by_the_chain(rows: list[Row]):
    row = rows[3]
    touched = [*rows[:3], replace(row, raw=flipped(row)), *rows[4:]]
    found = proof(touched).broken
    assert found is not None
    assert (found.pos, found.what, found.expected) == (4, What.ALTERED, f"hash {row.hash.hex()}")
    assert found.found.startswith("content with hash ")


def test_a_missing_row_is_named_wherever_it_was(rows: list[Row]):
    found = proof([*rows[:4], *rows[5:]])
    assert found.broken == Break(5, What.MISSING, "a row", "position 6 is the next")
    assert broken(proof(rows[1:], ledger=born(rows[0]))) == (1, What.MISSING)
    assert broken(proof(rows[:5], last=6, head=8)) == (6, What.MISSING)
    assert broken(proof(rows[4:], first=5, previous=None)) == (4, What.MISSING)


def test_a_column_of_another_kind_is_an_altered_row(rows: list[Row]):
    odd: Any = "text where bytes are written"
    assert broken(proof([*rows[:4], replace(rows[4], raw=odd), *rows[5:]])) == (5, What.ALTERED)


def test_a_chain_that_was_made_to_fit_does_not_hide_an_altered_fact(rows: list[Row]):
    touched = altered(rows, 4, raw=flipped(rows[3]))
    assert broken(proof(touched)) == broken(trusting(touched)) == (4, What.SIGNATURE)


def test_a_row_that_nobody_signed_is_covered_by_the_next_checkpoint(rows: list[Row]):
    found = proof(altered(rows, 6, occurred_us=1)).broken
    assert found is not None
    assert (found.pos, found.what) == (CHECKPOINT - 1, What.CHECKPOINT)
    assert found.expected == f"hash {rows[CHECKPOINT - 2].hash.hex()}, as signed at position {CHECKPOINT}"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"key_id": "", "signature": b""}, "none: unsigned"),
        ({"key_id": STRANGER.key_id}, "key_unknown"),
        ({"signature": b""}, "signature_wrong"),
        ({"signature": bytes(64)}, "signature_wrong"),
        ({"key_id": "", "signature": b"", "bus_stream": ""}, "none: unsigned"),
    ],
    ids=["stripped", "a stranger's key", "no bytes", "other bytes", "stripped and said to be the arbitrator's"],
)
def test_with_the_operators_key_no_fact_stands_without_its_producer(rows: list[Row], columns: dict[str, Any], why: str):
    found = trusting(altered(rows, 5, **columns)).broken
    assert found is not None
    assert (found.pos, found.what) == (5, What.SIGNATURE)
    assert found.found.endswith(why)


def test_without_the_operators_key_an_unknown_key_is_only_not_checked(rows: list[Row]):
    found = proof(altered(rows[:6], 5, key_id=STRANGER.key_id))
    assert (found.broken, found.signatures, found.unchecked_signatures) == (None, 1, 3)


def test_a_key_that_the_operator_did_not_sign_for_lets_nobody_in(tmp_path: Path):
    with Book.new(f"sqlite:///{tmp_path / 'ledger.db'}", OPERATOR) as book:
        book.let_in("kite/yoco/a", YOCO, by=STRANGER)
        book.fact(1, YOCO)
        rows = book.rows
    assert broken(trusting(rows)) == (2, What.SIGNATURE)
    assert broken(trusting(rows[2:], first=3, last=3, previous=rows[1].hash, keys=[rows[1]])) == (3, What.SIGNATURE)
    assert proof(rows).broken is None, "nobody says whose keys they are"


def test_a_producer_speaks_for_its_own_node_only(tmp_path: Path):
    with Book.new(f"sqlite:///{tmp_path / 'ledger.db'}", OPERATOR) as book:
        book.let_in("kite/yoco/a", YOCO)
        book.fact(1, YOCO, node="b")
        rows = book.rows
    found = trusting(rows).broken
    assert found is not None
    assert (found.pos, found.found) == (3, f"{YOCO.key_id}: not_of_producer")


def test_rows_from_before_the_first_key_need_no_signature(tmp_path: Path):
    with Book.new(f"sqlite:///{tmp_path / 'ledger.db'}", OPERATOR) as book:
        book.fact(1)
        book.let_in("kite/yoco/a", YOCO)
        book.fact(2, YOCO)
        book.fact(3)
        rows = book.rows
    assert broken(trusting(rows)) == (5, What.SIGNATURE)


def test_an_event_must_be_the_one_that_its_columns_name(rows: list[Row]):
    assert broken(trusting(altered(rows, 5, subject="node/z"))) == (5, What.ALTERED)
    assert broken(proof(altered(rows, 3, raw=b"{}"))) == (3, What.ALTERED)


@pytest.mark.parametrize(
    ("signer", "pos", "expected"),
    [
        (STRANGER, None, None),
        (YOCO, None, (4, What.CHECKPOINT)),
        (ARBITRATOR, 2, (2, What.CHECKPOINT)),
        (ARBITRATOR, 4, (4, What.CHECKPOINT)),
        (ARBITRATOR, 0, (4, What.CHECKPOINT)),
    ],
    ids=["an unknown key", "no arbitrator's key", "another row", "its own position", "no position"],
)
def test_a_checkpoint_must_be_an_arbitrators_and_fit(
    tmp_path: Path, signer: Signer, pos: int | None, expected: tuple[int, What] | None
):
    with Book.new(f"sqlite:///{tmp_path / 'ledger.db'}", OPERATOR) as book:
        book.let_in("kite/arbitrator/1", ARBITRATOR)
        book.let_in("kite/yoco/a", YOCO)
        book.checkpoint(signer, pos)
        rows = book.rows
    found = trusting(rows)
    assert (found.broken and broken(found)) == expected
    assert found.unchecked_checkpoints == (expected is None)


def test_a_checkpoint_of_another_ledger_is_a_break(rows: list[Row]):
    assert broken(proof(rows, ledger="00000000-0000-0000-0000-000000000000")) == (CHECKPOINT, What.CHECKPOINT)


def test_a_tail_that_was_cut_off_is_noticed_from_outside_only(rows: list[Row]):
    kept = copy_of(born(rows[0]), rows[6])
    whole = proof(rows, copies=[("on the bus", kept)])
    assert (whole.broken, whole.kept_pos) == (None, 7)
    assert whole.outside[0].standing is Standing.THERE
    assert proof(rows[:5]).broken is None, "the rows that are left fit"
    cut = proof(rows[:5], copies=[("on the bus", kept)]).broken
    assert cut is not None
    assert (cut.pos, cut.what, cut.found) == (6, What.CUT_TAIL, "the ledger ends at position 5")
    assert "the checkpoint on the bus" in cut.expected
    nothing = proof([], copies=[("in the file", kept)])
    assert broken(nothing) == (1, What.CUT_TAIL)


def test_a_tail_that_was_written_anew_is_noticed_too(rows: list[Row]):
    kept = copy_of(born(rows[0]), rows[7])
    assert broken(proof(altered(rows, 8, occurred_us=1), copies=[("in the file", kept)])) == (8, What.CHECKPOINT)


def test_of_two_breaks_the_first_is_named(rows: list[Row]):
    kept = copy_of(born(rows[0]), rows[7])
    touched = altered(rows[:6], 4, raw=flipped(rows[3]))
    assert broken(proof(touched, copies=[("in the file", kept)])) == (4, What.SIGNATURE)
    early = copy_of(born(rows[0]), rows[2], hash="00" * 32, key_id=STRANGER.key_id)
    assert broken(proof(touched, copies=[("in the file", early)])) == (3, What.CHECKPOINT)


@pytest.mark.parametrize(
    ("changed", "standing"),
    [
        ({"hash": "00" * 32}, Standing.NOT_GENUINE),
        ({"pos": 99}, Standing.NOT_GENUINE),
        ({"key_id": YOCO.key_id}, Standing.NOT_GENUINE),
        ({"key_id": STRANGER.key_id, "public_key": STRANGER.public.hex()}, Standing.NOT_GENUINE),
        ({"ledger": "00000000-0000-0000-0000-000000000000"}, Standing.OTHER_LEDGER),
    ],
)
def test_a_copy_that_is_not_genuine_says_nothing_of_the_ledger(
    rows: list[Row], changed: dict[str, Any], standing: Standing
):
    found = proof(rows, copies=[("on the bus", copy_of(born(rows[0]), rows[6], **changed))])
    assert (found.broken, found.outside[0].standing, found.kept_pos) == (None, standing, 0)


def test_a_range_takes_the_keys_from_before_it(rows: list[Row]):
    part = {"first": 5, "last": 7, "head": 8, "previous": rows[3].hash, "keys": rows[1:3], "ledger": born(rows[0])}
    hashes = {row.pos: row.hash for row in rows}
    found = trusting(rows[4:7], **part, hash_at=hashes.get)
    assert (found.broken, found.rows, found.signatures, found.checkpoints) == (None, 3, 1, 1)
    assert broken(trusting(rows[4:7], **{**part, "previous": GENESIS}, hash_at=hashes.get)) == (5, What.ALTERED)
