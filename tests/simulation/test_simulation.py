"""Whole fleets in simulated time, judged by their histories.

Each seed is one run: 80 simulated seconds of trouble, then 50 in which everything may come to rest. A thousand agents
send requests where the routes lead; the bus delays, doubles and reorders facts and orders, and loses 12 % of some
nodes' windows; nodes, engines, workers and the arbitrator end and come back. A failure prints its seed:

    SIM_SEED=7 .venv/bin/python -m pytest tests/simulation        that one seed
    SIM_SEEDS=500 .venv/bin/python -m pytest tests/simulation     that many, instead of SEEDS
    .venv/bin/python -m kite_arbitrator.simulation 7              what happens in it, without a verdict
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from msgspec import structs

from kite.ledger import Ledger, Reader
from kite.testing.simulation import Plan, plan_of
from kite.testing.simulation.judge import judge
from kite.testing.simulation.witness import heard, once
from kite_arbitrator import core
from kite_arbitrator.records import Row
from kite_arbitrator.rules.draft import Draft, Rule, Rules
from kite_arbitrator.rules.v1 import expiry, freshness, injection, pressure
from kite_arbitrator.simulation.run import History, folded, redecided, simulate
from kite_arbitrator.simulation.text import drafts
from kite_arbitrator.state import State
from kite_incident.replay import verify
from kite_schemas.arbitration import (
    Channel,
    ChannelSelected,
    Held,
    OrderExpired,
    PressureChanged,
    Transport,
    TransportChanged,
)
from kite_schemas.upcycle import (
    BlendPromoted,
    DeleteOrdered,
    InjectionAdmitted,
    InjectionClosed,
    RetireOrdered,
    Return,
    RollbackClosed,
)
from kite_schemas.why import Decision, Reason
from kite_schemas.yoco import DrainOrdered, InstanceReady, NodeRegistered, OrderRefused, PrewarmOrdered, StartOrdered

SEEDS = 16
"""Runs of every build: about half a minute together."""

SHORT_S, BROKEN_S = 20, 40
HASH_SEEDS = ("1", "2")


def seeds() -> list[int]:
    """Return the seeds to run, by the environment."""
    if "SIM_SEED" in os.environ:
        return [int(os.environ["SIM_SEED"])]
    return list(range(1, int(os.environ.get("SIM_SEEDS", SEEDS)) + 1))


def complaints(history: History) -> list[str]:
    """Return everything that must not be so in a history, replay and rebuilt states included."""
    rows, arbitrator = history.rows, history.arbitrator
    found = [*judge(rows), *heard(rows, history.world, arbitrator.downs), *once(rows, history.world)]
    found += [f"torn: {version} was deleted" for version in history.world.store.torn]
    found += [f"replay: {row.pos} {row.type} came out as {again}" for row, again in redecided(rows) if again != row]
    found += [f"rebuild: the state at {pos} was another one" for pos in arbitrator.diverged]
    return found if folded(rows) == arbitrator.state else [*found, "rebuild: the state at the end was another one"]


def told(history: History, found: list[str]) -> str:
    """Return what a failure says."""
    again = f"SIM_SEED={history.seed} .venv/bin/python -m pytest tests/simulation"
    return "\n".join([f"seed {history.seed}, again with: {again}", *found[:20]])


@cache
def counted(seed: int) -> tuple[list[str], Counter[str]]:
    """Run a seed; return the complaints and what happened. The history itself would fill the memory."""
    history = simulate(plan_of(seed), seed)
    found = complaints(history)
    happened = history.counts() + Counter(_marks(history))
    return [told(history, found)] if found else [], happened


def _marks(history: History) -> list[str]:
    """Return more of what happened than types tell."""
    marks: list[str] = ["agents.answered"] * sum(agent.answered for agent in history.world.agents[:10])
    marks += ["orders.resumed" for begun in history.world.begun() if begun.attempt > 1]
    marks += [mark for row in history.rows for mark in _version_marks(row)]
    for row in history.rows:
        match row.data:
            case PressureChanged(on=on):
                marks.append(f"pressure.{'on' if on else 'off'}")
            case ChannelSelected(channel=Channel.YOCO):
                marks.append("channel.yoco")
            case TransportChanged(transport=Transport.RELIABLE):
                marks.append("transport.reliable")
            case Held(why=why):
                marks.append(f"held.{why.reason}")
            case NodeRegistered(instances=found):
                marks += [f"found.{one.state}" for one in found]
            case DrainOrdered(request=str()) | StartOrdered(request=str()):
                marks.append(f"{row.type.split('.')[2]}.asked")
            case OrderRefused(code=code):
                marks.append(f"refused.{code}")
            case _:
                pass
    return marks


def _version_marks(row: Row) -> list[str]:
    match row.data:
        case InjectionClosed(outcome=outcome, why=why):
            return [f"closed.{outcome}", f"closed.{why.reason}"]
        case RollbackClosed(outcome=outcome):
            return [f"returned.{outcome}"]
        case RetireOrdered(why=why) | DeleteOrdered(why=why):
            return [f"{row.type.split('.')[2]}.{why.reason}"]
        case _:
            return []


@pytest.mark.parametrize("seed", seeds())
def test_any_history_keeps_the_rules(seed: int):
    found, _ = counted(seed)
    assert not found, "\n".join(found)


@pytest.mark.skipif("SIM_SEED" in os.environ, reason="one seed does not do everything")
def test_the_runs_do_what_they_are_for():
    """A simulation in which nothing goes wrong would keep every rule."""
    happened = sum((counted(seed)[1] for seed in seeds()), Counter[str]())
    expected = {
        *("pressure.on", "pressure.off", "channel.yoco", "transport.reliable", "orders.resumed", "agents.answered"),
        *(f"closed.{outcome}" for outcome in ("promoted", "refused", "rejected", "rolled_back", "expired", "dry_run")),
        *(f"held.{reason}" for reason in (Reason.STALE, Reason.MEMORY, Reason.NO_STANDBY, Reason.INPUT_ABSENT)),
        *("telemetry.node_lost", "telemetry.node_found", "arbitration.discarded", "arbitration.order_expired"),
        *("upcycle.frozen", "upcycle.unfrozen", "upcycle.injection_deferred", "yoco.order_failed"),
        *("yoco.prewarm_blocked", "yoco.prewarm_released", "yoco.wake_ordered", "yoco.sleep_ordered"),
        *("yoco.prewarm_ordered", "yoco.stop_ordered", "drain_ordered.asked", "start_ordered.asked"),
        *("found.ready", "found.asleep", "found.prewarmed", "refused.deadline_unreachable"),
        *(f"held.{reason}" for reason in (Reason.DEADLINE_UNREACHABLE, Reason.LAST_INSTANCE, Reason.PARKED)),
        f"held.{Reason.PREWARM_RECENT}",
        *("policy.change_rejected", "proof.effect_missing", "upcycle.drift_observed", "upcycle.rebuild_ordered"),
        *(f"returned.{outcome}" for outcome in Return),
        *(f"retire_ordered.{why}" for why in (Reason.RETENTION_OVER, Reason.SUPERSEDED, Reason.DRIFT)),
        *(f"delete_ordered.{why}" for why in (Reason.UNWANTED, Reason.RETENTION_CROSSED)),
        f"closed.{Reason.PARTIAL}",
    }
    assert not expected - happened.keys()


def test_twelve_percent_loss_moves_a_node_to_reliable_transport_and_its_windows_then_arrive():
    plan = Plan(lossy=1, troubles=0, surges=0, failing_ppm=0, seconds=60, settle_s=1, agents=50)
    history = simulate(plan, 12)
    changed = [row for row in history.rows if isinstance(row.data, TransportChanged)]
    assert [(row.data.node, row.data.why.reason) for row in changed if isinstance(row.data, TransportChanged)] == [
        ("n1", Reason.LOSS)
    ], told(history, [])
    lossy = history.world.nodes["n1"].outlet
    assert lossy.lost > 50  # all the while, every eighth try is lost
    assert len(lossy.reliable) > 300
    assert not list(heard(history.rows, history.world, []))


def test_a_history_does_not_depend_on_the_order_of_hashes():
    prints = {_print(seed) for seed in HASH_SEEDS}
    assert len(prints) == 1


def _print(hash_seed: str) -> str:
    command = [sys.executable, "-m", "kite_arbitrator.simulation", "3", str(SHORT_S)]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_a_history_is_a_ledger_that_verifies(tmp_path_factory: pytest.TempPathFactory):
    """What goes through bytes and back decides the same again."""
    history = simulate(replace(plan_of(5, SHORT_S), agents=100), 5)
    url = f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'ledger.db'}"
    with Ledger.open(url) as ledger:
        ledger.append(list(drafts(history)))
    with Reader.open(url) as reader:
        verdict = verify(reader)
    assert verdict.identical, told(history, [str(verdict.divergence)])
    assert verdict.decisions > 50


# --- the judge itself: it notices when the core lacks something


def lacking(*rules: Rule) -> Rules:
    """Return the rules without some."""
    shipped = core.RULES[1]
    return structs.replace(
        shipped,
        on_window=tuple(rule for rule in shipped.on_window if rule not in rules),
        on_all_else=tuple(rule for rule in shipped.on_all_else if rule not in rules),
    )


def ungated(_state: State, _row: Row, made: Draft) -> Draft:
    """Let every draft through."""
    return made


BROKEN: dict[str, Rules] = {
    "steady": structs.replace(core.RULES[1], admit=ungated),
    "timely": lacking(expiry.expire),
    "missed": lacking(freshness.lose),
    "carried": lacking(freshness.carry),
    "episodes": lacking(pressure.relax, pressure.release),
    "answered": lacking(injection.advance),
}
"""Cores that lack a rule, by the complaint that this leads to."""


@pytest.mark.parametrize("complaint", BROKEN)
def test_a_core_that_lacks_a_rule_is_noticed(complaint: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(core.RULES, 1, BROKEN[complaint])
    histories = (simulate(plan_of(seed, BROKEN_S), seed) for seed in (6, 3, 2, *range(7, SEEDS)))
    assert any(found.startswith(complaint) for history in histories for found in judge(history.rows))


def test_a_decision_that_comes_out_otherwise_is_noticed():
    history = simulate(replace(plan_of(9, SHORT_S), agents=100), 9)
    decided = next(row for row in history.rows if isinstance(row.data, Decision) and row.pos > 50)
    rows = [row for row in history.rows if row is not decided]
    assert any(again != row for row, again in redecided(rows))


def test_what_is_not_one_after_another_is_noticed():
    """Without the outcomes of orders, all of them are open at once."""
    history = simulate(replace(plan_of(9, SHORT_S), agents=100), 9)
    rows = [row for row in history.rows if not isinstance(row.data, InstanceReady | OrderExpired)]
    assert any(complaint.startswith("serial") for complaint in judge(rows))


def test_prewarms_too_close_to_each_other_are_noticed():
    plan = Plan(prewarmed=1, troubles=0, surges=0, failing_ppm=0, seconds=SHORT_S, agents=50)
    history = simulate(plan, 9)
    first = next(row for row in history.rows if isinstance(row.data, PrewarmOrdered))
    again = structs.replace(history.rows[-1], ledger_us=first.ledger_us + 1, data=first.data)
    assert any(complaint.startswith("paced") for complaint in judge([*history.rows, again]))


def test_a_deletion_of_what_is_in_use_is_noticed():
    history = simulate(replace(plan_of(9, SHORT_S), agents=100), 9)
    rows = history.rows
    order = next(row for row in rows if isinstance(row.data, BlendPromoted))
    admitted = next(number for number, row in enumerate(rows) if isinstance(row.data, InjectionAdmitted))
    assert isinstance(order.data, BlendPromoted)
    version = order.data.resident.version
    wrong = DeleteOrdered(
        why=order.data.why,
        node="n1",
        target=f"delete/{version}",
        expires_us=1,
        ttl_us=1,
        blend=order.data.blend,
        version=version,
        digest="0" * 64,
    )
    rules = {complaint.partition(":")[0] for complaint in judge([*rows, structs.replace(order, data=wrong)])}
    assert "kept" in rules
    begun = [*rows[: admitted + 1], structs.replace(rows[admitted], data=wrong)]
    assert any(complaint.startswith("apart") for complaint in judge(begun))


def test_what_comes_twice_is_noticed():
    history = simulate(replace(plan_of(9, SHORT_S), agents=100), 9)
    assert any(complaint.startswith("in_order") for complaint in judge([*history.rows, history.rows[-1]]))
