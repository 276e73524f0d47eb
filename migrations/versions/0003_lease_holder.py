"""Who holds the lease, a counter that its holder moves, and cursors that name the message and when it came."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add the columns, with nobody as the holder. A message's id was its event's id until now, so those stay."""
    op.add_column("lease", sa.Column("holder", sa.Text, nullable=False, server_default=""))
    op.add_column("lease", sa.Column("counter", BIG, nullable=False, server_default="0"))
    op.execute("ALTER TABLE cursors RENAME COLUMN event_id TO msg_id")
    op.add_column("cursors", sa.Column("published_us", BIG, nullable=False, server_default="0"))


def downgrade() -> None:
    """A ledger is never migrated backwards."""
    raise NotImplementedError
