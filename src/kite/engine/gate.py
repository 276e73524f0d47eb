"""The gate of a held engine from the outside: ask whether it has come so far, and let it on."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from socket import socket

from kite.engine.errors import EngineLate, EngineUnreachable
from kite.held.gate import GO, HELD, address, peer

ANSWER_S = 3.0  # for an engine that waits to say so: it has nothing else to do, but may have to wait for a core

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def gate_name(port: int) -> str:
    """Return the name of the gate of an engine that is to listen on a port."""
    return f"kite-gate-{port}"


async def waits(name: str) -> int | None:
    """Return the process that waits at a gate, None when it has not come so far. Raises EngineLate."""
    try:
        async with visited(name) as (_, writer):
            return process_of(writer)
    except EngineUnreachable:
        return None


async def let_on(name: str, ready: Callable[[int], None]) -> None:
    """Let an engine on, once `ready` was called with the process that waits.

    Raises EngineUnreachable when nobody waits, EngineLate when it does not answer, and what `ready` raises.
    """
    async with visited(name) as (reader, writer):
        ready(process_of(writer))
        writer.write(GO)
        await reader.read()  # it closes when it has heard


@asynccontextmanager
async def visited(name: str) -> AsyncGenerator[Streams]:
    """Be connected with an engine that says that it waits. Raises EngineUnreachable or EngineLate."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(address(name))
            try:
                if await reader.readline() != HELD:
                    raise EngineUnreachable(f"nobody waits at {name}")
                yield reader, writer
            finally:
                writer.close()
    except TimeoutError:
        raise EngineLate("the gate", ANSWER_S) from None
    except OSError as error:
        raise EngineUnreachable(f"nobody waits at {name}: {error.strerror or error}") from error


def process_of(writer: asyncio.StreamWriter) -> int:
    """Return the process at the other end."""
    connection: socket = writer.get_extra_info("socket")
    return peer(connection)[0]
