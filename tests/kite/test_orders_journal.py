"""The journal: on disk before the effect, one writer, and no surprise from a foreign or a newer file."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kite.orders import Journal, JournalHeld, JournalTooNew, JournalUnwritable, NotAJournal, State, journal

if TYPE_CHECKING:
    import sqlite3 as driver  # the same interface, with types; never imported
else:
    from pysqlite3 import dbapi2 as driver

HOLDER = """
import sys
from pathlib import Path
from kite.orders import Journal
with Journal.open(Path(sys.argv[1])) as held:
    held.begin("o1", "t", b"order", 7)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "orders.sqlite"


def alter(path: Path, statement: str) -> None:
    connection = driver.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


def test_an_order_lives_from_begun_to_sent(path: Path) -> None:
    with Journal.open(path) as first:
        assert first.find("o1") is None
        assert first.begin("o1", "t", b"order", 7) == 1
    with Journal.open(path) as second:
        (begun,) = second.unfinished()
        assert (begun.state, begun.attempt, begun.raw, begun.published_us) == (State.BEGUN, 1, b"order", 7)
        assert second.begin("o1", "t", b"order", 7) == 2
        second.done("o1", b"outcome")
    with Journal.open(path) as third:
        (done,) = third.unfinished()
        assert (done.state, done.attempt, done.outcome) == (State.DONE, 2, b"outcome")
        third.sent("o1")
        assert third.unfinished() == []
        assert third.find("o1") == done


def test_what_is_unfinished_comes_back_in_the_order_it_was_begun(path: Path) -> None:
    with Journal.open(path) as opened:
        for name in ("c", "a", "b"):
            opened.begin(name, "t", b"", 0)
        opened.done("a", b"outcome")
        opened.begin("c", "t", b"", 0)
        assert [entry.id for entry in opened.unfinished()] == ["c", "a", "b"]


def test_a_dropped_order_stays_dropped_and_a_begun_one_is_not_dropped(path: Path) -> None:
    with Journal.open(path) as opened:
        opened.drop("o1", "t")
        opened.begin("o2", "t", b"order", 7)
        opened.drop("o2", "t")
        states = [entry and entry.state for entry in map(opened.find, ("o1", "o2"))]
        assert states == [State.DROPPED, State.BEGUN]
        opened.abandon("o2")
        assert opened.unfinished() == []


def test_a_refused_order_is_done_without_an_attempt_and_nothing_changes_that(path: Path) -> None:
    with Journal.open(path) as opened:
        opened.refuse("o1", "t", b"order", 7, b"outcome")
        opened.drop("o1", "t")
        opened.refuse("o1", "t", b"order", 7, b"another")
        (entry,) = opened.unfinished()
        assert (entry.state, entry.attempt, entry.raw, entry.outcome) == (State.DONE, 0, b"order", b"outcome")
        opened.sent("o1")
        assert opened.unfinished() == []


def test_what_ended_long_ago_is_forgotten_and_what_is_open_never(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(path) as opened:
        for name in ("sent", "unsent", "begun"):
            opened.begin(name, "t", b"", 0)
        opened.drop("dropped", "t")
        opened.done("sent", b"outcome")
        opened.sent("sent")
        opened.done("unsent", b"outcome")
        opened.prune()
        assert opened.find("sent")
    monkeypatch.setattr(journal, "KEEP_US", -1)
    with Journal.open(path) as later:
        assert [name for name in ("sent", "unsent", "begun", "dropped") if later.find(name)] == ["unsent", "begun"]


def test_a_long_run_forgets_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEEP_US", -1)
    with Journal.open(path) as opened:
        opened.drop("dropped", "t")
        for number in range(journal.PRUNE_EVERY):
            opened.begin(str(number), "t", b"", 0)
        assert opened.find("dropped") is None


def test_the_newest_notice_of_each_subject_is_kept(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.notice("a", b"old", 1)
        journal.notice("b", b"other", 2)
        journal.notice("a", b"new", 3)
    with Journal.open(path) as journal:
        assert [(notice.subject, notice.raw) for notice in journal.notices()] == [("b", b"other"), ("a", b"new")]


def test_a_journal_of_the_version_before_gets_room_for_notices(path: Path) -> None:
    with Journal.open(path) as journal:
        journal.begin("one", "t", b"raw", 1)
    alter(path, "DROP TABLE notices")
    alter(path, "PRAGMA user_version = 1")
    with Journal.open(path) as journal:
        journal.notice("a", b"new", 1)
        assert [entry.id for entry in journal.unfinished()] == ["one"]


def test_one_process_works_from_it_and_the_lock_ends_with_that_process(path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(JournalHeld, match="in use by another worker") as caught:
        Journal.open(path)
    assert caught.value.retryable
    holder.kill()
    holder.communicate()
    with Journal.open(path) as next_one:
        assert [entry.id for entry in next_one.unfinished()] == ["o1"]


def test_a_journal_of_a_later_kite_is_refused_and_left_alone(path: Path) -> None:
    with Journal.open(path) as opened:
        opened.begin("o1", "t", b"order", 7)
    alter(path, "PRAGMA user_version = 99")
    with pytest.raises(JournalTooNew, match="schema 99, this version of KITE knows 2"):
        Journal.open(path)
    alter(path, "PRAGMA user_version = 2")
    with Journal.open(path) as again:
        assert again.find("o1")


@pytest.mark.parametrize("content", [b"something else entirely " * 100, b"SQLite format 3\x00 but not really" * 100])
def test_another_file_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(NotAJournal):
        Journal.open(path)
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    alter(path, "CREATE TABLE theirs (id INTEGER)")
    content = path.read_bytes()
    with pytest.raises(NotAJournal, match="another program wrote it"):
        Journal.open(path)
    assert path.read_bytes() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file" / "orders.sqlite", tmp_path):
        with pytest.raises(JournalUnwritable, match=str(path)):
            Journal.open(path)
