"""Publishes a file of events as fast as a ledger keeps up: `python benchmarks/publisher.py FILE BUS_URL LEDGER_URL`.

A process of its own, as producers are. It is at most AHEAD_ROWS in front of the ledger, so that nearly all of it is
consumed while it publishes. The last line is one JSON object: how many messages the bus has acknowledged, and the
processor time of that.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time

import msgspec

from kite.bus import Bus, Outgoing, PubAck
from kite.ledger import Reader
from kite.testing.eventually import eventually

AHEAD_ROWS = 2_048
CHUNK = 512  # messages between two looks at the ledger
STUCK_S = 60.0  # the ledger does not grow: the run has failed

Item = tuple[str, str, bytes]
"""Subject on the bus, event id, exact bytes."""


def save(path: Path, items: Sequence[Item]) -> None:
    """Write events for `load`."""
    path.write_bytes(msgspec.msgpack.encode(items))


def load(path: Path) -> list[Item]:
    """Read what `save` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Item])


async def publish(bus: Bus, reader: Reader, items: Sequence[Item]) -> int:
    """Publish all, in order; return how many the bus acknowledged."""
    begin, taken = reader.head.pos, 0
    for first in range(0, len(items), CHUNK):
        await eventually(lambda: first + CHUNK - (reader.head.pos - begin) <= AHEAD_ROWS, STUCK_S)  # noqa: B023 # now
        chunk = [Outgoing(subject, raw, event_id) for subject, event_id, raw in items[first : first + CHUNK]]
        taken += sum(isinstance(outcome, PubAck) for outcome in await bus.publish_many(chunk))
    return taken


async def main(path: Path, bus_url: str, ledger_url: str) -> None:
    """Print one JSON object on the last line."""
    items = load(path)
    with Reader.open(ledger_url) as reader:
        async with await Bus.connect(bus_url, "publisher") as bus:
            used_s = process_time()
            published = await publish(bus, reader, items)
            print(json.dumps({"published": published, "cpu_s": process_time() - used_s}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
