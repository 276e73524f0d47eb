"""What befalls versions on two real vLLM: what is damaged, killed, asked at once, drained, or finds no room.

All tests share one fleet, with a blend each; its store is a small disk of its own where a mount is allowed.
"""

import asyncio
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from kite.engine import Engine, EngineError
from kite.engine.process import signal_group
from kite.testing import adapters
from kite.testing.eventually import eventually
from kite_arbitrator.records import Instance, Standing
from kite_arbitrator.rules.v1.slots import taken
from kite_arbitrator.state import State
from kite_cli import place
from kite_cli.asking.request import Injection, change, inject
from kite_cli.asking.rollback import rollback
from kite_cli.testing import Ended, Up, left, run
from kite_cli.view import View
from kite_incident.replay import verify
from kite_schemas.envelope import Event, decode
from kite_schemas.model import Data
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import (
    BlendDeleted,
    BlendFailed,
    BlendLoaded,
    BlendPromoted,
    BlendStored,
    BlendUnloaded,
    DriftObserved,
    Ending,
    InjectionAdmitted,
    InjectionClosed,
    LoadOrdered,
    RebuildOrdered,
    RetireOrdered,
    Return,
    RollbackClosed,
    RollbackRequested,
)
from kite_schemas.yoco import InstanceReady
from kite_upcycle.reader import TENSORS_NAME, digest

BASE, NODE = "tiny", "local"
FIRST, SECOND = (f"{NODE}-{BASE}-{number}" for number in range(2))
UP_S, BACK_S, SOON_S = 240.0, 90.0, 45.0
PAUSE_S = 0.2  # of the load between two requests: more would slow every proof down on a machine of two cores
HALF_PPM = 500_000
LONG_TOKENS = 800
"""A request so long that a version is retired while it runs."""

KEPT_US = 120_000_000
SMALL_DISK = 'mount -t tmpfs -o size=48m,nr_inodes=2k small "$0" && exec "$@"'
FILL_BYTES = 1 << 20

Found = TypeVar("Found", bound=Data)
Moment = Callable[[Event], bool]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    probe = [unshare or "false", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs small /tmp"]
    return subprocess.run(probe, check=False, capture_output=True).returncode == 0


@dataclass
class Fleet:
    """A running `kite up`, its processes, and what its ledger and its store hold."""

    up: Up
    base: Path
    scratch: Path
    seeds: Generator[int] = field(default_factory=lambda: (seed for seed in count(1)))

    @property
    def place(self) -> place.Place:
        return place.in_folder(self.up.dir)

    @property
    def root(self) -> Path:
        """The adapter root as the fleet sees it, whose store is mounted for it alone."""
        return Path(f"/proc/{self.up.process.pid}/root{self.up.dir}/adapter-root")

    @property
    def state(self) -> State:
        with place.reading(self.place) as reader:
            return View(reader).refresh()

    def pid(self, service: str) -> int:
        return place.read(self.up.dir).pids[service]

    def signal(self, service: str, number: signal.Signals) -> None:
        os.kill(self.pid(service), number)

    def rows(self, kind: type[Found], after: int = 0) -> list[tuple[int, Found]]:
        """Return what is told by one type of event, with its positions."""
        with place.reading(self.place) as reader:
            rows = [(row.pos, decode(row.raw).data) for row in reader.find(types={kind.TYPE})]
        return [(pos, data) for pos, data in rows if isinstance(data, kind) and pos > after]

    def engine(self, instance: str) -> int:
        """Return the process of an engine, which leads a group."""
        return next(ready.pid for _, ready in reversed(self.rows(InstanceReady)) if ready.instance == instance)

    def serving(self) -> list[Instance]:
        return [one for one in self.state.instances.values() if one.state == "ready"]

    def adapter(self) -> Path:
        seed = next(self.seeds)
        return adapters.adapter(self.scratch / f"a{seed}", self.base, seed=seed)

    async def inject(
        self, blend: str, see: Callable[[Event], None] | None = None, *, replace: str | None = None
    ) -> Injection:
        return await inject(
            self.place,
            adapter=self.adapter(),
            base=BASE,
            blend=blend,
            weight_ppm=HALF_PPM,
            replace=replace,
            on_event=see,
        )

    async def promoted(self, blend: str) -> str:
        """Inject one adapter and return the version that the blend means then."""
        ended = await self.inject(blend)
        assert ended.ending is Ending.PROMOTED, ended.detail
        assert ended.version is not None
        return ended.version

    def folder(self, version: str) -> Path:
        return self.root / self.state.versions[version].resident.path


@pytest.fixture(scope="module")
def fleet(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Fleet]:
    folder = tmp_path_factory.mktemp("faults")
    home = folder / "fleet"
    store = home / "adapter-root" / "store"
    store.mkdir(parents=True)
    before = ("unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(store)) if may_mount() else ()
    served = ("--name", BASE, "--engine", "vllm", "--dtype", "float32", "--ready", "2", "--standbys", "0")
    up = Up(tiny_base, home, *served, "--blends", "11", before=before).start()
    try:
        up.wait_for("fleet ready", UP_S)
        fleet = Fleet(up, tiny_base, folder)
        asyncio.run(watchful(fleet))
        yield fleet
        with place.reading(fleet.place) as reader:
            reader.verify_chain()
            assert verify(reader).identical
    finally:
        up.end()
    assert left(home) == []


async def watchful(fleet: Fleet) -> None:
    """Look at what engines hold twice a second, and start what failed after one."""
    changed = await change(fleet.place, [("upcycle.drift_interval_us", 500_000), ("yoco.start_backoff_us", 1_000_000)])
    assert changed.ok, changed.detail


@dataclass
class Load:
    """Asks what a blend means, again and again, where and under which name the routes say for every request."""

    fleet: Fleet
    blend: str
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    answered: int = 0
    failed: list[str] = field(default_factory=list[str])

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            engines = dict[str, Engine]()
            reader = stack.enter_context(place.reading(self.fleet.place))
            while not self.stopped.is_set():
                routes = reader.routes(self.blend)
                route = routes[self.answered % len(routes)]
                if route.endpoint not in engines:
                    engines[route.endpoint] = await stack.enter_async_context(Engine(route.endpoint))
                await self._ask(engines[route.endpoint], route.version)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.stopped.wait(), PAUSE_S)

    async def _ask(self, engine: Engine, version: str) -> None:
        try:
            await engine.complete(version, [self.answered % 500 + 1, 2, 3], 4)
            self.answered += 1
        except EngineError as error:
            self.failed.append(f"{version}: {error}")


@asynccontextmanager
async def asked(fleet: Fleet, blend: str) -> AsyncGenerator[None]:
    """Ask what the blend means all the while, and a little longer: no request may fail."""
    load = Load(fleet, blend)
    asking = asyncio.create_task(load.run())
    try:
        yield
        enough = load.answered + 5
        await eventually(lambda: asking.done() or load.failed or load.answered >= enough, SOON_S)
    finally:
        load.stopped.set()
        await asking
    assert load.failed == []


async def at_rest(fleet: Fleet) -> None:
    """Wait until nothing is under way, and both engines list what is known of them and hold as much as is counted."""

    async def rests() -> bool:
        state = fleet.state
        if state.orders or state.injections or state.rollbacks or len(fleet.serving()) < 2:
            return False
        for one in fleet.serving():
            async with Engine(one.endpoint) as engine:
                listed, held = (await engine.models())[1:], await engine.held()
            if set(listed) != set(one.versions) or held is None or len(held) != taken(one):
                return False
        return True

    await eventually(rests, BACK_S)


def once(fleet: Fleet, ended: Injection, ending: Ending) -> None:
    """Check that an injection ended so, once, and was promoted once or not at all."""
    request = ended.story.request
    closed = [data for _, data in fleet.rows(InjectionClosed) if data.request == request]
    assert [data.outcome for data in closed] == [ending]
    promoted = [data for _, data in fleet.rows(BlendPromoted) if data.request == request]
    assert len(promoted) == (ending is Ending.PROMOTED)


def cut(folder: Path) -> None:
    """Leave half of a version's tensors."""
    tensors = folder / TENSORS_NAME
    content = tensors.read_bytes()
    tensors.chmod(0o644)
    tensors.write_bytes(content[: len(content) // 2])


# -------------------------------------------------------------------------------------------------------------- damage


async def test_a_folder_that_vanishes_under_a_known_name_is_computed_again_while_the_engines_serve(fleet: Fleet):
    version = await fleet.promoted("vanished")
    folder, engines = fleet.folder(version), [fleet.engine(name) for name in (FIRST, SECOND)]
    async with asked(fleet, "vanished"):
        shutil.rmtree(folder)
        await eventually(lambda: _rebuilt(fleet, version), SOON_S)
    assert digest(folder) == folder.name
    assert any(version in drift.missing for _, drift in fleet.rows(DriftObserved))
    assert [fleet.engine(name) for name in (FIRST, SECOND)] == engines
    assert all(psutil.pid_exists(pid) for pid in engines)
    await at_rest(fleet)


def _rebuilt(fleet: Fleet, version: str) -> bool:
    ordered = any(order.version == version for _, order in fleet.rows(RebuildOrdered))
    return ordered and not fleet.state.versions[version].damaged and not fleet.state.orders


@dataclass
class Held:
    """Stops the arbitrator at one moment, so that something happens before it decides what follows another."""

    fleet: Fleet
    stop: Moment
    then: Moment
    act: Callable[[Event], None]
    stopped: bool = False
    acted: bool = False

    def __call__(self, event: Event) -> None:
        if not self.stopped and self.stop(event):
            self.stopped = True
            self.fleet.signal("arbitrator", signal.SIGSTOP)
        elif self.stopped and not self.acted and self.then(event):
            self.acted = True
            self.act(event)


def harmed(fleet: Fleet, harm: Callable[[Path], None]) -> Held:
    """Harm a version after it is in the store, and before its load is ordered."""

    def act(event: Event) -> None:
        assert isinstance(event.data, BlendStored)
        harm(fleet.root / event.data.resident.path)
        fleet.signal("arbitrator", signal.SIGCONT)

    return Held(fleet, lambda e: isinstance(e.data, InjectionAdmitted), lambda e: isinstance(e.data, BlendStored), act)


async def test_a_version_cut_short_before_its_load_is_refused_for_one_reason_and_the_former_one_serves(fleet: Fleet):
    former = await fleet.promoted("cut")
    held = harmed(fleet, cut)
    async with asked(fleet, "cut"):
        ended = await fleet.inject("cut", held)
        assert held.acted
        once(fleet, ended, Ending.ROLLED_BACK)
        assert ended.reason == "load_failed"
        assert "store_damaged" in ended.detail
        assert "\n" not in ended.detail
        (stored,) = [fact.event.data for fact in ended.story.facts if isinstance(fact.event.data, BlendStored)]
        await eventually(lambda: stored.resident.version not in fleet.state.versions, SOON_S)
    assert not (fleet.root / stored.resident.path).exists()
    assert fleet.state.blends["cut"].resident.version == former
    await at_rest(fleet)


# --------------------------------------------------------------------------------------------------------------- kills


def core_of(fleet: Fleet, instance: str) -> int:
    """Return the process of an engine that computes; the one in front of it answers for names and health."""
    children = psutil.Process(fleet.engine(instance)).children(recursive=True)
    return next(
        child.pid for child in children if "EngineCore" in child.name() or "EngineCore" in "".join(child.cmdline())
    )


async def killed_in_mid_load(fleet: Fleet, blend: str, *options: str) -> Ended:
    """Inject with the command, and kill the second engine in the load: its core was stopped, so that it cannot end."""
    os.kill(core_of(fleet, SECOND), signal.SIGSTOP)
    after, engine = fleet.state.pos, fleet.engine(SECOND)
    about = ("--adapter", str(fleet.adapter()), "--target", BASE, "--blend", blend, "--weight", "0.5")
    command = asyncio.create_task(
        asyncio.to_thread(run, "upcycle", "inject", *about, *options, "--json", "--dir", str(fleet.up.dir))
    )
    await eventually(lambda: any(o.instance == SECOND for _, o in fleet.rows(LoadOrdered, after)), SOON_S)
    signal_group(engine, signal.SIGKILL)
    return await command


async def comes_back(fleet: Fleet, blend: str, killed: int) -> None:
    """Wait until another process is ready in place of one, with what the blend means proven in it."""
    await eventually(lambda: fleet.engine(SECOND) != killed and len(fleet.serving()) == 2, BACK_S)
    version = fleet.state.blends[blend].resident.version
    await eventually(lambda: _proven_since(fleet, killed, version), SOON_S)
    await at_rest(fleet)
    with place.reading(fleet.place) as reader:
        assert {(route.instance, route.version) for route in reader.routes(blend)} == {
            (FIRST, version),
            (SECOND, version),
        }


def _proven_since(fleet: Fleet, killed: int, version: str) -> bool:
    last = max(pos for pos, ready in fleet.rows(InstanceReady) if ready.pid == killed)
    proven = [data for _, data in fleet.rows(EffectProven, last) if data.instance == SECOND]
    return any(data.version == version for data in proven)


async def test_an_engine_killed_in_mid_load_takes_the_injection_back_everywhere(fleet: Fleet):
    former, killed = await fleet.promoted("broken"), fleet.engine(SECOND)
    ended = await killed_in_mid_load(fleet, "broken")
    assert ended.code == 1
    told = json.loads(ended.out)
    assert (told["outcome"], told["version"]) == ("rolled_back", None)
    assert told["reason"] in {"load_failed", "instance_lost"}
    assert fleet.state.blends["broken"].resident.version == former
    await comes_back(fleet, "broken", killed)
    assert [name for name in fleet.state.versions if name.startswith("broken@")] == [former]


async def test_an_engine_killed_in_mid_load_of_a_partial_injection_leaves_it_where_it_is_proven(fleet: Fleet):
    former, killed = await fleet.promoted("partial"), fleet.engine(SECOND)
    ended = await killed_in_mid_load(fleet, "partial", "--partial")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["outcome"], told["reason"], told["instances"]) == ("promoted", "partial", [FIRST])
    assert told["version"] == fleet.state.blends["partial"].resident.version != former
    await comes_back(fleet, "partial", killed)


def killed_at(fleet: Fleet, service: str, moment: Moment) -> Callable[[Event], None]:
    """Kill a service the first time that an event is seen."""
    spent: list[Event] = []

    def see(event: Event) -> None:
        if not spent and moment(event):
            spent.append(event)
            fleet.signal(service, signal.SIGKILL)

    return see


@pytest.mark.parametrize("moment", [BlendLoaded, EffectProven])
async def test_an_injection_whose_upcycle_is_killed_ends_once(fleet: Fleet, moment: type[Data]):
    """Between a load and its outcome, and between the proof on one engine and the load of the other."""
    blend, before = f"upcycle-{moment.__name__}", fleet.pid("upcycle")
    await fleet.promoted(blend)
    async with asked(fleet, blend):
        ended = await fleet.inject(blend, killed_at(fleet, "upcycle", lambda event: isinstance(event.data, moment)))
    assert fleet.pid("upcycle") != before
    once(fleet, ended, Ending.PROMOTED)
    assert (ended.instances, ended.missing) == ((FIRST, SECOND), ())
    await at_rest(fleet)


async def test_an_arbitrator_killed_between_the_last_proof_and_the_promotion_promotes_once(fleet: Fleet):
    """It is stopped before the proof, so that the bus has it and the ledger does not."""
    former, before = await fleet.promoted("arbitrator"), fleet.pid("arbitrator")

    def second(kind: type[BlendLoaded | EffectProven]) -> Moment:
        return lambda event: isinstance(event.data, kind) and event.data.instance == SECOND

    def kill(_: Event) -> None:
        proven = [d.version for _, d in fleet.rows(EffectProven) if d.instance == SECOND and d.version != former]
        assert not any(name.startswith("arbitrator@") for name in proven)
        fleet.signal("arbitrator", signal.SIGKILL)

    held = Held(fleet, second(BlendLoaded), second(EffectProven), kill)
    async with asked(fleet, "arbitrator"):
        ended = await fleet.inject("arbitrator", held)
    assert held.acted
    await eventually(lambda: fleet.pid("arbitrator") != before, SOON_S)
    once(fleet, ended, Ending.PROMOTED)
    assert (ended.instances, ended.missing) == ((FIRST, SECOND), ())
    await at_rest(fleet)


# ------------------------------------------------------------------------------------------------------------- at once


async def test_of_two_injections_of_one_blend_one_is_refused_and_another_blend_goes_its_way(fleet: Fleet):
    first, second, other = await asyncio.gather(*(fleet.inject(blend) for blend in ("one", "one", "other")))
    promoted, refused = sorted((first, second), key=lambda ended: ended.ending is not Ending.PROMOTED)
    once(fleet, promoted, Ending.PROMOTED)
    once(fleet, other, Ending.PROMOTED)
    once(fleet, refused, Ending.REJECTED)
    assert refused.reason == "blend_busy"
    await at_rest(fleet)


# ------------------------------------------------------------------------------------------------- there and back again


async def retained(fleet: Fleet, retention_us: int) -> None:
    assert (await change(fleet.place, [("upcycle.retention_us", retention_us)])).ok


def standing(fleet: Fleet, version: str) -> Standing:
    return fleet.state.versions[version].standing


async def test_a_rollback_to_a_version_that_drains_waits_for_its_requests_and_loads_it_again(fleet: Fleet):
    """Then the other one is retired, and what is returned to once more is made again first: its files are damaged."""
    old = await fleet.promoted("returning")
    new = await fleet.promoted("returning")
    endpoint, after = fleet.state.instances[FIRST].endpoint, fleet.state.pos
    async with asked(fleet, "returning"), Engine(endpoint) as engine:
        request = asyncio.create_task(engine.complete(old, [1, 2, 3], LONG_TOKENS))
        await eventually(lambda: engine.in_use(old), SOON_S)
        await retained(fleet, 1_000_000)
        await eventually(lambda: _retiring(fleet, old, after), SOON_S)
        assert not request.done()
        back = await rollback(fleet.place, "returning", version=old)
        assert await request == LONG_TOKENS
        assert (back.outcome, back.version, back.former) == (Return.DONE, old, new)
        assert set(back.instances) == {FIRST, SECOND}
        (asking,) = [pos for pos, _ in fleet.rows(RollbackRequested, after)]
        left_us = [
            pos for pos, data in fleet.rows(BlendUnloaded, after) if (data.version, data.instance) == (old, FIRST)
        ]
        loads = [pos for pos, data in fleet.rows(LoadOrdered, after) if data.request == back.story.request]
        assert asking < min(left_us) < min(loads)

        await eventually(lambda: standing(fleet, new) is Standing.RELEASED, SOON_S)
        await at_rest(fleet)
        await retained(fleet, KEPT_US)
        cut(fleet.folder(new))
        forward = await rollback(fleet.place, "returning", version=new)
    assert (forward.outcome, forward.version) == (Return.DONE, new), forward.detail
    assert any(order.version == new for _, order in fleet.rows(RebuildOrdered, after))
    assert digest(fleet.folder(new)) == fleet.state.versions[new].digest
    assert len({data.request for _, data in fleet.rows(RollbackClosed, after)}) == 2
    await at_rest(fleet)


def _retiring(fleet: Fleet, version: str, after: int) -> bool:
    """Tell whether the first engine was told to let go of a version, and still drains."""
    return any((o.version, o.instance) == (version, FIRST) for _, o in fleet.rows(RetireOrdered, after))


# ----------------------------------------------------------------------------------------------------------- full store


def fill(store: Path) -> None:
    """Leave no byte, and no name either: not even an empty folder can be made."""
    filler = store / "filler"
    filler.mkdir(exist_ok=True)
    with (filler / "bytes").open("ab", buffering=0) as file:
        until_full(lambda: file.write(bytes(FILL_BYTES)))
    names = (filler / uuid.uuid4().hex for _ in count())
    until_full(lambda: next(names).touch())


def until_full(step: Callable[[], object]) -> None:
    """Do something again and again until there is no room for it."""
    try:
        while True:
            step()
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017 # it is how this ends


@pytest.mark.skipif(not may_mount(), reason="a small disk needs a mount namespace, which is forbidden here")
async def test_a_full_store_deletes_refuses_what_is_new_and_makes_again_what_is_meant_once_there_is_room(fleet: Fleet):
    version, store, after = await fleet.promoted("full"), fleet.root / "store", fleet.state.pos

    def cut_and_fill(folder: Path) -> None:
        cut(folder)
        fill(store)

    async with asked(fleet, "full"):
        unwanted = await fleet.inject("full", harmed(fleet, cut_and_fill))
        once(fleet, unwanted, Ending.ROLLED_BACK)
        ((_, deleted),) = await eventually(lambda: fleet.rows(BlendDeleted, after), SOON_S)
        assert deleted.freed_bytes > 0
        assert not (store / "sha256" / deleted.digest).exists()

        fill(store)
        refused = await fleet.inject("full")
        once(fleet, refused, Ending.ROLLED_BACK)
        assert refused.reason == "blend_failed"
        assert "store_full" in refused.detail
        assert fleet.state.blends["full"].resident.version == version

        folder = fleet.folder(version)
        shutil.rmtree(folder)
        fill(store)
        await eventually(lambda: _not_rebuilt(fleet, after), SOON_S)
        shutil.rmtree(store / "filler")
        await eventually(lambda: _rebuilt(fleet, version), SOON_S)
    assert digest(folder) == folder.name
    assert [one.name for one in (store / "incoming").iterdir()] == []
    await at_rest(fleet)


def _not_rebuilt(fleet: Fleet, after: int) -> bool:
    """Tell whether an order to make a version again failed for want of room."""
    orders = [pos for pos, _ in fleet.rows(RebuildOrdered, after)]
    failed = [pos for pos, data in fleet.rows(BlendFailed, after) if data.code == "store_full"]
    return bool(orders) and any(pos > orders[0] for pos in failed)
