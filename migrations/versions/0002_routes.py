"""Routes: which instances answer a served name, replaced as a whole when a decision changes them."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")
KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the table, empty: the arbitrator fills it when it begins to lead."""
    op.create_table(
        "routes",
        sa.Column("name", KEY, primary_key=True),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("instance", KEY, primary_key=True),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("channel", sa.Text, nullable=False),
        sa.Column("pos", BIG, nullable=False),
    )


def downgrade() -> None:
    """A ledger is never migrated backwards."""
    raise NotImplementedError
