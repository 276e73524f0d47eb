"""A synthetic fleet and the arbitrator's core: it comes up, serves, is asked and answers, all from one seed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID, uuid5

import pytest
from pydantic import JsonValue

from kite.clock import US_PER_S
from kite.testing.load import PROFILES, SLOT_US, Calm, Correlated, Input, Profile, Size, World, run
from kite_arbitrator import core, shipped
from kite_arbitrator.records import Row
from kite_arbitrator.state import State
from kite_schemas.arbitration import PressureChanged
from kite_schemas.guard import ComparisonRequested
from kite_schemas.ledger import Created, Tick
from kite_schemas.model import Data
from kite_schemas.policy import ChangeRequested
from kite_schemas.telemetry import Window
from kite_schemas.upcycle import BlendPromoted, Ending, InjectionClosed, InjectionRequested
from kite_schemas.why import Order
from kite_schemas.yoco import NodeRegistered, OrderRequested
from kite_schemas.yoco import State as Life

LEDGER = "00000000-0000-4000-8000-000000000001"
SMALL = Size(nodes=6, bases=2, tick_us=1_000_000)
UP_US = 15 * US_PER_S


@dataclass
class Told:
    """The core, everything it was told and everything it decided."""

    state: State = field(default_factory=core.initial)
    inputs: list[Input] = field(default_factory=list[Input])
    decisions: list[Row] = field(default_factory=list[Row])

    def tell(self, one: Input) -> Iterable[tuple[int, str, str, Data]]:
        pos = self.state.pos + 1
        row = Row(
            pos=pos,
            id=str(uuid5(UUID(LEDGER), f"row {pos}")),
            type=one.data.TYPE,
            subject=one.subject,
            ledger_us=max(one.at_us, self.state.now_us + 1),
            data=one.data,
        )
        self.inputs.append(one)
        self.state, decisions = core.step(self.state, row)
        self.decisions += decisions
        return [(d.ledger_us, d.id, d.subject, d.data) for d in decisions if d.data is not None]

    def made(self, kind: type[Data]) -> list[Data]:
        return [row.data for row in self.decisions if isinstance(row.data, kind)]

    def came(self, kind: type[Data]) -> list[Input]:
        return [one for one in self.inputs if isinstance(one.data, kind)]


def lived(
    size: Size, profile: Profile, seed: int, seconds: int, settings: Mapping[str, JsonValue] | None = None
) -> tuple[World, Told]:
    """Let a fleet live under the shipped policy, with some other settings."""
    world, told = World(size, profile, seed, start_us=US_PER_S, settings=settings), Told()
    told.tell(Input(1, "ledger/fleet", Created(ledger=LEDGER, format=core.FORMAT)))
    told.tell(Input(2, "policy/fleet", ChangeRequested(actor="test", policy=shipped.policy())))
    for _ in run(world, (1 + seconds) * US_PER_S, told.tell):
        pass
    return world, told


@pytest.fixture(scope="module")
def calm() -> tuple[World, Told]:
    return lived(SMALL, PROFILES["calm"], 1, 60)


def test_the_fleet_comes_up_as_the_policy_wants_it(calm: tuple[World, Told]):
    world, told = calm
    assert len(told.came(NodeRegistered)) == SMALL.nodes
    assert len(told.state.instances) == SMALL.nodes * (SMALL.ready + SMALL.standbys)
    for node in world.nodes.values():
        assert len(node.ready()) + len(node.asleep()) == SMALL.ready + SMALL.standbys
        assert {name: told.state.instances[name].state for name in node.ready()} == dict.fromkeys(
            node.ready(), Life.READY
        )


def test_every_node_sends_its_windows_ten_times_a_second_in_order(calm: tuple[World, Told]):
    world, told = calm
    by_node = {name: [one for one in told.came(Window) if one.subject == f"node/{name}"] for name in world.nodes}
    for found in by_node.values():
        windows = [one.data for one in found if isinstance(one.data, Window)]
        assert [window.seq for window in windows] == list(range(1, len(windows) + 1))
        assert len(windows) in {599, 600}
        assert all(w.sampled_us < w.emitted_us < one.at_us for w, one in zip(windows, found, strict=True))
        assert len(windows[-1].instances) == SMALL.ready + SMALL.standbys
        assert all(0 <= (device.fragmentation_ppm or 0) <= 900_000 for device in windows[-1].devices)
    assert not [feed.node for feed in told.state.feeds.values() if feed.span.loss_ppm or feed.lost]


def test_time_never_goes_back(calm: tuple[World, Told]):
    moments = [one.at_us for one in calm[1].inputs]
    assert moments == sorted(moments)


def test_orders_are_answered_and_injections_promoted(calm: tuple[World, Told]):
    _, told = calm
    closed = [data for data in told.made(InjectionClosed) if isinstance(data, InjectionClosed)]
    assert len(told.came(InjectionRequested)) > 10
    assert len(closed) >= len(told.came(InjectionRequested)) - 2
    assert sum(data.outcome is Ending.PROMOTED for data in closed) > len(closed) // 2
    assert told.made(BlendPromoted)
    late = [order for order in told.state.orders.values() if order.expires_us < told.state.now_us]
    assert not late


def test_people_ask(calm: tuple[World, Told]):
    _, told = calm
    assert told.came(ComparisonRequested)
    assert told.came(OrderRequested)


def test_the_same_seed_gives_the_same_ledger_and_another_seed_another():
    size = Size(nodes=3, bases=1, tick_us=1_000_000)
    first, again, other = (lived(size, Correlated(), seed, 20)[1] for seed in (4, 4, 5))
    assert again.inputs == first.inputs
    assert again.decisions == first.decisions
    assert other.inputs != first.inputs


def test_a_hundred_nodes_have_one_decision_in_a_hundred_rows_at_least():
    _, told = lived(Size(tick_us=SLOT_US), PROFILES["calm"], 1, 25)
    after = [row for row in told.decisions if row.ledger_us > UP_US]
    inputs = Counter(one.data.TYPE for one in told.inputs if one.at_us > UP_US)
    assert inputs[Window.TYPE] == pytest.approx(11 * 1_000, rel=0.01)
    assert inputs[Tick.TYPE] == pytest.approx(110, abs=2)
    share = len(after) / (len(after) + inputs.total())
    assert share >= 0.01, f"{len(after)} decisions among {inputs.total()} inputs"


def test_a_busier_fleet_has_more_in_flight():
    def in_flight(rate_milli: int) -> int:
        _, told = lived(Size(nodes=2, bases=1, tick_us=1_000_000), Calm(rate_milli=rate_milli), 2, 15)
        loads = [load for feed in told.state.feeds.values() for load in feed.loads.values()]
        return sum(load.in_flight or 0 for load in loads)

    assert in_flight(5_000) < in_flight(100_000) < in_flight(400_000)


def test_correlated_bursts_put_pools_under_pressure_for_a_while():
    """Queues grow, versions that were just loaded miss the cache: what the rules about load wait for, and its end."""
    settings: dict[str, JsonValue] = {"arbitration.concurrency_max": 8}
    _, told = lived(Size(nodes=4, bases=2, tick_us=SLOT_US), Correlated(), 1, 70, settings)
    changes = [data for data in told.made(PressureChanged) if isinstance(data, PressureChanged)]
    assert {data.on for data in changes} == {True, False}


def test_lost_windows_are_missing_and_nothing_else_is():
    size = Size(nodes=2, bases=1, lost_ppm=200_000, tick_us=1_000_000)
    world, told = lived(size, PROFILES["calm"], 3, 30)
    made = sum(node.windows for node in world.nodes.values())
    assert len(told.came(Window)) / made == pytest.approx(0.8, abs=0.05)


def test_failing_orders_fail_and_the_fleet_comes_up_all_the_same():
    size = Size(nodes=3, bases=1, failing_ppm=200_000, tick_us=1_000_000)
    world, told = lived(size, PROFILES["calm"], 3, 120)
    assert [row for row in told.decisions if isinstance(row.data, Order)]
    assert all(len(node.ready()) >= size.ready for node in world.nodes.values())
    endings = {data.outcome for data in told.made(InjectionClosed) if isinstance(data, InjectionClosed)}
    assert endings > {Ending.ROLLED_BACK}
