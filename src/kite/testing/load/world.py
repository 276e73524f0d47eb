"""A fleet that exists only as events: what its nodes and its people say, as the bus would bring it, from a seed.

It decides nothing. Give it what the arbitrator decided (`answer`), and what the workers say to that comes among the
later inputs: instances start, sleep and wake, adapters are verified, blended, loaded and proven, queues fill and empty.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeAlias

from pydantic import JsonValue

from kite.testing.load import answers
from kite.testing.load.chance import chance
from kite.testing.load.node import Node
from kite.testing.load.profiles import SLOT_US, Profile, arrivals, injections, repeats
from kite_schemas.guard import ComparisonRequested
from kite_schemas.ledger import Tick
from kite_schemas.model import PPM, Data
from kite_schemas.policy import Change, ChangeRequested, Pool
from kite_schemas.upcycle import AdapterRef, BlendLoaded, BlendPromoted, InjectionRequested
from kite_schemas.why import Order
from kite_schemas.yoco import (
    EngineSpec,
    InstanceChanged,
    InstanceReady,
    OrderFailed,
    OrderRequested,
    SleepMode,
    StartOrdered,
)
from kite_schemas.yoco import State as Life

ACTOR = "load"
BASE_PATH = "/bases"
MEMBERS = 4
"""A blend grows to so many members; then each injection takes the place of one."""

LAG_US, LAG_SPREAD_US = 500, 2_500
"""From the emission of a window to the arbitrator: the transport's least, and what it varies by."""

ORDER_SPREAD_PPM = 250_000
"""By how much an order may take longer, or shorter, than it does on average."""


class Input(NamedTuple):
    """One event for the arbitrator: when it comes (µs of ledger time, never less than the one before), and what."""

    at_us: int
    subject: str
    data: Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a synthetic fleet is, and how often it is asked for something."""

    nodes: int = 100
    bases: int = 10
    """Base models; the nodes serve them in turn, one each."""

    ready: int = 2
    standbys: int = 1
    """Instances of each node."""

    devices: int = 3
    asks_milli: int = 500
    """Comparisons and wake-ups that people ask for in 1 000 s; some can only be held."""

    failing_ppm: int = 2_000
    """Share of the orders that fail."""

    lost_ppm: int = 0
    """Share of the windows that never come."""

    tick_us: int | None = None
    """Distance of the ticks of the ledger; None when the arbitrator that runs makes its own."""


Happening: TypeAlias = Callable[[int], Iterable[tuple[str, Data]]]


class World:
    """One synthetic fleet from `start_us` on. The same seed, calls and answers give the same inputs.

    It begins with the request for its pools, and for other `settings` of the policy by their keys; `counts` are the
    inputs so far by type.
    """

    def __init__(
        self,
        size: Size,
        profile: Profile,
        seed: int,
        *,
        start_us: int = 0,
        settings: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self.size = size
        self.settings = settings or {}
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.nodes = {name: self._node(number, name, profile) for number, name in enumerate(_names(size))}
        self._rng = chance(seed, "world")
        self._injections = injections(profile, seed)
        self._adapters = count()
        self._asks = count()
        self._members: dict[str, list[str]] = {}
        self._serial = count()
        self._due: list[tuple[int, int, Happening]] = []
        self._open(start_us)

    def inputs(self, until_us: int) -> Iterator[Input]:
        """Yield what comes up to a moment, in order. Answers given between two of them come among the rest."""
        while self._due and self._due[0][0] <= until_us:
            at_us, _, happening = heappop(self._due)
            for subject, data in happening(at_us):
                self.counts[data.TYPE] += 1
                yield Input(at_us, subject, data)

    def answer(self, at_us: int, order_id: str, subject: str, decision: Data) -> None:
        """Take note of a decision that is known from `at_us` on; an order is carried out, most things are ignored."""
        if isinstance(decision, BlendPromoted):
            self._members[decision.blend] = [member.adapter.name for member in decision.members]
        if isinstance(decision, StartOrdered):
            self.nodes[decision.node].add(decision.instance, decision.device, standby=decision.standby)
        if isinstance(decision, Order):
            self._carry_out(at_us, order_id, subject, decision)

    def pools(self) -> tuple[Pool, ...]:
        """Return the desired fleet, as the policy names it."""
        return tuple(self._pool(node, _engine(node.base)) for node in self.nodes.values())

    def policy(self) -> ChangeRequested:
        """Return the request for this fleet and its settings."""
        pools: list[JsonValue] = [pool.model_dump(mode="json") for pool in self.pools()]
        others = [Change(key=key, value=value) for key, value in self.settings.items()]
        return ChangeRequested(actor=ACTOR, changes=(Change(key="fleet.pools", value=pools), *others))

    # --- what happens by itself

    def _open(self, start_us: int) -> None:
        self._at(start_us, lambda _: [("policy/fleet", self.policy())])
        for number, node in enumerate(self.nodes.values()):
            self._at(start_us + 1, lambda _, node=node: [(f"node/{node.id}", node.registration())])
            phase_us = SLOT_US * number // self.size.nodes
            self._at(start_us + SLOT_US + phase_us, lambda at_us, node=node: self._windowed(at_us, node))
        self._at(start_us + SLOT_US, self._people)
        if self.size.tick_us is not None:
            self._at(start_us + self.size.tick_us, self._tick)

    def _at(self, at_us: int, happening: Happening) -> None:
        heappush(self._due, (at_us, next(self._serial), happening))

    def _tick(self, at_us: int) -> Iterable[tuple[str, Data]]:
        if self.size.tick_us is not None:
            self._at(at_us + self.size.tick_us, self._tick)
        return [("ledger/fleet", Tick())]

    def _windowed(self, at_us: int, node: Node) -> Iterable[tuple[str, Data]]:
        self._at(at_us + SLOT_US, lambda at_us: self._windowed(at_us, node))
        lag_us = LAG_US + node.rng.randrange(LAG_SPREAD_US)
        window = node.window(max(0, at_us - lag_us))
        lost = node.rng.randrange(PPM) < self.size.lost_ppm
        return [] if lost else [(f"node/{node.id}", window)]

    def _people(self, at_us: int) -> Iterable[tuple[str, Data]]:
        self._at(at_us + SLOT_US, self._people)
        wanted = [self._injection() for _ in range(next(self._injections))]
        if self._rng.randrange(PPM) < self.size.asks_milli * SLOT_US // 1_000:
            wanted.append(self._ask())
        return wanted

    def _injection(self) -> tuple[str, Data]:
        number = self._rng.randrange(self.size.bases)
        blend, name = f"blend-{number}", f"adapter-{next(self._adapters)}"
        adapter = AdapterRef(name=name, path=f"adapters/{name}", digest=answers.digest(f"{self.seed}/{name}"))
        members = self._members.get(blend, [])
        replace = self._rng.choice(members) if len(members) >= MEMBERS else None
        request = InjectionRequested(
            actor=ACTOR, blend=blend, adapter=adapter, base=_base(number), replace=replace, reason="load"
        )
        return f"blend/{blend}", request

    def _ask(self) -> tuple[str, Data]:
        """Ask in turn for a comparison on one node, one across nodes (held), and a wake-up (held with none asleep)."""
        here, there = (self.nodes[name] for name in self._rng.sample(sorted(self.nodes), 2))
        kind, ready, others = next(self._asks) % 3, here.ready(), there.ready()
        if kind == 0 and len(ready) > 1:
            return _comparison(ready[0], ready[1])
        if kind == 1 and ready and others:
            return _comparison(ready[0], others[0])
        return f"base/{here.base}", OrderRequested(actor=ACTOR, base=here.base)

    # --- what follows from decisions

    def _carry_out(self, at_us: int, order_id: str, subject: str, order: Order) -> None:
        spread_us = answers.TAKES_US.get(type(order), 0) * ORDER_SPREAD_PPM // PPM
        took_us = answers.TAKES_US.get(type(order), 0) + self._rng.randrange(-spread_us, spread_us + 1)
        well = self._rng.randrange(PPM) >= self.size.failing_ppm
        for said in answers.answer(order, order_id, took_us, well=well):
            after_us = answers.BEGUN_US + took_us * said.after_ppm // PPM
            self._at(at_us + after_us, lambda at_us, said=said: self._said(at_us, order.node, subject, said.data))

    def _said(self, at_us: int, node: str, subject: str, data: Data) -> Iterable[tuple[str, Data]]:
        """A worker speaks: from here its node is so."""
        match data:
            case InstanceChanged():
                self.nodes[node].moved(data.instance, data.to_state)
            case InstanceReady():
                self.nodes[node].moved(data.instance, Life.READY)
            case OrderFailed():
                self.nodes[node].moved(data.instance, data.state)
            case BlendLoaded():
                self.nodes[node].loaded(data.instance, data.version, at_us)
            case _:
                pass
        return [(subject, data)]

    def _node(self, number: int, name: str, profile: Profile) -> Node:
        return Node(
            id=name,
            base=_base(number % self.size.bases),
            rng=chance(self.seed, "node", number),
            counts=arrivals(profile, self.seed, node=number),
            repeats=repeats(profile, self.seed, node=number),
            devices=tuple(f"gpu{device}" for device in range(self.size.devices)),
        )

    def _pool(self, node: Node, engine: EngineSpec) -> Pool:
        return Pool(
            node=node.id,
            base_path=engine.base_path,
            base_digest=answers.digest(node.base),
            spec=engine,
            ready=self.size.ready,
            standbys=self.size.standbys,
            standby_mode=SleepMode.PAUSED,
        )


def run(
    world: World, until_us: int, decide: Callable[[Input], Iterable[tuple[int, str, str, Data]]]
) -> Iterator[Input]:
    """Yield the inputs up to a moment, each after `decide` was asked about it and its decisions were answered.

    `decide` returns each decision as (ledger time in µs, id, subject, data).
    """
    for one in world.inputs(until_us):
        for at_us, order_id, subject, data in decide(one):
            world.answer(max(at_us, one.at_us), order_id, subject, data)
        yield one


def _comparison(first: str, second: str) -> tuple[str, Data]:
    return f"instance/{first}", ComparisonRequested(actor=ACTOR, first=first, second=second)


def _names(size: Size) -> list[str]:
    return [f"node-{number:03}" for number in range(size.nodes)]


def _base(number: int) -> str:
    return f"base-{number}"


def _engine(base: str) -> EngineSpec:
    return EngineSpec(
        kind="fake",
        base_path=f"{BASE_PATH}/{base}",
        served_name=base,
        dtype="bfloat16",
        max_model_len=8_192,
        max_loras=8,
        max_lora_rank=64,
        block_size=32,
        kv_cache_bytes=16 * 1024**3,
        cpus="",
    )
