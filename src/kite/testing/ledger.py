"""What every ledger must do, whatever database it is on, and how to falsify one."""

# ruff: noqa: S101, PLR2004 - these are tests: assert is the point, and expected numbers stand where they are asserted

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kite.ledger import (
    GENESIS,
    ChainBroken,
    Cursor,
    Draft,
    DraftRefused,
    DuplicateEvent,
    Ledger,
    LedgerTooOld,
    Outgoing,
    Reader,
    Route,
    Row,
    Send,
    rehash,
    session,
    verify,
)
from kite.ledger.address import PostgresAddress, parse
from kite.ledger.chain import RAW_LIMIT_BYTES
from kite.ledger.port import PAGE_ROWS
from kite.ledger.sqlite import connect

_TRIGGERS = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'ledger'"
_ROWS = "SELECT * FROM ledger ORDER BY pos"

BEFORE_LEASE_HOLDER = (
    "ALTER TABLE lease DROP COLUMN holder",
    "ALTER TABLE lease DROP COLUMN counter",
    "ALTER TABLE cursors DROP COLUMN published_us",
    "ALTER TABLE cursors RENAME COLUMN msg_id TO event_id",
    "UPDATE alembic_version SET version_num = '0002'",
)
BEFORE_ROUTES = (*BEFORE_LEASE_HOLDER, "DROP TABLE routes", "UPDATE alembic_version SET version_num = '0001'")
"""What takes a ledger back to the schema it had, as an older version of KITE would have left it."""


def draft(number: int, *, type: str = "kite.test.counted.v1", subject: str = "node/a", trace_id: str = "") -> Draft:  # noqa: A002 - the column's name
    """Return the draft of event `number`: its id, times, bus sequence and bytes all follow from the number."""
    return Draft(
        event_id=f"event-{number:06}",
        type=type,
        subject=subject,
        occurred_us=number * 10,
        ledger_us=number * 10 + 1,
        raw=b'{"number": %d}' % number,
        trace_id=trace_id,
        bus_stream="KITE_EVT",
        bus_epoch=1,
        bus_seq=number,
    )


def drafts(numbers: Iterable[int]) -> list[Draft]:
    """Return one `draft` a number."""
    return [draft(number) for number in numbers]


def outgoing(index: int) -> Outgoing:
    """Return what publishes the draft at `index` of an append."""
    return Outgoing(draft=index, subject=f"kite.dec.v1.d{index}", traceparent=f"00-trace-{index}")


class Interrupted(list[Row]):
    """Rows for a store that call `act` when half of them are on their way into the database."""

    def __init__(self, rows: Iterable[Row], act: Callable[[], object]) -> None:
        super().__init__(rows)
        self._act = act

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows; `act` is called each time."""
        for index, row in enumerate(super().__iter__()):
            if index == len(self) // 2:
                self._act()
            yield row


def forge(url: str, pos: int, raw: bytes, *, rehashed: bool) -> None:
    """Alter one row of a closed ledger, past its triggers; `rehashed` makes the chain fit again behind it.

    What a test of replay or of the chain needs: without `rehashed` the chain breaks at `pos`, with it only the content
    gives the change away.
    """
    address = parse(url)
    if isinstance(address, PostgresAddress):
        _forge_postgres(address, pos, raw, rehashed=rehashed)
    else:
        _forge_sqlite(address, pos, raw, rehashed=rehashed)


def attempt(url: str, statement: str) -> None:
    """Run one SQL statement on the database at `url`, past KITE, and commit it."""
    address = parse(url)
    if isinstance(address, PostgresAddress):
        with session.connect(address) as server:
            server.execute(statement.encode())
        return
    connection = connect(address)
    try:
        connection.execute(statement)
    finally:
        connection.close()


def _forge_sqlite(path: Path, pos: int, raw: bytes, *, rehashed: bool) -> None:
    connection = connect(path)
    connection.execute("BEGIN IMMEDIATE")
    triggers = connection.execute(_TRIGGERS).fetchall()
    for name, _ in triggers:
        connection.execute(f'DROP TRIGGER "{name}"')
    connection.execute("UPDATE ledger SET raw = ? WHERE pos = ?", (raw, pos))
    if rehashed:
        rows = [Row(*values) for values in connection.execute(_ROWS)]
        connection.executemany(
            "UPDATE ledger SET hash = ? WHERE pos = ?", [(row.hash, row.pos) for row in rehash(rows)]
        )
    for _, statement in triggers:
        connection.execute(statement)
    connection.execute("COMMIT")
    connection.close()


def _forge_postgres(address: PostgresAddress, pos: int, raw: bytes, *, rehashed: bool) -> None:
    with session.connect(address) as server, server.transaction(), server.cursor() as cursor:
        cursor.execute("ALTER TABLE ledger DISABLE TRIGGER USER")
        cursor.execute("UPDATE ledger SET raw = %s WHERE pos = %s", (raw, pos))
        if rehashed:
            rows = [Row(*values) for values in cursor.execute(_ROWS).fetchall()]
            cursor.executemany(
                "UPDATE ledger SET hash = %s WHERE pos = %s", [(row.hash, row.pos) for row in rehash(rows)]
            )
        cursor.execute("ALTER TABLE ledger ENABLE TRIGGER USER")


class LedgerContract:
    """Subclass it, with `LeaseContract`, in a test and give the fixture `url`, of a ledger that does not exist yet."""

    def test_an_empty_ledger_has_the_genesis_as_its_head(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            assert (ledger.head.pos, ledger.head.hash, ledger.head.ledger_us, ledger.head.epoch) == (0, GENESIS, 0, 1)
            assert list(ledger.rows()) == []
            assert ledger.append([]) == []

    def test_positions_are_dense_and_the_chain_holds(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            appended = [*ledger.append(drafts([1, 2, 3])), *ledger.append(drafts([4])), *ledger.append(drafts([5, 6]))]
            assert [row.pos for row in appended] == [1, 2, 3, 4, 5, 6]
            assert list(verify(ledger.rows())) == appended
            assert (ledger.head.pos, ledger.head.hash, ledger.head.ledger_us) == (6, appended[-1].hash, 61)

    def test_a_row_is_its_draft_byte_for_byte(self, url: str) -> None:
        odd = replace(
            draft(1),
            raw=bytes(range(256)),
            subject="näh/\x01\U0010ffff",
            occurred_us=-1,
            event_id="ключ",
            trace_id="t",
            key_id="k1",
            signature=bytes(range(64)),
        )
        with Ledger.open(url) as ledger:
            ledger.append([odd])
            (row,) = ledger.rows()
        with Reader.open(url) as reader:
            assert [*reader.rows(), *reader.find()] == [row, row]
            reader.verify_chain()
        assert (row.raw, row.subject, row.occurred_us, row.event_id) == (odd.raw, odd.subject, -1, odd.event_id)
        assert (row.bus_stream, row.bus_epoch, row.bus_seq, row.trace_id) == ("KITE_EVT", 1, 1, "t")
        assert (row.epoch, row.key_id, row.signature) == (1, "k1", odd.signature)

    def test_a_failure_in_mid_append_leaves_nothing_behind(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1, 2]), cursors=[_cursor(2)])
            before = ledger.head
            with pytest.raises(DuplicateEvent) as caught:
                ledger.append(
                    [*drafts([3, 4]), replace(draft(5), event_id="event-000001")],
                    sends=[Outgoing(draft=0, subject="kite.dec.v1.lost")],
                    cursors=[_cursor(5)],
                )
            assert caught.value.event_id == "event-000001"
            assert ledger.head == before
            assert [row.pos for row in ledger.rows()] == [1, 2]
            assert ledger.pending(10) == []
            assert ledger.cursor("KITE_EVT") == _cursor(2)
            assert [row.pos for row in ledger.append(drafts([3]))] == [3]

    def test_an_id_twice_in_one_append_is_refused(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            with pytest.raises(DuplicateEvent, match="event-000002"):
                ledger.append(drafts([1, 2]) + drafts([2]))
            assert ledger.head.pos == 0

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            (replace(draft(2), ledger_us=20), "before"),
            (replace(draft(3), raw=bytes(RAW_LIMIT_BYTES + 1)), "more than"),
            (replace(draft(3), subject="\ud800"), "surrogates"),
            (replace(draft(3), bus_seq=2**63), "int too large|format"),
            (replace(draft(3), subject="node/\0"), "NUL"),
            (replace(draft(3), key_id="\0"), "NUL"),
        ],
        ids=["time runs backwards", "too large", "no UTF-8", "beyond 64 bits", "NUL", "NUL elsewhere"],
    )
    def test_what_no_ledger_can_hold_is_refused_by_its_index(self, url: str, bad: Draft, why: str) -> None:
        with Ledger.open(url) as ledger:
            with pytest.raises(DraftRefused, match=why) as caught:
                ledger.append([draft(2), bad])
            assert caught.value.index == 1
            assert [row.pos for row in ledger.append(drafts([3]))] == [1]

    @pytest.mark.parametrize("sends", [(1,), (-1,), (0, 0)], ids=["not there", "negative", "twice"])
    def test_a_send_belongs_to_one_draft_of_its_append(self, url: str, sends: tuple[int, ...]) -> None:
        with Ledger.open(url) as ledger:
            with pytest.raises(DraftRefused):
                ledger.append(drafts([1]), sends=[Outgoing(draft=index, subject="kite.dec.v1.x") for index in sends])
            assert ledger.head.pos == 0

    def test_known_gives_the_bytes_of_those_that_are_there(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts(range(1, 2_001)))
            asked = [f"event-{number:06}" for number in range(1_000, 3_000)]
            known = ledger.known(asked)
            assert sorted(known) == asked[:1_001]
            assert known["event-001500"] == b'{"number": 1500}'
            assert ledger.known([]) == {}

    def test_a_cursor_is_kept_per_stream_with_the_id_it_stands_on(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            assert ledger.cursor("KITE_EVT") is None
            ledger.append(drafts([1]), cursors=[_cursor(1), _cursor(9, stream="KITE_TEL")])
            ledger.append([], cursors=[_cursor(2)])
        with Ledger.open(url) as ledger:
            assert ledger.cursor("KITE_EVT") == _cursor(2)
            assert ledger.cursor("KITE_TEL") == _cursor(9, stream="KITE_TEL")

    def test_the_outbox_gives_exact_bytes_in_order_and_resumes(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1, 2, 3]), sends=[outgoing(2), outgoing(0)])
            ledger.append(drafts([4, 5]), sends=[outgoing(1)])
            assert [send.pos for send in ledger.pending(10)] == [1, 3, 5]
            assert ledger.pending(1) == [Send(1, "kite.dec.v1.d0", b'{"number": 1}', "event-000001", "00-trace-0")]
            ledger.sent(1)
        with Ledger.open(url) as ledger:
            assert [send.event_id for send in ledger.pending(10)] == ["event-000003", "event-000005"]
            ledger.sent(5)
            assert ledger.pending(10) == []

    def test_what_was_published_leaves_the_outbox_with_the_next_append(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1, 2]), sends=[outgoing(0), outgoing(1)])
            assert [send.pos for send in ledger.pending(10, after_pos=1)] == [2]
            with pytest.raises(DuplicateEvent):
                ledger.append(drafts([2]), sent_pos=2)
            assert [send.pos for send in ledger.pending(10)] == [1, 2]
            ledger.append(drafts([3]), sends=[outgoing(0)], sent_pos=2)
            assert [send.pos for send in ledger.pending(10)] == [3]

    def test_routes_are_replaced_as_a_whole_with_the_rows_that_change_them(self, url: str) -> None:
        first = [_route("risk", "a", pos=1), _route("risk", "b", pos=1), _route("tiny", "a", pos=1)]
        with Ledger.open(url) as ledger, Reader.open(url) as reader:
            assert reader.routes() == []
            ledger.append(drafts([1]), routes=first[::-1])
            assert reader.routes() == first, "by name and instance"
            ledger.append(drafts([2]))
            assert reader.routes("risk") == first[:2]
            with pytest.raises(DuplicateEvent):
                ledger.append(drafts([2]), routes=[])
            assert reader.routes() == first
            ledger.append(drafts([3]), routes=[_route("risk", "b", pos=3)])
            assert reader.routes() == [_route("risk", "b", pos=3)]
            ledger.append([], routes=[])
            assert reader.routes() == []

    def test_a_ledger_without_routes_is_read_all_the_same_until_a_writer_migrates_it(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1]))
        _leave(url, BEFORE_ROUTES)
        with Reader.open(url) as reader:
            assert [row.pos for row in reader.rows()] == [1]
            assert reader.head.epoch == 1
            with pytest.raises(LedgerTooOld, match="0001"):
                reader.routes()
            with pytest.raises(LedgerTooOld, match="0001"):
                _ = reader.lease
            with Ledger.open(url) as ledger:
                ledger.append(drafts([2]), routes=[_route("tiny", "a", pos=2)])
            assert reader.routes() == [_route("tiny", "a", pos=2)]
            reader.verify_chain(last=2)

    def test_a_ledger_without_holders_keeps_its_epoch_and_its_cursors(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1]), cursors=[_cursor(1)], routes=[_route("tiny", "a", pos=1)])
        _leave(url, BEFORE_LEASE_HOLDER)
        with Reader.open(url) as reader:
            assert reader.routes() == [_route("tiny", "a", pos=1)]
            with pytest.raises(LedgerTooOld, match="0002"):
                _ = reader.lease
            known = replace(_cursor(1), published_us=0)
            with Ledger.open(url, holder="b") as ledger:
                assert (ledger.head.pos, ledger.head.epoch, ledger.cursor("KITE_EVT")) == (1, 2, known)
                ledger.append(drafts([2]), cursors=[_cursor(2)])
                assert (reader.lease.epoch, reader.lease.holder) == (2, "b")
            reader.verify_chain(last=2)

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE ledger SET subject = 'node/b' WHERE pos = 2",
            "UPDATE ledger SET pos = 9 WHERE pos = 2",
            "DELETE FROM ledger WHERE pos = 2",
            "DELETE FROM ledger",
        ],
    )
    def test_rows_are_append_only_past_kite_too(self, url: str, statement: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1, 2, 3]))
        with pytest.raises(Exception, match="append-only"):
            attempt(url, statement)
        with Reader.open(url) as reader:
            reader.verify_chain(last=3)

    def test_a_reader_sees_what_is_committed_while_the_writer_writes(self, url: str) -> None:
        with Ledger.open(url) as ledger, Reader.open(url) as reader:
            assert (reader.head, list(reader.rows())) == (ledger.head, [])
            first = ledger.append(drafts([1, 2]))
            walk = reader.rows()
            assert next(walk) == first[0]
            second = ledger.append(drafts([3, 4]))
            assert list(walk) == first[1:], "a walk ends where the head was when it began"
            assert list(reader.rows()) == first + second
            assert reader.head == ledger.head
            reader.verify_chain()

    def test_a_reader_outlives_the_writer(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts([1, 2]))
        with Reader.open(url) as reader:
            with Ledger.open(url) as ledger:
                ledger.append(drafts([3]))
            assert [row.pos for row in reader.rows()] == [1, 2, 3]

    def test_a_walk_crosses_pages_and_keeps_to_its_range(self, url: str) -> None:
        count = 2 * PAGE_ROWS + 3
        with Ledger.open(url) as ledger:
            ledger.append(drafts(range(1, count + 1)))
            assert [row.pos for row in ledger.rows()] == list(range(1, count + 1))
            assert [row.pos for row in ledger.rows(7, PAGE_ROWS + 7)] == list(range(7, PAGE_ROWS + 8))
            assert list(ledger.rows(count + 1)) == []
        with Reader.open(url) as reader:
            assert [row.pos for row in reader.rows(PAGE_ROWS)] == list(range(PAGE_ROWS, count + 1))
            reader.verify_chain(PAGE_ROWS, PAGE_ROWS + 5)

    def test_a_reader_finds_rows_by_what_they_are(self, url: str) -> None:
        wanted = [draft(2, type="kite.test.other.v1", subject="node/b", trace_id="t1"), draft(3, subject="node/b")]
        with Ledger.open(url) as ledger:
            ledger.append([draft(1), *wanted, draft(4, trace_id="t1")])
        with Reader.open(url) as reader:
            assert [row.pos for row in reader.find()] == [1, 2, 3, 4]
            assert [row.pos for row in reader.find(types=["kite.test.other.v1"])] == [2]
            assert [row.pos for row in reader.find(subjects=["node/b", "node/c"])] == [2, 3]
            assert [row.pos for row in reader.find(trace_id="t1", first=3)] == [4]
            assert [row.pos for row in reader.find(types=["kite.test.counted.v1"], last=3)] == [1, 3]
            assert _pos(reader.row(3)) == _pos(reader.by_event_id("event-000003")) == 3
            assert (reader.row(5), reader.row(0), reader.by_event_id("event-000009")) == (None, None, None)

    def test_a_flipped_byte_is_named_by_its_position(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts(range(1, 1_001)))
        forge(url, 700, b'{"number": 701}', rehashed=False)
        with Reader.open(url) as reader:
            with pytest.raises(ChainBroken, match="position 700") as caught:
                reader.verify_chain()
            assert caught.value.pos == 700
            reader.verify_chain(1, 699)
            reader.verify_chain(701)

    def test_a_forged_and_rehashed_row_is_not_seen_by_the_chain_but_by_its_head(self, url: str) -> None:
        with Ledger.open(url) as ledger:
            ledger.append(drafts(range(1, 11)))
            honest = ledger.head
        forge(url, 4, b"{}", rehashed=True)
        with Reader.open(url) as reader:
            reader.verify_chain()
            assert reader.head.pos == honest.pos
            assert reader.head.hash != honest.hash
        with pytest.raises(Exception, match="append-only"):
            attempt(url, "DELETE FROM ledger")


def _cursor(seq: int, *, stream: str = "KITE_EVT") -> Cursor:
    return Cursor(
        stream=stream, bus_epoch=1, seq=seq, msg_id=f"event-{seq:06}", created="2026-01-01T00:00:00Z", published_us=seq
    )


def _leave(url: str, statements: Iterable[str]) -> None:
    for statement in statements:
        attempt(url, statement)


def _route(name: str, instance: str, *, pos: int) -> Route:
    return Route(name, f"{name}@1", instance, "http://127.0.0.1:9000", "upcycle", pos)


def _pos(row: Row | None) -> int | None:
    return row and row.pos
