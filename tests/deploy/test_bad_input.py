"""What a deployment can be told that cannot be: each is one error, in one line, that shows no secret."""

import asyncio
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import psycopg
import pytest

from kite.bus import Bus
from kite.errors import UsageError
from kite.ledger import Ledger, LedgerTooNew, LedgerUnreachable, Reader
from kite.settings import SettingsInvalid, told
from kite.testing.bus import nats
from kite.testing.ledger import attempt
from kite.testing.postgres import ADMIN, DATABASE, LOOPBACK, OWNER, Postgres
from kite_arbitrator.service import serve
from kite_arbitrator.settings import Settings
from kite_arbitrator.testing.running import Place

SERVICES = ("arbitrator", "upcycle", "yoco", "guard")
PASSWORD = "the-right-one"  # noqa: S105 - of a server of this test
HBA = f"local all {ADMIN} trust\nhost all {OWNER} {LOOPBACK}/32 scram-sha-256\n"
GOOD = {"KITE_NATS_URL": "nats://127.0.0.1:4222", "KITE_LEDGER_URL": "sqlite:////tmp/ledger.db"}


# --- Settings


async def ended(service: str) -> tuple[int, list[str]]:
    """Run a service that is told nothing; return its exit code and what it said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KITE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"kite_{service}", stderr=asyncio.subprocess.PIPE, env=env
    )
    _, err = await process.communicate()
    return process.returncode or 0, err.decode().splitlines()


async def test_a_service_that_is_told_nothing_says_what_it_has_to_be_told():
    for code, lines in await asyncio.gather(*map(ended, SERVICES)):
        assert code == 1
        (line,) = lines
        assert "code=settings_invalid" in line
        assert "KITE_NATS_URL: not set" in line


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"KITE_LOG_LEVEL": "loud"}, "KITE_LOG_LEVEL: "),
        ({"KITE_METRICS_PORT": "seventy"}, "KITE_METRICS_PORT: "),
        ({"KITE_METRICS_PORT": "0", "KITE_DURABLE": "perhaps"}, "KITE_METRICS_PORT: .*; KITE_DURABLE: "),
    ],
)
def test_every_setting_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, wrong: Mapping[str, str], said: str):
    for name, value in {**GOOD, **wrong}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsInvalid, match=said) as caught:
        told(Settings)
    assert not any(value in str(caught.value) for value in wrong.values() if value.isalpha())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nats",
        "nats://",
        "127.0.0.1:4222",
        "http://127.0.0.1:4222",
        "nats://127.0.0.1:x",
        "nats://127.0.0.1:0",
        "nats://127.0.0.1:70000",
        "nats://a:4222,",
        "nats://a:4222 nats://b:4222",
        "nats://user:secret@[::1",
    ],
)
async def test_what_names_no_bus_is_a_usage_error_that_tells_no_password(url: str):
    with pytest.raises(UsageError, match="no address of a NATS server") as caught:
        await Bus.connect(url, "test")
    assert "KITE_NATS_URL" in caught.value.hint
    assert "secret" not in str(caught.value)


# --- The database


@pytest.fixture(scope="module")
def guarded() -> Generator[str]:
    """The URL of a database that asks for a password."""
    with Postgres.start() as server:
        url = server.create_database(DATABASE)
        admin = f"host={server.folder} port={server.port} user={ADMIN} dbname={ADMIN}"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"ALTER ROLE {OWNER} PASSWORD '{PASSWORD}'".encode())
        (server.folder / "data" / "pg_hba.conf").write_text(HBA)
        server.restart()
        yield url


@pytest.fixture
def passfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libpq looks for the password."""
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    return tmp_path / "pgpass"


def fill(passfile: Path, content: str, mode: int) -> None:
    passfile.write_text(content)
    passfile.chmod(mode)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0o600, "no password supplied"),
        ("", 0o600, "no password supplied"),
        (f"*:*:*:*:{PASSWORD}\n", 0o644, "no password supplied"),
        ("*:*:*:*:kite\n", 0o600, 'password authentication failed for user "kite"'),
        ("*:*:*:*:postgres\n", 0o600, 'password authentication failed for user "kite"'),
    ],
    ids=["missing", "empty", "that others can read", "the user's name", "a usual default"],
)
async def test_a_password_file_that_does_not_let_it_in(
    guarded: str, passfile: Path, content: str | None, mode: int, said: str
):
    if content is not None:
        fill(passfile, content, mode)
    async with nats(passfile.parent) as server:
        with pytest.RaisesGroup(pytest.RaisesExc(LedgerUnreachable, match=said), allow_unwrapped=True):
            await serve(Place(server, guarded).settings)


def test_the_right_password_does(guarded: str, passfile: Path):
    fill(passfile, f"*:*:*:*:{PASSWORD}\n", 0o600)
    with Ledger.open(guarded) as ledger, Reader.open(guarded) as reader:
        assert ledger.head.epoch == reader.lease.epoch == 1


async def test_an_arbitrator_leaves_a_ledger_of_a_later_version_as_it_is(tmp_path: Path):
    async with nats(tmp_path) as server:
        place = Place.beside(server, tmp_path)
        Ledger.open(place.url).close()
        attempt(place.url, "UPDATE alembic_version SET version_num = '9999'")
        before = (tmp_path / "ledger.db").read_bytes()
        with pytest.RaisesGroup(LedgerTooNew, allow_unwrapped=True, flatten_subgroups=True):
            await serve(place.settings)
        assert (tmp_path / "ledger.db").read_bytes() == before
