"""The whole path under faults: bus, arbitrator, ledger, outbox, worker and the bus again, as real processes.

Each seed is one run of a second or two: a fleet comes up, is asked for instances, and meanwhile one to four faults
happen at labelled points: processes, nats-server and PostgreSQL are killed, connections cut, the bus's store deleted or
put back from an older copy. Then everything may come to rest, and the history is judged. A seed fixes what happens at
which passage of which point; how the processes interleave it cannot. A failure prints its seed:

    .venv/bin/python -m pytest tests/simulation/test_faults.py --fault-seeds 7-7      that one seed
    .venv/bin/python -m pytest tests/simulation/test_faults.py --fault-seeds 1000     that many (or: make faults)
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kite.clock import US_PER_S, mono_us
from kite.ledger import Reader
from kite.testing.crash import Point
from kite.testing.faults import Fault, History, Plan, Role, Step, Store, Stored, Victim, judge, plan_of
from kite.testing.faults.history import Entry
from kite.testing.faults.yoco import BEGAN, MADE
from kite.testing.postgres import Postgres
from kite_arbitrator.testing.trial import trial
from kite_incident.replay import verify
from kite_schemas.arbitration import OrderExpired
from kite_schemas.why import Decision, Outcome
from kite_schemas.yoco import OrderRequested

CHUNK = 25
"""So many seeds are one test."""

SIDE_BY_SIDE = 4
"""So many runs at once: most of a run is waiting."""

ENOUGH = 100
"""With so many seeds every kind of fault is among them."""

CALM = Plan(seed=0, shared=False, faults=(), standbys=2, requests=4, rebooted=None)

happened: Counter[str] = Counter()
ran: set[int] = set()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        wanted = _seeds(str(metafunc.config.getoption("--fault-seeds")))
        chunks = [wanted[at : at + CHUNK] for at in range(0, len(wanted), CHUNK)]
        metafunc.parametrize("seeds", chunks, ids=[f"{chunk[0]}-{chunk[-1]}" for chunk in chunks])


def _seeds(text: str) -> range:
    """Return the seeds that an option names, as in 100 or 7-9."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else range(1, int(text) + 1)


def replayed(reader: Reader) -> str:
    verdict = verify(reader)
    return "" if verdict.identical else str(verdict.divergence)


@pytest.mark.timeout(600)
async def test_whatever_is_hurt_and_when_nothing_is_lost_and_nothing_happens_twice(
    seeds: Sequence[int], tmp_path: Path, postgres: Postgres
) -> None:
    free, database = asyncio.Semaphore(SIDE_BY_SIDE), asyncio.Lock()

    async def judged(seed: int) -> list[str]:
        plan = plan_of(seed)
        async with free if not plan.shared else database:  # a server that is restarted is one run's alone
            folder = tmp_path / str(seed)
            folder.mkdir()
            began_us = mono_us()
            history = await trial(plan, folder, replayed, postgres)
        count(history)
        return told(plan, folder, mono_us() - began_us, judge(history))

    found = await asyncio.gather(*map(judged, seeds))
    ran.update(seeds)
    complaints = [line for lines in found for line in lines]
    assert not complaints, "\n".join(["", *complaints])


def told(plan: Plan, folder: Path, took_us: int, complaints: list[str]) -> list[str]:
    """Return what a failure says."""
    if not complaints:
        return []
    again = f".venv/bin/python -m pytest tests/simulation/test_faults.py --fault-seeds {plan.seed}-{plan.seed}"
    head = f"seed {plan.seed} ({plan}), {took_us / US_PER_S:.1f} s, logs in {folder}, again with: {again}"
    return [head, *(f"  {complaint}" for complaint in complaints[:20])]


def count(history: History) -> None:
    """Remember what happened."""
    for fault in history.spent:
        happened.update([*(f"{fault.point} {victim}" for victim in fault.victims), *fault.victims, fault.store])
    happened.update(["expired" for entry in history.entries if isinstance(entry.data, OrderExpired)])
    happened.update(["resumed" for deed in history.world if deed.what == BEGAN and deed.attempt > 1])
    happened.update(["orders" for deed in history.world if deed.what == MADE])
    happened.update(["gone with the bus"] * bool(history.acked.keys() - {entry.id for entry in history.entries}))


def test_every_kind_of_fault_was_among_them() -> None:
    """What no seed brings about is not shown by them."""
    if len(ran) < ENOUGH:
        pytest.skip(f"{len(ran)} seeds ran; with {ENOUGH} of them nothing is missing")
    kinds = [f"{point} {Victim.SELF}" for point in (*Point, *Step)]
    assert [
        kind for kind in (*kinds, *Victim, *Store, "expired", "resumed", "gone with the bus") if not happened[kind]
    ] == []
    assert happened["orders"] > 5 * len(ran)


def test_the_seed_alone_decides_what_is_done() -> None:
    assert [plan_of(seed) for seed in range(50)] == [plan_of(seed) for seed in range(50)]
    assert len({plan_of(seed).faults for seed in range(50)}) == 50


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A run in which nothing is hurt: what the judge is tried on."""
    return asyncio.run(trial(CALM, tmp_path_factory.mktemp("calm"), replayed))


def test_the_judge_has_nothing_to_say_when_nothing_is_wrong(calm: History) -> None:
    assert judge(calm) == []
    assert len([deed for deed in calm.world if deed.what == MADE]) >= 7, "three starts, two drains, two sleeps"


def place(history: History, kind: type[object], *, done: bool = True) -> int:
    """Return the index of the first entry of a kind."""
    return next(
        index
        for index, entry in enumerate(history.entries)
        if isinstance(entry.data, kind) and (not isinstance(entry.data, Outcome) or entry.data.done is done)
    )


def without(history: History, index: int) -> History:
    return replace(history, entries=[*history.entries[:index], *history.entries[index + 1 :]])


def altered(history: History, index: int, **columns: object) -> History:
    """Change columns of one row."""
    entry = history.entries[index]
    forged = replace(entry, row=replace(entry.row, **columns))  # pyright: ignore[reportArgumentType] # names of columns
    return replace(history, entries=[*history.entries[:index], forged, *history.entries[index + 1 :]])


def again(history: History, index: int) -> History:
    """Append one entry once more, under another id."""
    entry = history.entries[index]
    row = replace(entry.row, pos=len(history.entries) + 1, event_id="0" * 36)
    return replace(history, entries=[*history.entries, Entry(row=row, data=entry.data)])


def on_bus(history: History, **streams: object) -> History:
    return replace(history, bus=replace(history.bus, **streams))  # pyright: ignore[reportArgumentType] # names of fields


def lost(history: History, *, read: int) -> History:
    """Pretend that the bus was replaced after `read` facts, and that a request among them never came in."""
    left, facts = without(history, place(history, OrderRequested)), history.bus.facts
    return replace(left, bus=Stored(facts[read:], history.bus.decisions), lost=Stored(facts[:read]))


DELETED = Fault(Role.WORKER, Point.AFTER_ACK, 1, (Victim.BUS,), Store.DELETED)

DAMAGE: dict[str, tuple[str, Callable[[History], History]]] = {
    "a hole": ("dense", lambda h: without(h, 7)),
    "a cut head": ("dense", lambda h: without(h, 0)),
    "time that stands still": ("dense", lambda h: altered(h, 7, ledger_us=h.entries[6].ledger_us)),
    "an epoch that falls": ("dense", lambda h: altered(h, 7, epoch=0)),
    "a flipped byte": ("chained", lambda h: altered(h, 7, raw=h.entries[7].row.raw[:-2] + b"!}")),
    "a doubled id": ("unique", lambda h: altered(h, 7, event_id=h.entries[6].id)),
    "a replay that differs": ("replayed", lambda h: replace(h, replay="at 7")),
    "an acknowledgement of nothing": ("kept", lambda h: replace(h, acked={**h.acked, "0" * 36: b"{}"})),
    "other bytes than acknowledged": ("kept", lambda h: replace(h, acked=dict.fromkeys(h.acked, b"{}"))),
    "a lost request": ("consumed", lambda h: without(h, place(h, OrderRequested))),
    "a lost outcome": ("consumed", lambda h: without(h, place(h, Outcome))),
    "a request of the bus before that was passed over": ("consumed", lambda h: lost(h, read=len(h.bus.facts))),
    "a lost decision": ("delivered", lambda h: on_bus(h, decisions=h.bus.decisions[1:])),
    "a decision that was never made": ("committed", lambda h: without(h, place(h, Decision))),
    "a deleted bus that nobody noticed": ("noticed", lambda h: replace(h, lost=Stored(), spent=[DELETED])),
    "a doubled effect": ("carried_out", lambda h: replace(h, world=[*h.world, *_made(h)])),
    "an effect that nobody ordered": ("carried_out", lambda h: replace(h, world=[*h.world, _stray(h)])),
    "a missing effect": ("carried_out", lambda h: replace(h, world=[d for d in h.world if d not in _made(h)])),
    "an attempt that was begun twice": ("carried_out", lambda h: replace(h, world=[*h.world, h.world[0]])),
    "a missing outcome": ("ended", lambda h: without(h, place(h, Outcome))),
    "a doubled outcome": ("ended", lambda h: again(h, place(h, Outcome))),
    "a process that ended by itself": ("quiet", lambda h: replace(h, complaints=["it ended with 1"])),
}


def _made(history: History) -> list[object]:
    return [next(deed for deed in history.world if deed.what == MADE)]


def _stray(history: History) -> object:
    return replace(history.world[0], what=MADE, order="0" * 36)


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_judge_notices(calm: History, damage: str) -> None:
    rule, do = DAMAGE[damage]
    assert any(complaint.startswith(f"{rule}: ") for complaint in judge(do(calm)))


def test_what_only_the_bus_before_held_is_excused(calm: History) -> None:
    """It was acknowledged, nobody had read it, and its store is gone; that this bus is another one is a row."""
    index = place(calm, OrderRequested)
    seq = calm.entries[index].row.bus_seq
    gone = lost(calm, read=seq)
    assert not [line for line in judge(gone) if line.startswith(("kept", "consumed"))]


async def test_the_judge_notices_a_worker_that_forgets(tmp_path: Path) -> None:
    """Without its journal an order that was done is begun again: the rules fail where the mechanism does."""
    plan = replace(CALM, faults=(Fault(Role.WORKER, Point.AFTER_DONE, 3, (Victim.SELF,)),))
    found = judge(await trial(plan, tmp_path, replayed, forgetful=True))
    assert any(line.startswith("carried_out: attempt 1 ") for line in found)
