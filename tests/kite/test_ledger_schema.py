"""Migrations: they lead from nothing to exactly the tables of the code, in a checkout and in a wheel."""

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from kite.ledger import Ledger, MigrationsMissing
from kite.ledger.schema import locate
from kite.ledger.sqlite import reading
from kite.ledger.tables import REVISIONS, metadata

ROOT = Path(__file__).parents[2]


def test_the_migrations_lead_to_the_tables_of_the_code(tmp_path: Path):
    path = tmp_path / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    with reading(path).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == REVISIONS[-1]


def test_a_comparison_would_have_seen_a_difference(tmp_path: Path):
    path = tmp_path / "ledger.db"
    with Ledger.open(f"sqlite:///{path}"):
        pass
    with reading(path).connect() as connection:
        altered = type(metadata)()
        for table in metadata.sorted_tables[1:]:
            table.to_metadata(altered)
        assert len(compare_metadata(MigrationContext.configure(connection), altered)) == 1


def test_the_code_knows_every_migration_and_no_other():
    config = Config()
    config.set_main_option("script_location", str(locate()))
    scripts = ScriptDirectory.from_config(config)
    assert tuple(script.revision for script in reversed(list(scripts.walk_revisions()))) == REVISIONS


def test_opening_again_migrates_nothing(tmp_path: Path):
    path = tmp_path / "ledger.db"
    seen: list[int] = []
    for _ in range(2):
        Ledger.open(f"sqlite:///{path}").close()
        with reading(path).connect() as connection:
            seen.append(connection.execute(text("PRAGMA schema_version")).scalar_one())
    assert seen[0] == seen[1]


def test_the_migrations_are_found_in_a_checkout_and_in_a_wheel(tmp_path: Path):
    assert locate() == ROOT / "migrations"
    wheel, checkout = tmp_path / "wheel", tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "env.py").touch()
    assert locate((wheel, checkout)) == checkout
    with pytest.raises(MigrationsMissing, match=r"in none of .*wheel"):
        locate((wheel,))
