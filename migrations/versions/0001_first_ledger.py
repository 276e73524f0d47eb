"""The first ledger: rows, outbox, cursors, lease, and the triggers that make rows append-only."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

# INSERT OR REPLACE deletes without asking the DELETE trigger, hence the two on INSERT.
SQLITE_TRIGGERS = (
    """CREATE TRIGGER ledger_no_update BEFORE UPDATE ON ledger
       BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: UPDATE is refused'); END""",
    """CREATE TRIGGER ledger_no_delete BEFORE DELETE ON ledger
       BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: DELETE is refused'); END""",
    """CREATE TRIGGER ledger_dense BEFORE INSERT ON ledger
       WHEN NEW.pos IS NOT (SELECT COALESCE(MAX(pos), 0) + 1 FROM ledger)
       BEGIN SELECT RAISE(ABORT, 'the ledger is dense: this position is not the next'); END""",
    """CREATE TRIGGER ledger_once BEFORE INSERT ON ledger
       WHEN EXISTS (SELECT 1 FROM ledger WHERE event_id = NEW.event_id)
       BEGIN SELECT RAISE(ABORT, 'the ledger holds each event once: this id is taken'); END""",
)

# Dense by statement, not by row: a COPY of 1 000 rows asks once.
POSTGRES_TRIGGERS = (
    """CREATE FUNCTION ledger_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
       BEGIN RAISE EXCEPTION 'the ledger is append-only: % is refused', TG_OP; END $$""",
    """CREATE TRIGGER ledger_no_change BEFORE UPDATE OR DELETE ON ledger
       FOR EACH ROW EXECUTE FUNCTION ledger_refuse()""",
    """CREATE TRIGGER ledger_no_truncate BEFORE TRUNCATE ON ledger
       FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse()""",
    """CREATE FUNCTION ledger_follow() RETURNS trigger LANGUAGE plpgsql AS $$
       DECLARE first bigint; last bigint; added bigint; before bigint;
       BEGIN
         SELECT min(pos), max(pos), count(*) INTO first, last, added FROM new_rows;
         SELECT coalesce(max(pos), 0) INTO before FROM ledger WHERE pos < first;
         IF first <> before + 1 OR last - first + 1 <> added THEN
           RAISE EXCEPTION 'the ledger is dense: this position is not the next';
         END IF;
         RETURN NULL;
       END $$""",
    """CREATE TRIGGER ledger_dense AFTER INSERT ON ledger REFERENCING NEW TABLE AS new_rows
       FOR EACH STATEMENT EXECUTE FUNCTION ledger_follow()""",
)


def upgrade() -> None:
    """Create the tables, the one row of the lease, and the triggers."""
    _create_ledger()
    _create_rest()
    op.execute("INSERT INTO lease (id, epoch) VALUES (1, 0)")
    for statement in SQLITE_TRIGGERS if op.get_bind().dialect.name == "sqlite" else POSTGRES_TRIGGERS:
        op.execute(statement)


def downgrade() -> None:
    """A ledger is never migrated backwards."""
    raise NotImplementedError


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("pos", BIG, primary_key=True, autoincrement=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("bus_stream", sa.Text, nullable=False),
        sa.Column("bus_epoch", BIG, nullable=False),
        sa.Column("bus_seq", BIG, nullable=False),
        sa.Column("event_id", KEY, nullable=False, unique=True),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("occurred_us", BIG, nullable=False),
        sa.Column("ledger_us", BIG, nullable=False),
        sa.Column("trace_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("raw", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
    )


def _create_rest() -> None:
    op.create_table(
        "outbox",
        sa.Column("pos", BIG, primary_key=True, autoincrement=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("traceparent", sa.Text, nullable=False),
    )
    op.create_table(
        "cursors",
        sa.Column("stream", KEY, primary_key=True),
        sa.Column("bus_epoch", BIG, nullable=False),
        sa.Column("seq", BIG, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("created", sa.Text, nullable=False),
    )
    op.create_table(
        "lease",
        sa.Column(
            "id", sa.Integer, sa.CheckConstraint("id = 1", name="lease_once"), primary_key=True, autoincrement=False
        ),
        sa.Column("epoch", BIG, nullable=False),
    )
