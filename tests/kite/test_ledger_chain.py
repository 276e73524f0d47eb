"""The hash chain is pure: these tests need no database."""

from dataclasses import fields, replace

import pytest

from kite.ledger import GENESIS, ChainBroken, Head, Row, digest, rehash, verify
from kite.ledger.chain import columns_of, seal
from kite.ledger.tables import ledger
from kite.testing.ledger import drafts

EMPTY = Head(0, GENESIS, 0, 1)


@pytest.fixture
def rows() -> list[Row]:
    return seal(EMPTY, drafts(range(1, 6)))


def test_the_format_of_the_hash_never_changes(rows: list[Row]):
    assert rows[-1].hash.hex() == "b293db06aaec8e3088008c9aaad99921272bb76a1f9e8c1ae26a50a9b7218411"


def test_a_row_has_the_columns_of_the_table_in_their_order(rows: list[Row]):
    assert [field.name for field in fields(Row)] == [column.name for column in ledger.columns]
    assert (*columns_of(rows[0]), rows[0].hash) == tuple(getattr(rows[0], field.name) for field in fields(Row))


@pytest.mark.parametrize("column", [field.name for field in fields(Row)])
def test_a_change_in_any_column_breaks_the_chain_at_its_position(rows: list[Row], column: str):
    value = getattr(rows[2], column)
    altered = value + (b"\0" if isinstance(value, bytes) else "x" if isinstance(value, str) else 1)
    with pytest.raises(ChainBroken) as caught:
        list(verify([*rows[:2], replace(rows[2], **{column: altered}), *rows[3:]]))
    assert caught.value.pos == 3


def test_text_cannot_move_from_one_column_to_the_next_unseen(rows: list[Row]):
    left, right = replace(rows[0], type="ab", subject="c"), replace(rows[0], type="a", subject="bc")
    assert digest(GENESIS, columns_of(left)) != digest(GENESIS, columns_of(right))


@pytest.mark.parametrize(
    ("order", "pos"),
    [((0, 1, 3, 4), 3), ((0, 2, 1, 3, 4), 2), ((0, 0, 1, 2), 2), ((1, 2), 1)],
    ids=["missing", "swapped", "twice", "beginning missing"],
)
def test_rows_missing_or_out_of_order_are_named(rows: list[Row], order: tuple[int, ...], pos: int):
    with pytest.raises(ChainBroken) as caught:
        list(verify(rows[index] for index in order))
    assert caught.value.pos == pos


def test_a_range_is_verified_from_the_hash_before_it(rows: list[Row]):
    assert list(verify(rows[2:], after=2, previous=rows[1].hash)) == rows[2:]
    with pytest.raises(ChainBroken, match="position 3"):
        list(verify(rows[2:], after=2, previous=rows[0].hash))


def test_rehashing_an_altered_decision_makes_the_chain_fit_and_moves_its_head(rows: list[Row]):
    forged = list(rehash([*rows[:2], replace(rows[2], raw=b"{}"), *rows[3:]]))
    assert list(verify(forged)) == forged
    assert [old.hash == new.hash for old, new in zip(rows, forged, strict=True)] == [True, True, False, False, False]


def test_rehashing_an_honest_chain_changes_nothing(rows: list[Row]):
    assert list(rehash(rows)) == rows
