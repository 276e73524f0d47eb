"""Alembic's environment. `kite.ledger.schema` runs it with an open connection, inside the transaction of its choice."""

from alembic import context
from sqlalchemy import Connection

from kite.errors import UsageError
from kite.ledger.tables import metadata


def migrate() -> None:
    """Run the migrations on the connection that the caller handed over; there is no other way to run them."""
    connection = context.config.attributes.get("connection")
    if not isinstance(connection, Connection):
        raise UsageError("the ledger's migrations need a connection", hint="opening a ledger migrates it")
    context.configure(connection=connection, target_metadata=metadata, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


migrate()
