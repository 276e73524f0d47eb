"""A worker killed at every point of an order: one effect, one outcome, nothing left to do.

The killed worker is a process; the next one is a process too, with a short acknowledgement time, so that the bus
delivers again what was not acknowledged.
"""

from pathlib import Path

import pytest

from kite.bus import Bus
from kite.orders import Journal, State
from kite.testing.bus import FACTS_BYTES, nats
from kite.testing.crash import KILLED, Fuse, Point, arm, ended, process
from kite.testing.eventually import eventually
from kite.testing.orders import effects, facts, give, journal_of, left, run, stop_order
from kite_schemas.yoco import InstanceChanged

ACK_WAIT_S = 0.5
BEGUN_ONCE = frozenset({Point.BEFORE_BEGUN, Point.AFTER_DONE, Point.AFTER_PUBLISH, Point.AFTER_SENT, Point.AFTER_ACK})
"""Killed here, an order is carried out in one attempt: it was not begun, or its outcome was on disk."""


@pytest.mark.parametrize("point", Point)
async def test_wherever_it_is_killed_the_next_one_leaves_one_effect_and_one_outcome(
    tmp_path: Path, point: Point
) -> None:
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision(facts_bytes=FACTS_BYTES)
        order = await give(client, "yoco", stop_order("a"), "instance/a")
        worker = (run, server.url, tmp_path, "n1", ACK_WAIT_S)
        async with process(tmp_path / "log", Fuse(point), *worker) as killed:
            assert await ended(killed) == KILLED
        async with process(tmp_path / "log", None, *worker) as second:
            await give(client, "yoco", stop_order("b"), "instance/b")
            await eventually(lambda: len(effects(tmp_path)) == 2)

            async def nothing_left() -> bool:
                return await left(server.monitor_url, "yoco", "n1") == 0

            await eventually(nothing_left)
            assert second.is_alive(), (tmp_path / "log").read_text()
        said = await facts(client)
    assert sorted(line.split()[0] for line in effects(tmp_path)) == ["a", "b"]
    mine = [fact for fact in said if isinstance(fact.event.data, InstanceChanged) and fact.event.data.instance == "a"]
    with Journal.open(journal_of(tmp_path)) as journal:
        entry = journal.find(order.header.id)
        assert journal.unfinished() == []
    assert entry
    assert [fact.raw for fact in mine] == [entry.outcome]
    assert (entry.state, entry.attempt) == (State.DONE, 1 if point in BEGUN_ONCE else 2)


async def test_a_fuse_counts_and_the_orders_before_it_are_over(tmp_path: Path) -> None:
    async with nats(tmp_path) as server, await Bus.connect(server.url, "test") as client:
        await client.provision(facts_bytes=FACTS_BYTES)
        for instance in ("a", "a", "a"):
            await give(client, "yoco", stop_order(instance), f"instance/{instance}")
        worker = (run, server.url, tmp_path, "n1", ACK_WAIT_S)
        async with process(tmp_path / "log", Fuse(Point.AFTER_EFFECT, 2), *worker) as killed:
            assert await ended(killed) == KILLED
        assert (len(effects(tmp_path)), len(await facts(client))) == (2, 1)
        async with process(tmp_path / "log", None, *worker):

            async def nothing_left() -> bool:
                return await left(server.monitor_url, "yoco", "n1") == 0

            await eventually(nothing_left)
        assert (len(effects(tmp_path)), len(await facts(client))) == (3, 3)


def test_a_point_that_nothing_passes_is_an_error() -> None:
    with pytest.raises(ValueError, match="no port passes nowhere"):
        arm(Fuse("nowhere"))
