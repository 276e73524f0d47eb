"""The incident of stale state: scaling, on windows that were old, onto memory that an injection had just fragmented.

One node with one device serves one instance. An injection leaves the free memory in pieces; while the windows that
would tell it are late, a second instance is wanted. There is room for it, but not in one piece.
"""

from dataclasses import replace
from functools import partial

from kite.clock import US_PER_S
from kite.testing.simulation import Plan, World
from kite.testing.simulation.people import ACTOR
from kite.testing.simulation.plan import GIB, pool_of
from kite.testing.simulation.upcycle import digest
from kite.testing.simulation.world import START_US
from kite_arbitrator import shipped
from kite_arbitrator.simulation.run import Arbitrator, History
from kite_schemas.policy import Change, ChangeRequested, Policy
from kite_schemas.upcycle import AdapterRef, InjectionRequested
from kite_schemas.yoco import StartOrdered

SEED = 33
NODE, BASE, BLEND = "n1", "alpha", "risk-alpha"
WANTED = f"{NODE}-{BASE}-1"
"""The instance that cannot start."""

PLAN = Plan(
    bases=(BASE,),
    nodes=1,
    ready=1,
    standbys=0,
    devices=1,
    device_bytes=40 * GIB,
    process_bytes=14 * GIB,
    agents=0,
    lossy=0,
    failing_ppm=0,
)
LOADED_PPM = 600_000
LATE_US = 40_000
"""Above the 33 ms that the shipped policy takes for fresh."""

INJECTED_US, HEARD_US = 1_500_000, 3_000_000
"""When the injection is asked for, and when windows are in time again, from the beginning."""

LOOK_US = 1_000


def careless() -> Policy:
    """Return the shipped policy without what the incident taught: freshness, memory, and waiting after a failure."""
    policy = shipped.policy()
    arbitration = {"sync_timeout_us": None, "sync_timeout_reliable_us": None}
    yoco = {"reserve_bytes": None, "start_backoff_us": 1, "start_backoff_max_us": 1}
    return policy.model_copy(
        update={
            "arbitration": policy.arbitration.model_copy(update=arbitration),
            "yoco": policy.yoco.model_copy(update=yoco),
        }
    )


def incident(policy: Policy, seconds: int, *, freed_s: int | None = None) -> History:
    """Let it happen under a policy; `freed_s` is when the memory is in one piece again, None: never."""
    world = World(PLAN, SEED)
    arbitrator = Arbitrator(world, policy)
    arbitrator.start()
    world.bind(arbitrator)
    node = world.nodes[NODE]
    node.outlet.loss_ppm = 0
    memory = node.memories[0]
    memory.pinned, memory.loaded_ppm = True, LOADED_PPM
    _want(world, ready=1)
    world.agenda.after(INJECTED_US, partial(_inject, world))
    world.agenda.after(HEARD_US, partial(setattr, node.outlet, "slow_us", 0))
    if freed_s is not None:
        world.agenda.after(freed_s * US_PER_S, memory.join)
    world.agenda.run(START_US + seconds * US_PER_S)
    return History(SEED, world, arbitrator)


def _inject(world: World) -> None:
    """Ask for the injection; windows begin to be late."""
    world.nodes[NODE].outlet.slow_us = LATE_US
    adapter = AdapterRef(name="credit", path="adapters/credit", digest=digest("credit"))
    world.ask(f"blend/{BLEND}", InjectionRequested(actor=ACTOR, blend=BLEND, adapter=adapter, base=BASE))
    _await_load(world)


def _await_load(world: World) -> None:
    """Scale up as soon as the version is loaded: no window has told yet what that did to the memory."""
    if any(engine.versions for engine in world.engines.values()):
        _want(world, ready=2)
    else:
        world.agenda.after(LOOK_US, partial(_await_load, world))


def _want(world: World, *, ready: int) -> None:
    pool = pool_of(replace(PLAN, ready=ready), NODE, BASE).model_dump(mode="json")
    request = ChangeRequested(actor=ACTOR, changes=(Change(key="fleet.pools", value=[pool]),))
    world.ask("policy/fleet", request)


def starts(history: History) -> list[int]:
    """Return the positions at which the wanted instance was ordered to start."""
    return [row.pos for row in history.rows if isinstance(row.data, StartOrdered) and row.data.instance == WANTED]
