"""The tables of a ledger. Alembic creates them (`migrations/`), a test holds the two against each other."""

from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, LargeBinary, MetaData, Table, Text

REVISIONS = ("0001", "0002", "0003")
"""Every schema revision this code can read, oldest first; the last is the one it writes."""

# SQLite makes a column the row's own key only when it is an INTEGER; PostgreSQL needs 64 bits.
_BIG = BigInteger().with_variant(Integer, "sqlite")

# By code point, as SQLite does anyway: the order of a locale differs by machine, and its update breaks an index.
_KEY = Text().with_variant(Text(collation="C"), "postgresql")

metadata = MetaData()

ledger = Table(
    "ledger",
    metadata,
    Column("pos", _BIG, primary_key=True, autoincrement=False),
    Column("epoch", _BIG, nullable=False),
    Column("bus_stream", Text, nullable=False),
    Column("bus_epoch", _BIG, nullable=False),
    Column("bus_seq", _BIG, nullable=False),
    Column("event_id", _KEY, nullable=False, unique=True),
    Column("type", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("occurred_us", _BIG, nullable=False),
    Column("ledger_us", _BIG, nullable=False),
    Column("trace_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("signature", LargeBinary, nullable=False),
    Column("raw", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
"""One row an event, in the order applied; triggers refuse UPDATE and DELETE. No index beyond these two keys: each
costs a fifth of the append rate or more, and a reader that looks for a type scans."""

outbox = Table(
    "outbox",
    metadata,
    Column("pos", _BIG, primary_key=True, autoincrement=False),
    Column("subject", Text, nullable=False),
    Column("traceparent", Text, nullable=False),
)
"""What is still to be published; the bytes are the ledger row's own."""

cursors = Table(
    "cursors",
    metadata,
    Column("stream", _KEY, primary_key=True),
    Column("bus_epoch", _BIG, nullable=False),
    Column("seq", _BIG, nullable=False),
    Column("msg_id", Text, nullable=False),
    Column("created", Text, nullable=False),
    Column("published_us", _BIG, nullable=False, server_default="0"),
)
"""The last message consumed of each stream."""

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="lease_once"), primary_key=True, autoincrement=False),
    Column("epoch", _BIG, nullable=False),
    Column("holder", Text, nullable=False, server_default=""),
    Column("counter", _BIG, nullable=False, server_default="0"),
)
"""One row: how often a writer has taken the ledger, who it is (empty: nobody), and what it moves as long as it lives.
`counter` never falls, so (epoch, counter) tells any two states of the lease apart."""

routes = Table(
    "routes",
    metadata,
    Column("name", _KEY, primary_key=True),
    Column("version", Text, nullable=False),
    Column("instance", _KEY, primary_key=True),
    Column("endpoint", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("pos", _BIG, nullable=False),
)
"""Where requests go as of the last append: what follows from the rows, kept for those who cannot fold them."""
