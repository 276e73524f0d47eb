"""A real bus for tests: `async with nats(tmp_path) as server:`, `async with bus(tmp_path) as client:`."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from kite.bus import Bus, EmbeddedServer

FACTS_BYTES = 64 * 1024**2  # enough for a test


@asynccontextmanager
async def nats(tmp_path: Path) -> AsyncGenerator[EmbeddedServer]:
    """Run an embedded server in `tmp_path`/nats on a free port."""
    async with EmbeddedServer(tmp_path / "nats") as server:
        yield server


@asynccontextmanager
async def bus(tmp_path: Path, name: str = "test") -> AsyncGenerator[Bus]:
    """Run an embedded server and connect to it, with the streams provisioned."""
    async with nats(tmp_path) as server, await Bus.connect(server.url, name) as client:
        await client.provision(facts_bytes=FACTS_BYTES)
        yield client
