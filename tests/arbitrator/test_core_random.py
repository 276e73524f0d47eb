"""Any history at all: whatever the world does, orders stay single, every request is answered once, and replay agrees.

The world is random and unfair: it answers orders, fails them, forgets them, answers twice or too late, restarts nodes
and kills instances. A failing example prints the choices that led to it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kite_arbitrator import core
from kite_arbitrator.state import OpenOrder, Row, current
from kite_arbitrator.testing import BASE, NODE, Story
from kite_arbitrator.testing import adapter as adapter_of
from kite_schemas.guard import Compared, ComparisonFailed, ComparisonOrdered, ComparisonRequested
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.upcycle import (
    AdapterRefused,
    AdapterVerified,
    BlendFailed,
    BlendLoaded,
    BlendStored,
    EffectPrint,
    InjectionAdmitted,
    InjectionClosed,
    InjectionRequested,
    LoadFailed,
    LoadOrdered,
    Resident,
    RollbackFailed,
    RollbackOrdered,
    RolledBack,
    VerificationOrdered,
    Violation,
)
from kite_schemas.why import Order
from kite_schemas.yoco import (
    DrainOrdered,
    InstanceChanged,
    InstanceOrder,
    InstanceReady,
    OrderFailed,
    OrderRequested,
    SleepOrdered,
    StartOrdered,
    WakeOrdered,
)
from kite_schemas.yoco import Path as WakePath
from kite_schemas.yoco import State as Life

STEPS_MAX = 80
SETTLE_S, SETTLE_TICKS = 40, 40
"""Nobody answers for longer than the longest order may stay open, several times over: nothing stays under way."""

DIGEST = "ab" * 32
ADAPTERS = ("credit", "laundering", "mood")
BLENDS = ("risk", "tone")


Facts = list[Data]
Ending = dict[str, Any]
"""The fields that make a fact the last one of its order."""


def outcome(order: Order, order_id: str, *, well: bool) -> Facts:
    """Return the facts of one order that went well, or did not."""
    return OUTCOMES[type(order)](order, {"order": order_id, "done": True}, well)


def verified(order: VerificationOrdered, end: Ending, well: bool) -> Facts:
    about: Ending = {**end, "request": order.request, "adapter": order.adapter, "duration_us": 1}
    if well:
        return [AdapterVerified(**about, parameters=1, share_ppm=1, rank=4)]
    broken = Violation(code="dora", where="config", expected="off", found="on")
    return [AdapterRefused(**about, violations=(broken,), total=1)]


def blended(order: InjectionAdmitted, end: Ending, well: bool) -> Facts:
    about: Ending = {**end, "request": order.request, "duration_us": 1}
    if not well:
        return [BlendFailed(**about, code="rank_exceeded", message="")]
    mark = end["order"]
    resident = Resident(blend=order.blend, version=f"{order.blend}@{mark[-12:]}", path=f"store/{mark}")
    measures: Ending = {"method": "concatenate", "rank": 4, "residual_ppm": 0, "share_ppm": 1}
    return [BlendStored(**about, resident=resident, digest=DIGEST, **measures)]


def loaded(order: LoadOrdered, end: Ending, well: bool) -> Facts:
    about: Ending = {"instance": order.instance, "version": order.resident.version}
    fact = BlendLoaded(order=end["order"], **about, duration_us=1)
    if well:
        seen = EffectPrint(path="store/prints/x.json", digest=DIGEST, distance_micronats=9)
        return [fact, EffectProven(**end, **about, base_micronats=9, base_min_micronats=1, effect_print=seen)]
    if end["order"][-1] in "01234567":
        return [LoadFailed(**end, **about, stage="load", code="x", message="")]
    return [fact, EffectMissing(**end, **about, code=Missing.LIKE_BASE, message="")]


def undone(order: RollbackOrdered, end: Ending, well: bool) -> Facts:
    about: Ending = {**end, "request": order.request, "instance": order.instance, "version": order.version}
    return [RolledBack(**about) if well else RollbackFailed(**about, code="x", message="")]


def measured(order: ComparisonOrdered, end: Ending, well: bool) -> Facts:
    first, second = (side.instance for side in order.sides)
    about: Ending = {**end, "request": order.request, "first": first, "second": second}
    if not well:
        return [ComparisonFailed(**about, code="timeout", message="")]
    conflict: Ending = {"kl_micronats": 400_000, "p99_micronats": 400_000, "covered_ppm": 900_000, "positions": 9}
    return [Compared(**about, model=order.model, **conflict, duration_us=1)]


def lived(order: InstanceOrder, end: Ending, well: bool) -> Facts:
    name, (good, bad) = order.instance, LIVES[type(order)]
    if not well:
        return [OrderFailed(**end, instance=name, state=bad, stage="x", code="x", message="")]
    about: Ending = {"instance": name, "node": order.node, "from_state": Life.READY, "code": "x", "duration_us": 1}
    if isinstance(order, DrainOrdered | SleepOrdered):
        return [InstanceChanged(**end, **about, to_state=good)]
    versions = tuple(r.version for r in order.residents) if isinstance(order, WakeOrdered) else ()
    ready: Ending = {"pid": 1, "endpoint": "http://127.0.0.1:9000", "noise_micronats": 0, "t_wake_us": 1}
    return [
        InstanceChanged(order=end["order"], **about, to_state=good),
        InstanceReady(
            **end, instance=name, node=order.node, path=WakePath.HOT, versions=versions, t_first_token_us=2, **ready
        ),
    ]


LIVES: dict[type[InstanceOrder], tuple[Life, Life]] = {
    StartOrdered: (Life.STARTING, Life.FAILED),
    DrainOrdered: (Life.DRAINING, Life.DRAINING),
    SleepOrdered: (Life.ASLEEP, Life.DRAINING),
    WakeOrdered: (Life.WAKING, Life.ASLEEP),
}

OUTCOMES: dict[type[Order], Callable[[Any, Ending, bool], Facts]] = {
    VerificationOrdered: verified,
    InjectionAdmitted: blended,
    LoadOrdered: loaded,
    RollbackOrdered: undone,
    ComparisonOrdered: measured,
    **dict.fromkeys(LIVES, lived),
}


class World:
    """Does one random thing at a time to a fleet, and keeps every order that was ever given."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self.fleet = Story().begin(ready=2, standbys=2)
        self.orders: dict[str, Order] = {}
        self.orders |= {row.id: row.data for row in self.fleet.decided if isinstance(row.data, Order)}
        self.said: list[Data] = []
        guard = Change(key="guard.enabled", value=self._data.draw(st.booleans(), "guard"))
        self.tell(ChangeRequested(actor="t", changes=(guard,)))

    def tell(self, data: Data) -> None:
        self.fleet.tell(data)
        self._look()

    def wait(self, seconds: int) -> None:
        self.fleet.wait(seconds * 1_000_000)
        self._look()

    def step(self) -> None:
        """Let one thing happen."""
        deeds: list[Callable[[], None]] = [self._answer] * 12 + [self._inject] * 3 + [self._tick] * 2
        deeds += [self._ask, self._late, self._again, self._restart, self._die, self._compare]
        self._data.draw(st.sampled_from(deeds), "deed")()

    def _inject(self) -> None:
        adapter = adapter_of(self._data.draw(st.sampled_from(ADAPTERS), "adapter"))
        blend = self._data.draw(st.sampled_from(BLENDS), "blend")
        weight_ppm = self._data.draw(st.sampled_from([None, 200_000, 900_000]), "weight")
        self.tell(InjectionRequested(actor="t", blend=blend, adapter=adapter, base=BASE, weight_ppm=weight_ppm))

    def _ask(self) -> None:
        self.tell(OrderRequested(actor="t", base=BASE))

    def _compare(self) -> None:
        self.tell(ComparisonRequested(actor="t", first=f"{NODE}-{BASE}-0", second=f"{NODE}-{BASE}-1"))

    def _answer(self) -> None:
        """Carry out, or fail, an order that is open."""
        self._settle(sorted(self.fleet.state.orders))

    def _late(self) -> None:
        """The same for any order that was ever given: most have expired or been answered long ago."""
        self._settle(sorted(self.orders))

    def _settle(self, orders: list[str]) -> None:
        if not orders:
            return
        order_id = self._data.draw(st.sampled_from(orders), "order")
        well = self._data.draw(st.sampled_from([True, True, True, True, False]), "well")
        for fact in outcome(self.orders[order_id], order_id, well=well):
            self.said.append(fact)
            self.tell(fact)

    def _again(self) -> None:
        if self.said:
            self.tell(self._data.draw(st.sampled_from(self.said), "said"))

    def _tick(self) -> None:
        self.wait(self._data.draw(st.sampled_from([1, 5, 31, 130, 310]), "seconds"))

    def _restart(self) -> None:
        self.fleet.register(f"boot {self.fleet.state.pos}")
        self._look()

    def _die(self) -> None:
        number = self._data.draw(st.integers(0, 3), "instance")
        self.fleet.change(f"{NODE}-{BASE}-{number}", "ready", "failed", "engine_died")
        self._look()

    def _look(self) -> None:
        """Remember the orders, and check what must hold after every single row."""
        self.orders |= {row.id: row.data for row in self.fleet.last if isinstance(row.data, Order)}
        check_single(list(self.fleet.state.orders.values()))


def check_single(orders: list[OpenOrder]) -> None:
    """One open order per target; nothing else for an instance whose life an order is about."""
    targets = Counter(order.target for order in orders)
    assert not [target for target, number in targets.items() if number > 1]
    lives = {order.instance for order in orders if order.target.startswith("instance/")}
    others = [o for o in orders if o.instance in lives and not o.target.startswith("instance/")]
    assert not [o for o in others if o.type != RollbackOrdered.TYPE]
    starts = Counter((order.node, order.device) for order in orders if order.device)
    assert not [device for device, number in starts.items() if number > 1]


def check_answered(fleet: Story) -> None:
    """Every injection was closed exactly once, in the end."""
    requested = [row.id for row in fleet.rows if isinstance(row.data, InjectionRequested)]
    closed = Counter(row.data.request for row in fleet.decided if isinstance(row.data, InjectionClosed))
    assert closed == Counter(requested)


def check_replay(rows: list[Row], decided: list[Row]) -> None:
    """The inputs alone bring about the same decisions again."""
    state, again = core.initial(), list[Row]()
    made = {row.id for row in decided}
    for row in rows:
        if row.id not in made:
            state, decisions = core.step(state, row)
            again += decisions
    assert again == decided


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_history_keeps_the_rules(data: st.DataObject):
    world = World(data)
    for _ in range(data.draw(st.integers(1, STEPS_MAX), "steps")):
        world.step()
    fleet = world.fleet
    for _ in range(SETTLE_TICKS):  # what is open expires, is undone, and expires again
        world.wait(SETTLE_S)
    check_answered(fleet)
    assert fleet.state.freeze is None
    check_replay(fleet.rows, fleet.decided)
    assert current(fleet.state).rules == 1
