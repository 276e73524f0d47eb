"""A ledger's URL: which database it names, and what of it may be shown."""

from pathlib import Path

import pytest

from kite.errors import KiteError, UsageError
from kite.ledger import Ledger, LedgerUnreachable, Reader
from kite.ledger.address import PostgresAddress, parse


def parameters(url: str) -> dict[str, str]:
    address = parse(url)
    assert isinstance(address, PostgresAddress)
    return address.parameters


def test_a_file_is_an_absolute_path(tmp_path: Path):
    assert parse(f"sqlite:///{tmp_path}/ledger.db") == tmp_path / "ledger.db"
    assert parse("sqlite:///ledger.db") == Path("ledger.db").resolve()


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_a_server_is_named_by_host_port_user_and_database(scheme: str):
    found = parameters(f"{scheme}://kite@db.example:5433/ledger?sslmode=require")
    wanted = {"user": "kite", "host": "db.example", "port": "5433", "dbname": "ledger", "sslmode": "require"}
    assert found == wanted


def test_a_unix_socket_and_several_hosts_are_named_behind_the_question_mark():
    assert parameters("postgresql:///ledger?host=/run/postgresql") == {"dbname": "ledger", "host": "/run/postgresql"}
    assert parameters("postgresql:///ledger?host=a&host=b&target_session_attrs=read-write")["host"] == "a,b"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://kite:hidden@127.0.0.1:1/ledger",
        "postgresql://kite@127.0.0.1:1/ledger?password=hidden",
        "postgresql://kite:hidden@127.0.0.1:1/ledger?sslmode=disable",
    ],
)
def test_a_password_reaches_libpq_and_no_message(url: str):
    assert parameters(url)["password"] == "hidden"  # noqa: S105 - a password for this test
    assert "hidden" not in repr(parse(url))
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(
            LedgerUnreachable, match=r"the ledger postgresql://kite@127\.0\.0\.1:1/ledger does"
        ) as caught:
            opener(url)
        assert "hidden" not in said(caught.value)
        assert caught.value.retryable


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ledger.db",
        "postgresql:/kite:hidden@h/d",
        "postgresql://kite:hidden@h",
        "postgresql://kite:hidden@h:port/d",
        "postgresql+asyncpg://kite:hidden@h/d",
        "mysql://kite:hidden@h/d",
        "sqlite://kite:hidden@h/d",
    ],
)
def test_what_names_no_ledger_is_a_usage_error_that_tells_no_password(url: str):
    for opener in (Ledger.open, Reader.open):
        with pytest.raises(UsageError) as caught:
            opener(url)
        assert "hidden" not in said(caught.value)
        assert "postgresql://user@host:port/database" in caught.value.hint
        assert "PGPASSFILE" in caught.value.hint


def test_a_parameter_that_libpq_does_not_know_is_a_usage_error():
    with pytest.raises(UsageError, match='invalid connection option "colour"'):
        Ledger.open("postgresql://h/d?colour=red")


def said(error: KiteError) -> str:
    return f"{error} {error.hint} {error!r}"
