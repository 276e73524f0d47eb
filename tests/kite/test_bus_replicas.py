"""A replica that is behind answers a direct get like any other: what it does not have yet is not missing."""

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import cast

import pytest
from nats.aio.msg import Msg

from kite.bus import EVT, Bus
from kite.bus.link import API, Link
from kite.testing.bus import bus

SUBJECT = "kite.evt.v1.a.b.c.d"
MISSING = {"Status": "404", "Description": "Message Not Found"}
FOUND = {
    "Nats-Stream": EVT,
    "Nats-Subject": SUBJECT,
    "Nats-Sequence": "1",
    "Nats-Time-Stamp": "2026-01-01T00:00:00Z",
}


class Replica:
    """Answers direct gets in the place of the server, at first as one that has nothing yet."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.behind = 0
        self.asked = 0

    async def answer(self, msg: Msg) -> None:
        """Answer one request."""
        self.asked += 1
        await self._link.send(msg.reply, b"x", headers=dict(MISSING if self.asked <= self.behind else FOUND))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with bus(tmp_path) as client:
        yield client


@pytest.fixture
async def replica(client: Bus) -> AsyncGenerator[Replica]:
    """A replica of a stream of one message, whose server leaves direct gets to it."""
    link = Link(client.url)
    await link.open("replica")
    info = await link.api(f"STREAM.INFO.{EVT}", {})
    config = dict(cast("Mapping[str, object]", info["config"]))
    await link.api(f"STREAM.UPDATE.{EVT}", {**config, "allow_direct": False})
    await client.publish(SUBJECT, b"x", "id-1")
    replica = Replica(link)
    await link.listen(f"{API}.DIRECT.GET.{EVT}", replica.answer)
    await link.nc.flush()
    yield replica
    await link.close()


async def test_what_the_leader_has_is_waited_for(client: Bus, replica: Replica):
    replica.behind = 3
    found = await client.message(EVT, 1)
    assert found is not None
    assert (found.payload, replica.asked) == (b"x", 4)


async def test_what_the_leader_does_not_have_is_missing_at_once(client: Bus, replica: Replica):
    replica.behind = 1
    assert await client.message(EVT, 2) is None
    assert replica.asked == 1
