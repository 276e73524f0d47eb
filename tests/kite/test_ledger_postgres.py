"""The ledger on PostgreSQL: the contract, and what only a server, two leaders or a broken connection can do to it."""

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Barrier, Thread

import psutil
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from kite.ledger import (
    AsyncLedger,
    LeaseLost,
    Ledger,
    LedgerHeld,
    LedgerMissing,
    LedgerUnreachable,
    LedgerUnwritable,
    NotALedger,
    Outgoing,
    Reader,
    Row,
    lease,
)
from kite.ledger.address import postgres_address
from kite.ledger.chain import seal
from kite.ledger.postgres import PostgresStore, source
from kite.ledger.rows import Head
from kite.ledger.session import Session, connect
from kite.ledger.tables import REVISIONS, metadata
from kite.testing.eventually import eventually
from kite.testing.lease import LeaseContract
from kite.testing.ledger import Interrupted, LedgerContract, attempt, drafts
from kite.testing.postgres import DATABASE, Postgres

BATCH_ROWS = 2_000
LEADER = "a leader"


@pytest.fixture
def url(empty_database: str) -> str:
    """A ledger that does not exist yet."""
    return empty_database


@pytest.fixture
def mortal_url(mortal: Postgres) -> str:
    return mortal.clear(DATABASE)


class TestPostgresLedger(LedgerContract, LeaseContract):
    """The contract, on PostgreSQL."""


@contextmanager
def leading(url: str) -> Generator[tuple[PostgresStore, Head]]:
    """The store of a leader that has appended one row."""
    store = PostgresStore.open(postgres_address(url), LEADER, None)
    try:
        head = store.take()
        (row,) = seal(head, drafts([1]))
        store.write([row], [], [])
        yield store, Head(row.pos, row.hash, row.ledger_us, head.epoch)
    finally:
        store.close()


def batch(head: Head) -> list[Row]:
    return seal(head, drafts(range(2, BATCH_ROWS + 2)))


def ask(url: str, query: str) -> object:
    with connect(postgres_address(url)) as session:
        (answer,) = session.execute(query.encode()).fetchone() or (None,)
        return answer


# --- Two leaders


def test_a_lease_is_taken_from_one_whose_counter_stood_still(url: str):
    with Ledger.open(url, holder="a") as first, Reader.open(url) as reader:
        first.append(drafts([1]))
        seen = reader.lease
        with pytest.raises(LedgerHeld) as caught:
            Ledger.open(url, holder="b")
        assert (caught.value.holder, reader.lease) == ("a", seen), "to ask changes nothing"
        with Ledger.open(url, holder="b", seen=seen) as second:
            assert (second.head.epoch, second.head.pos) == (2, 1)
            assert (reader.lease.epoch, reader.lease.holder) == (2, "b")
            second.append(drafts([2]))
        reader.verify_chain(last=2)


@pytest.mark.parametrize(
    "life", [Ledger.renew, partial(Ledger.append, drafts=drafts([1])), partial(Ledger.sent, up_to_pos=1)]
)
def test_a_lease_is_not_taken_from_one_that_gave_a_sign_of_life(url: str, life: Callable[[Ledger], object]):
    with Ledger.open(url, holder="a") as first, Reader.open(url) as reader:
        seen = reader.lease
        life(first)
        with pytest.raises(LedgerHeld, match="held by a"):
            Ledger.open(url, holder="b", seen=seen)
        first.renew()


def test_a_leader_that_was_replaced_between_two_appends_writes_nothing_more(url: str):
    with Ledger.open(url, holder="a") as first, Reader.open(url) as reader:
        first.append(drafts([1]), sends=[Outgoing(draft=0, subject="kite.dec.v1.x")])
        with Ledger.open(url, holder="b", seen=reader.lease) as second:
            taken = reader.lease
            for write in (lambda: first.append(drafts([2])), lambda: first.sent(1), first.renew):
                with pytest.raises(LeaseLost, match="held by b in epoch 2"):
                    write()
            first.close()
            assert (reader.lease, reader.head.pos) == (taken, 1)
            assert [send.pos for send in second.pending(10)] == [1]
            second.append(drafts([2]))
        reader.verify_chain(last=2)


PAUSED = """
import os, signal, sys
from kite.errors import KiteError
from kite.ledger import Ledger, Outgoing
from kite.ledger.address import postgres_address
from kite.ledger.chain import seal
from kite.ledger.postgres import PostgresStore
from kite.testing.eventually import eventually
from kite.testing.ledger import Interrupted, drafts

store = PostgresStore.open(postgres_address(sys.argv[1]), "paused", None)
rows = seal(store.take(), drafts(range(1, 2_001)))
send = Outgoing(draft=0, subject="kite.dec.v1.x")
for write in (
    lambda: store.write(Interrupted(rows, lambda: os.kill(os.getpid(), signal.SIGSTOP)), [(1, send)], []),
    lambda: store.write(rows, [(1, send)], []),
    store.renew,
    lambda: Ledger.open(sys.argv[1]),
):
    try:
        write()
    except KiteError as error:
        print(type(error).__name__)
"""


def test_a_leader_that_is_paused_in_mid_transaction_is_replaced_and_cannot_write_when_it_wakes_up(url: str):
    with subprocess.Popen([sys.executable, "-c", PAUSED, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            with Reader.open(url) as reader:
                seen = reader.lease
                assert seen.holder == "paused"
                with Ledger.open(url, holder="b", seen=seen) as second:
                    second.append(drafts([7]))
                    process.send_signal(signal.SIGCONT)
                    told, _ = process.communicate()
                    second.append(drafts([8]))
                    assert second.pending(10) == []
                assert [row.event_id for row in reader.rows()] == ["event-000007", "event-000008"]
                reader.verify_chain(last=2)
        finally:
            process.kill()
    assert told.split() == ["LedgerUnreachable", "LedgerUnreachable", "LedgerUnreachable", "LedgerHeld"]


def race(openers: list[Callable[[], Ledger]]) -> tuple[list[Ledger], int]:
    """Let all open at the same moment; return those that lead, and how many were told that another does."""
    start = Barrier(len(openers))

    def run(opener: Callable[[], Ledger]) -> Ledger | None:
        start.wait()
        try:
            return opener()
        except LedgerHeld:
            return None

    with ThreadPoolExecutor(len(openers)) as pool:
        ended = list(pool.map(run, openers))
    return [ledger for ledger in ended if ledger], ended.count(None)


def test_of_those_that_saw_the_same_lease_stand_still_one_wins(url: str):
    ledger = Ledger.open(url)
    with Reader.open(url) as reader:
        for turn in range(1, 6):
            seen = reader.lease
            leaders, refused = race([partial(Ledger.open, url, seen=seen)] * 3)
            assert (len(leaders), refused) == (1, 2)
            with pytest.raises(LeaseLost):
                ledger.renew()
            ledger.close()
            (ledger,) = leaders
            ledger.append(drafts([turn]))
            assert (ledger.head.epoch, ledger.head.pos) == (turn + 1, turn)
        ledger.close()
        reader.verify_chain(last=5)


def test_of_those_that_begin_on_an_empty_database_one_leads_and_it_is_migrated_once(url: str):
    leaders, refused = race([partial(Ledger.open, url)] * 4)
    assert (len(leaders), refused) == (1, 3)
    assert leaders[0].append(drafts([1]))[0].pos == 1
    leaders[0].close()
    assert ask(url, "SELECT version_num FROM alembic_version") == REVISIONS[-1]


def test_nobody_migrates_under_a_writer(url: str):
    with Ledger.open(url, holder="an older KITE"), Reader.open(url) as reader:
        before = reader.lease
        attempt(url, "UPDATE alembic_version SET version_num = '0002'")
        with pytest.raises(LedgerHeld, match="held by an older KITE"):
            Ledger.open(url)
        assert reader.lease == before


def test_a_writer_that_stood_still_is_replaced_before_its_ledger_is_migrated(url: str):
    with Ledger.open(url, holder="an older KITE") as older, Reader.open(url) as reader:
        with connect(postgres_address(url)) as session, session.transaction():
            lease.free(session, url, reader.lease)
        with pytest.raises(LeaseLost, match="it is now free in epoch 1"):
            older.renew()


async def test_a_standby_on_its_own_thread_takes_over(url: str):
    with Ledger.open(url, holder="a") as first, Reader.open(url) as reader:
        second = await AsyncLedger.open(url, holder="b", seen=reader.lease)
        await second.append(drafts([1]))
        await second.renew()
        assert (reader.lease.holder, reader.head.epoch, reader.head.pos) == ("b", 2, 1)
        with pytest.raises(LeaseLost):
            first.renew()
        await second.close()
        assert reader.lease.holder == ""


# --- A server that goes, a connection that breaks


def cut(_: Postgres, url: str) -> None:
    attempt(
        url, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'kite-ledger-1'"
    )


def crash(server: Postgres, _: str) -> None:
    server.restart(immediate=True)


@pytest.mark.parametrize("harm", [cut, crash])
def test_of_an_append_that_was_interrupted_nothing_is_there(
    mortal: Postgres, mortal_url: str, harm: Callable[[Postgres, str], None]
):
    url = mortal_url
    with leading(url) as (store, head):
        rows = Interrupted(batch(head), lambda: harm(mortal, url))
        with pytest.raises(LedgerUnreachable):
            store.write(rows, [(2, Outgoing(draft=0, subject="kite.dec.v1.x"))], [])
        for again in (store.renew, lambda: store.known(["event-000001"]), lambda: store.page(1, 1)):
            with pytest.raises(LedgerUnreachable):
                again()
    with Reader.open(url) as reader:
        assert (reader.head.pos, reader.lease.holder) == (1, LEADER), "it could not give the lease back"
        with Ledger.open(url, seen=reader.lease) as ledger:
            assert (ledger.head.epoch, ledger.head.hash, ledger.pending(10)) == (2, head.hash, [])
            ledger.append(drafts(range(2, BATCH_ROWS + 2)))
        reader.verify_chain(last=BATCH_ROWS + 1)


class Wire:
    """A wire to the server that, once `cut_commit` is set, carries the next COMMIT and breaks before its answer."""

    def __init__(self, server_port: int) -> None:
        self.cut_commit = False
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for end in ready:
                    sent = end.recv(65_536)
                    if not sent:
                        return
                    (server if end is client else client).sendall(sent)
                    if self.cut_commit and end is client and b"COMMIT" in sent:
                        server.recv(65_536)
                        return


@pytest.fixture
def wire(postgres: Postgres) -> Generator[Wire]:
    wire = Wire(postgres.port)
    yield wire
    wire.close()


def test_a_commit_whose_answer_was_lost_is_read_in_the_head_of_the_next_opening(url: str, wire: Wire):
    with leading(f"postgresql://kite@127.0.0.1:{wire.port}/{url.rpartition('/')[2]}") as (store, head):
        wire.cut_commit = True
        with pytest.raises(LedgerUnreachable):
            store.write(batch(head), [], [])
    with Reader.open(url) as reader, Ledger.open(url, seen=reader.lease) as ledger:
        assert ledger.head.pos == BATCH_ROWS + 1
        reader.verify_chain(last=BATCH_ROWS + 1)


def test_a_reader_outlives_the_server(mortal: Postgres, mortal_url: str):
    url = mortal_url
    with Ledger.open(url) as ledger:
        rows = ledger.append(drafts([1, 2]))
    with Reader.open(url) as reader:
        asking: list[Callable[[], object]] = [
            lambda: reader.head,
            lambda: list(reader.rows(1, 2)),
            lambda: reader.lease,
        ]
        for ask_again in asking:
            assert list(reader.rows()) == rows
            mortal.halt()
            try:
                for _ in range(2):
                    with pytest.raises(LedgerUnreachable):
                        ask_again()
                for opener in (Ledger.open, Reader.open):
                    with pytest.raises(LedgerUnreachable):
                        opener(url)
            finally:
                mortal.resume()
        assert list(reader.rows()) == rows


# --- What the database holds, and what it refuses


def test_the_migrations_lead_to_the_tables_of_the_code(url: str):
    Ledger.open(url).close()
    connection = source(postgres_address(url)).connection
    try:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == REVISIONS[-1]
    finally:
        connection.close()


def test_an_append_is_durable_and_bounded_in_its_waiting(url: str):
    with connect(postgres_address(url)) as session:
        assert [shown(session, name) for name in ("synchronous_commit", "lock_timeout")] == ["on", "3s"]
        assert shown(session, "idle_in_transaction_session_timeout") == "15s"


def shown(session: Session, name: str) -> object:
    (value,) = session.execute("SELECT current_setting(%s)", (name,)).fetchone() or (None,)
    return value


def test_a_ledger_cannot_be_emptied(url: str):
    with Ledger.open(url) as ledger:
        ledger.append(drafts([1, 2]))
    for statement in ("TRUNCATE ledger", "TRUNCATE ledger CASCADE"):
        with pytest.raises(psycopg.Error, match="append-only: TRUNCATE"):
            attempt(url, statement)
    with Reader.open(url) as reader:
        reader.verify_chain(last=2)


COPY = """INSERT INTO ledger SELECT {pos}, epoch, '', 0, 0, event_id || '-' || pos, type, subject,
                                        0, 0, '', '', raw, raw, hash FROM ledger"""


@pytest.mark.parametrize("pos", ["pos + 4", "pos - 3", "pos * 2 + 2", "-pos"])
def test_a_row_that_is_not_the_next_is_refused(url: str, pos: str):
    with Ledger.open(url) as ledger:
        ledger.append(drafts([1, 2, 3]))
    with pytest.raises(psycopg.Error, match="dense"):
        attempt(url, COPY.format(pos=pos))
    with Reader.open(url) as reader:
        reader.verify_chain(last=3)
        assert reader.head.pos == 3


def test_somebody_else_writing_the_database_stops_the_append(url: str):
    with Ledger.open(url) as ledger:
        ledger.append(drafts([1, 2]))
        attempt(url, COPY.format(pos="pos + 2"))
        with pytest.raises(LedgerUnwritable, match="duplicate key"):
            ledger.append(drafts([3]))


def test_a_reader_cannot_write(url: str):
    Ledger.open(url).close()
    with connect(postgres_address(url), readonly=True) as session, pytest.raises(psycopg.Error, match="read-only"):
        session.execute("UPDATE lease SET epoch = 9")


def test_a_database_that_is_not_there_or_empty_is_no_ledger_yet(postgres: Postgres, url: str):
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(LedgerMissing, match="/nowhere"):
            opener(postgres.url("nowhere"))
    with pytest.raises(LedgerMissing):
        Reader.open(url)
    assert ask(url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0


def test_a_database_of_somebody_else_is_left_alone(url: str):
    attempt(url, "CREATE TABLE orders (id int)")
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(NotALedger):
            opener(url)
    assert ask(url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 1


def test_a_database_in_another_encoding_is_refused(postgres: Postgres):
    with pytest.raises(LedgerUnwritable, match="encoding is LATIN1"):
        Ledger.open(postgres.create_database("latin", encoding="LATIN1"))


def test_a_user_that_the_server_does_not_know_is_told(url: str):
    with pytest.raises(LedgerUnreachable, match='role "stranger" does not exist'):
        Ledger.open(url.replace("kite@", "stranger@"))


def test_a_unix_socket_leads_to_the_same_ledger(postgres: Postgres, url: str):
    with Ledger.open(postgres.socket_url(url.rpartition("/")[2])) as ledger, Reader.open(url) as reader:
        ledger.append(drafts([1]))
        assert reader.head == ledger.head


PARENT = """
import sys
from kite.testing.postgres import DATABASE, Postgres
server = Postgres.start()
print(server.pid, server.folder, flush=True)
sys.stdin.read()
"""


async def test_the_server_of_the_tests_dies_with_a_killed_parent():
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    try:
        pid, folder = (await parent.stdout.readline()).decode().split()
    finally:
        parent.kill()
        await parent.wait()
    await eventually(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie")
    shutil.rmtree(folder)
