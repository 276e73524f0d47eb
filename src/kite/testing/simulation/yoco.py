"""The simulated yoco of a node: instances that start, drain, sleep and wake, on devices whose memory runs out.

Its processes outlive it: a yoco that begins anew finds them, unless a keeper has ended them meanwhile.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kite.testing.simulation.agenda import Agenda
from kite.testing.simulation.chance import Chance
from kite.testing.simulation.engine import STRANGER, Engine, Memory
from kite.testing.simulation.upcycle import proven
from kite.testing.simulation.worker import Run, Task, Tasks, Trouble
from kite_schemas.upcycle import BlendLoaded, Resident
from kite_schemas.why import Outcome, Reason
from kite_schemas.yoco import (
    PATHS,
    SHUTDOWN,
    DrainOrdered,
    EngineOffer,
    Found,
    InstanceChanged,
    InstanceOrder,
    InstanceReady,
    OrderFailed,
    OrderRefused,
    Path,
    PathOffer,
    PrewarmOrdered,
    SleepMode,
    SleepOrdered,
    Source,
    StartOrdered,
    State,
    StopOrdered,
    WakeOrdered,
)

SPAWN_US, WARM_US = 600_000, 150_000
"""Until a process answers, and until it has given a token; faster than real ones."""

IMPORT_US = 450_000
"""What a prewarmed process has behind it of the time until it answers."""

WAKE_US: dict[SleepMode, int] = {
    SleepMode.PAUSED: 6_000,
    SleepMode.KV: 40_000,
    SleepMode.L1: 260_000,
    SleepMode.L2: 500_000,
}
"""Until a wake returns, by how the instance slept."""

FAILS_US = 200_000
"""Until a process that gets no memory has ended."""

POLL_US, PAUSE_US, LOAD_US, PROVE_US = 50_000, 6_000, 25_000, 15_000
STARTABLE = frozenset({State.ABSENT, State.FAILED, State.STARTING, State.WARMING, State.PREWARMED})
LIVING = frozenset({State.READY, State.DRAINING, State.ASLEEP, State.WAKING})


@dataclass(slots=True)
class Instance:
    """One instance: its state as its yoco sees it, and its process if it has one."""

    id: str
    state: State = State.ABSENT
    engine: Engine | None = None
    mode: SleepMode = SleepMode.PAUSED

    @property
    def process(self) -> Engine:
        """The process. Raises Trouble without one that lives."""
        if self.engine is None or not self.engine.alive:
            raise Trouble("engine", "engine_died")
        return self.engine

    def end(self) -> None:
        """End the process, if there is one."""
        if self.engine is not None:
            self.engine.end()
            self.engine = None


@dataclass(slots=True)
class Yoco:
    """The instances and devices of one node, and how its orders are carried out.

    `engines` are those of the whole fleet by endpoint.
    """

    node: str
    agenda: Agenda
    chance: Chance
    memories: Sequence[Memory]
    engines: dict[str, Engine]
    ports: "count[int]"
    modes: tuple[SleepMode, ...] = (SleepMode.PAUSED,)
    instances: dict[str, Instance] = field(default_factory=dict[str, Instance])

    def tasks(self) -> Tasks:
        """Return how each order is carried out."""
        bodies: dict[type[InstanceOrder], Callable[..., Run]] = {
            StartOrdered: self._start,
            PrewarmOrdered: self._prewarm,
            DrainOrdered: self._drain,
            SleepOrdered: self._sleep,
            WakeOrdered: self._wake,
            StopOrdered: self._stop,
        }
        return {kind: Task(body, self._failed) for kind, body in bodies.items()}

    def get(self, name: str) -> Instance:
        """Return an instance; one that was never heard of is absent."""
        return self.instances.setdefault(name, Instance(name))

    def living(self) -> list[Instance]:
        """Return the instances that have a process, by name."""
        found = [instance for instance in self.instances.values() if instance.engine is not None]
        return sorted(found, key=lambda instance: instance.id)

    def offer(self) -> EngineOffer:
        """Return what the engines of the node can do."""
        wakes = (
            PathOffer(path=PATHS[mode], mode=mode, expected_us=WAKE_US[mode], source=Source.COMPUTED)
            for mode in self.modes
        )
        start = PathOffer(path=Path.COLD, expected_us=SPAWN_US + WARM_US, source=Source.COMPUTED)
        return EngineOffer(kind="fake", version="simulated", modes=self.modes, paths=(*wakes, start))

    def adopt(self) -> tuple[Found, ...]:
        """Return the processes that outlived the yoco before; a step that it was in the middle of is undone."""
        for instance in self.living():
            if instance.state is State.WAKING and instance.engine is not None:
                instance.state, instance.engine.paused = State.ASLEEP, True
            elif instance.state not in LIVING or instance.engine is None or not instance.engine.alive:
                instance.end()
                instance.state = State.ABSENT
        held = [instance for instance in self.instances.values() if instance.state is State.PREWARMED]
        return tuple(self._found(instance) for instance in (*self.living(), *held))

    def _found(self, instance: Instance) -> Found:
        engine = instance.engine
        return Found(
            instance=instance.id,
            pid=1,
            state=instance.state,
            endpoint=engine.endpoint if engine else f"http://127.0.0.1:{next(self.ports)}",
            versions=tuple(name for name in engine.versions if name != STRANGER) if engine else (),
            mode=instance.mode if instance.state is State.ASLEEP else None,
            noise_micronats=0,
        )

    def close(self) -> list[InstanceChanged]:
        """End every process, and return the facts that say so."""
        return [self._changed(instance, State.ABSENT, SHUTDOWN) for instance in self._there()]

    def forget(self) -> None:
        """End every process without a word: the machine is gone."""
        for instance in self._there():
            instance.end()
            instance.state = State.ABSENT

    def _there(self) -> list[Instance]:
        """Return the instances that have a process, with weights or without, by name."""
        found = [i for i in self.instances.values() if i.engine is not None or i.state is State.PREWARMED]
        return sorted(found, key=lambda instance: instance.id)

    def die(self, instance: Instance) -> InstanceChanged:
        """Let a process end by itself."""
        return self._changed(instance, State.FAILED, "engine_died")

    # --- orders

    def _start(self, order: StartOrdered) -> Run:
        instance = self.get(order.instance)
        if instance.state is State.READY:
            return self._ready(instance, Path.COLD, 0)
        if instance.state not in STARTABLE:
            return _refused(instance)
        began_us, prewarmed = self.agenda.now_us, instance.state is State.PREWARMED
        instance.end()
        yield self._changed(instance, State.STARTING, "ordered")
        yield from self._spawn(instance, order, SPAWN_US - IMPORT_US * prewarmed)
        yield self._changed(instance, State.WARMING, "healthy")
        yield self.chance.about(WARM_US)
        yield from self._hold(instance, order.residents or ())
        _ = instance.process
        instance.state = State.READY
        return self._ready(instance, Path.COLD, began_us)

    def _prewarm(self, order: PrewarmOrdered) -> Run:
        """Bring a process as far as without memory of the device."""
        instance = self.get(order.instance)
        if instance.state is State.PREWARMED:
            return self._changed(instance, State.PREWARMED, "held")
        if instance.state not in STARTABLE:
            return _refused(instance)
        instance.end()
        yield self._changed(instance, State.STARTING, "ordered")
        yield self.chance.about(IMPORT_US)
        if self.chance.bad():
            raise Trouble("prewarm", "engine_died")
        return self._changed(instance, State.PREWARMED, "held")

    def _spawn(self, instance: Instance, order: StartOrdered, took_us: int) -> Generator[int, None, None]:
        """Give the process its memory and wait until it answers. Raises Trouble with the arithmetic."""
        memory = next(memory for memory in self.memories if memory.id == order.device)
        endpoint = f"http://127.0.0.1:{next(self.ports)}"
        needed_bytes, free_bytes = order.spec.kv_cache_bytes, memory.piece_bytes
        if not memory.take(endpoint, needed_bytes):
            yield self.chance.about(FAILS_US)
            message = f"{memory.id} has {free_bytes} bytes in one piece, the process takes {needed_bytes}"
            raise Trouble("spawn", "out_of_memory", message)
        engine = Engine(instance.id, endpoint, order.spec.served_name, memory, self.chance.rng)
        instance.engine = self.engines[endpoint] = engine
        yield self.chance.about(took_us)
        if self.chance.bad():
            raise Trouble("health", "engine_died")

    def _drain(self, order: DrainOrdered) -> Run:
        instance = self.get(order.instance)
        if instance.state not in (State.READY, State.DRAINING):
            return _refused(instance)
        yield self._changed(instance, State.DRAINING, "ordered")
        while instance.process.in_flight:
            yield POLL_US
        return self._changed(instance, State.DRAINING, "drained")

    def _sleep(self, order: SleepOrdered) -> Run:
        instance = self.get(order.instance)
        if instance.state not in (State.DRAINING, State.ASLEEP):
            return _refused(instance)
        yield self.chance.about(PAUSE_US)
        if self.chance.bad():
            raise Trouble("pause", "engine_late")
        instance.process.paused = True
        instance.mode = order.mode
        return self._changed(instance, State.ASLEEP, "paused")

    def _wake(self, order: WakeOrdered) -> Run:
        instance = self.get(order.instance)
        if instance.state is State.READY:
            return self._ready(instance, order.path, 0)
        if instance.state is not State.ASLEEP:
            return _refused(instance)
        late = self._late(instance, order)
        if late is not None:
            return late
        began_us = self.agenda.now_us
        yield self._changed(instance, State.WAKING, "ordered")
        yield self.chance.about(WAKE_US[instance.mode])
        instance.process.paused = False
        if self.chance.bad():
            raise Trouble("resume", "engine_late")
        yield from self._hold(instance, order.residents)
        _ = instance.process
        instance.state = State.READY
        return self._ready(instance, order.path, began_us)

    def _late(self, instance: Instance, order: WakeOrdered) -> OrderRefused | None:
        """Refuse what would not be ready in time: only here it is known what has to be loaded."""
        lacking = sum(resident.version not in instance.process.versions for resident in order.residents)
        expected_us = WAKE_US[instance.mode] + lacking * LOAD_US + len(order.residents) * PROVE_US
        if expected_us <= order.deadline_us:
            return None
        code, message = Reason.DEADLINE_UNREACHABLE.value, f"{expected_us} us, not {order.deadline_us}"
        return OrderRefused(instance=instance.id, code=code, message=message, path=order.path, expected_us=expected_us)

    def _hold(self, instance: Instance, residents: Sequence[Resident]) -> Generator[int | Outcome, None, None]:
        """Load what is lacking of the residents, and prove all of them. Raises Trouble."""
        for resident in residents:
            if resident.version not in instance.process.versions:
                yield self.chance.about(LOAD_US)
                if not instance.process.load(resident.version, self.agenda.now_us):
                    raise Trouble("load", "out_of_memory")
                yield BlendLoaded(instance=instance.id, version=resident.version, duration_us=LOAD_US)
            yield self.chance.about(PROVE_US)
            yield proven(instance.id, resident)

    def _stop(self, order: StopOrdered) -> Run:
        instance = self.get(order.instance)
        yield self.chance.about(PAUSE_US)
        return self._changed(instance, State.ABSENT, "ordered")

    def _failed(self, order: InstanceOrder, trouble: Trouble) -> Outcome:
        """Leave no half-done step: a wake and a pause are undone, a start is ended; what has no process has failed."""
        instance = self.get(order.instance)
        if instance.engine is None or not instance.engine.alive or instance.state not in LIVING:
            instance.end()
            instance.state = State.FAILED if instance.state is not State.ABSENT else State.ABSENT
        elif instance.state is State.WAKING:
            instance.engine.paused = True
            instance.state = State.ASLEEP
        return OrderFailed(
            instance=instance.id,
            state=instance.state,
            stage=trouble.stage,
            code=trouble.code,
            message=trouble.message,
        )

    def _changed(self, instance: Instance, state: State, code: str) -> InstanceChanged:
        """Take a step and return the fact that says so."""
        if state in (State.ABSENT, State.FAILED):
            instance.end()
        former, instance.state = instance.state, state
        return InstanceChanged(
            instance=instance.id, node=self.node, from_state=former, to_state=state, code=code, duration_us=PAUSE_US
        )

    def _ready(self, instance: Instance, path: Path, began_us: int) -> InstanceReady:
        engine, took_us = instance.process, self.agenda.now_us - began_us if began_us else 0
        return InstanceReady(
            instance=instance.id,
            node=self.node,
            path=path,
            pid=1,
            endpoint=engine.endpoint,
            versions=tuple(resident for resident in engine.versions if resident != STRANGER),
            noise_micronats=0,
            t_wake_us=took_us,
            t_first_token_us=took_us,
        )


def _refused(instance: Instance) -> OrderRefused:
    return OrderRefused(instance=instance.id, code="wrong_state", message=f"{instance.id} is {instance.state}")
