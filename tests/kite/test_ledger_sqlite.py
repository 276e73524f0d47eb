"""The ledger on SQLite: the contract, and what only a file can go through."""

import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kite.errors import UsageError
from kite.ledger import (
    ChainBroken,
    Ledger,
    LedgerHeld,
    LedgerMissing,
    LedgerUnwritable,
    NotALedger,
    Reader,
    SqliteTooOld,
)
from kite.ledger.sqlite import connect, require_library
from kite.testing.lease import LeaseContract
from kite.testing.ledger import LedgerContract, attempt, drafts

BATCH_ROWS = 200

APPENDING = f"""
import sys
from itertools import count
from kite.ledger import Cursor, Ledger, Outgoing
from kite.testing.ledger import drafts

ledger = Ledger.open(sys.argv[1])
for batch in count(ledger.head.pos // {BATCH_ROWS}):
    numbers = range(batch * {BATCH_ROWS} + 1, (batch + 1) * {BATCH_ROWS} + 1)
    cursor = Cursor(stream="KITE_EVT", bus_epoch=1, seq=numbers[-1], msg_id="last", created="then")
    ledger.append(drafts(numbers), sends=[Outgoing(draft=0, subject="kite.dec.v1.x")], cursors=[cursor])
    print(ledger.head.pos, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


class TestSqliteLedger(LedgerContract, LeaseContract):
    """The contract, on SQLite."""


@contextmanager
def appending(url: str) -> Generator["subprocess.Popen[str]"]:
    """A real process that appends until it is killed, and prints each position that is durable."""
    with subprocess.Popen([sys.executable, "-c", APPENDING, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(process: "subprocess.Popen[str]") -> int:
    assert process.stdout
    return int(process.stdout.readline())


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_process_killed_in_mid_append_leaves_whole_appends_and_a_valid_chain(url: str, after: int):
    with appending(url) as process:
        acknowledged = max(printed(process) for _ in range(after))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with Reader.open(url) as reader:
        reader.verify_chain(last=acknowledged)
    with Ledger.open(url) as ledger:
        assert ledger.head.epoch == 2
        assert ledger.head.pos >= acknowledged
        assert ledger.head.pos % BATCH_ROWS == 0
        cursor = ledger.cursor("KITE_EVT")
        assert cursor
        assert cursor.seq == ledger.head.pos
        assert [send.pos for send in ledger.pending(10_000)] == list(range(1, ledger.head.pos, BATCH_ROWS))
        end = ledger.head.pos
        ledger.append(drafts([end + 1]))
    with Reader.open(url) as reader:
        reader.verify_chain(last=end + 1)


def test_the_holder_of_the_lease_is_named_and_its_death_frees_it_at_once(url: str, path: Path):
    with appending(url) as process:
        printed(process)
        with pytest.raises(LedgerHeld, match=f"{path} is held by .*:{process.pid}") as caught:
            Ledger.open(url)
        assert caught.value.holder == f"{socket.gethostname()}:{process.pid}"
        process.kill()
        process.wait()
        with Reader.open(url) as reader:
            assert reader.lease.holder == caught.value.holder, "it could not give it back; the lock is what counts"
        Ledger.open(url).close()


def test_a_ledger_reached_by_another_name_is_the_same_ledger(url: str, path: Path):
    alias = path.with_name("alias.db")
    with Ledger.open(url):
        alias.symlink_to(path)
        with pytest.raises(LedgerHeld):
            Ledger.open(f"sqlite:///{alias}")


def test_a_tail_that_was_cut_off_is_missed_when_the_caller_knows_the_end(url: str):
    with Ledger.open(url) as ledger:
        ledger.append(drafts([1, 2]))
    with Reader.open(url) as reader:
        with pytest.raises(ChainBroken, match="position 3: missing"):
            reader.verify_chain(last=4)
        with pytest.raises(ChainBroken, match="position 6: missing"):
            reader.verify_chain(first=7)


COPY = """INSERT OR REPLACE INTO ledger
          SELECT {pos}, epoch, '', 0, 0, {event_id}, type, subject, 0, 0, '', '', x'', x'', hash
          FROM ledger WHERE pos = 2"""


@pytest.mark.parametrize(
    ("pos", "event_id", "why"),
    [(2, "'new'", "dense"), (9, "'new'", "dense"), (4, "event_id", "once"), ("NULL", "'new'", "dense")],
    ids=["row replaced", "gap", "row replaced by its id", "position left to SQLite"],
)
def test_a_row_cannot_be_replaced_past_kite(url: str, pos: object, event_id: str, why: str):
    with Ledger.open(url) as ledger:
        ledger.append(drafts([1, 2, 3]))
    with pytest.raises(Exception, match=why):
        attempt(url, COPY.format(pos=pos, event_id=event_id))
    with Reader.open(url) as reader:
        reader.verify_chain(last=3)
        assert reader.head.pos == 3


def test_somebody_else_writing_the_database_stops_the_append(url: str, path: Path):
    with Ledger.open(url) as ledger:
        ledger.append(drafts([1, 2]))
        attempt(url, COPY.format(pos=3, event_id="'foreign'"))
        with pytest.raises(LedgerUnwritable, match="not the next") as caught:
            ledger.append(drafts([3]))
        assert caught.value.place == str(path)


CROWDED = """
import resource, sys
from kite.ledger import Ledger, LedgerUnwritable
from kite.testing.ledger import drafts

ledger = Ledger.open(sys.argv[1])
ledger.append(drafts([1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    ledger.append(drafts(range(2, 5_000)))
except LedgerUnwritable as error:
    print(ledger.head.pos, error)
"""


def test_an_append_without_room_leaves_the_ledger_as_it_was(url: str, path: Path):
    done = subprocess.run([sys.executable, "-c", CROWDED, url], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"1 the ledger {path} cannot be written: ")
    with Reader.open(url) as reader:
        reader.verify_chain()
        assert reader.head.pos == 1


def test_a_path_that_cannot_be_written_is_one_clear_error_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    for place in ("file/ledger.db", "nowhere/ledger.db"):
        with pytest.raises(LedgerUnwritable, match=place):
            Ledger.open(f"sqlite:///{tmp_path / place}")
        with pytest.raises(LedgerMissing, match=place):
            Reader.open(f"sqlite:///{tmp_path / place}")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_in_the_ledgers_place_is_unwritable_and_the_lease_is_free_again(path: Path, url: str):
    path.mkdir()
    with pytest.raises(LedgerUnwritable, match="unable to open"):
        Ledger.open(url)
    path.rmdir()
    Ledger.open(url).close()


def test_a_file_of_another_kind_is_left_alone(path: Path, url: str):
    path.write_bytes(b"this is no database" * 100)
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(NotALedger, match="not a database"):
            opener(url)
    assert path.read_bytes() == b"this is no database" * 100


def test_a_database_of_somebody_else_is_left_alone(url: str):
    attempt(url, "CREATE TABLE orders (id)")
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(NotALedger):
            opener(url)


def test_a_reader_creates_nothing(path: Path, url: str):
    with pytest.raises(LedgerMissing, match=str(path)):
        Reader.open(url)
    path.touch()
    with pytest.raises(NotALedger, match="no ledger table"):
        Reader.open(url)
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_size == 0


def test_a_damaged_file_is_an_error_of_ours(path: Path, url: str):
    with Ledger.open(url) as ledger:
        ledger.append(drafts(range(1, 2_001)))
    content = bytearray(path.read_bytes())
    content[16_384:] = b"\xff" * (len(content) - 16_384)
    path.write_bytes(content)
    with Reader.open(url) as reader, pytest.raises(NotALedger, match="malformed"):
        reader.verify_chain()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ledger.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite://host/ledger.db",
        "sqlite:///a.db?mode=ro",
        "mysql://h/d",
    ],
)
def test_a_url_that_names_no_file_is_a_usage_error(url: str):
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(UsageError) as caught:
            opener(url)
        assert "sqlite:////absolute/path" in caught.value.hint


def test_a_path_with_odd_characters_is_read_and_written(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'a b#c%41.db'}"
    with Ledger.open(url) as ledger, Reader.open(url) as reader:
        ledger.append(drafts([1]))
        assert reader.head == ledger.head


def test_a_sqlite_that_can_corrupt_a_ledger_is_refused():
    require_library()
    require_library((3, 51, 3))
    for found in ((3, 7, 0), (3, 51, 2), (3, 40, 1)):
        with pytest.raises(SqliteTooOld) as caught:
            require_library(found)
        assert caught.value.found == found
    assert str(caught.value) == "SQLite 3.40.1 is older than 3.51.3 and can corrupt a ledger"


def test_appends_are_durable_and_readers_are_not_in_the_way(path: Path, url: str):
    Ledger.open(url).close()
    connection = connect(path)
    try:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA mmap_size").fetchone() in {None, (0,)}
    finally:
        connection.close()
