"""A fleet that exists only as facts: a test says what happened, and sees what the core decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID, uuid5

from pydantic import JsonValue

from kite_arbitrator import core, shipped
from kite_arbitrator.records import Row
from kite_arbitrator.state import State
from kite_arbitrator.testing.setting import (
    BASE,
    HEALTHY,
    HELD_US,
    LAG_US,
    LEDGER,
    NODE,
    RUNNING,
    SECOND_US,
    STEP_US,
    WALL_US,
    WINDOW_US,
    Doing,
    Told,
    adapter,
    digest_of,
    node_of,
    pool,
)
from kite_schemas.ledger import Created, Tick
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.proof import EffectMissing, EffectProven, Missing
from kite_schemas.telemetry import DeviceWindow, InstanceWindow, Window
from kite_schemas.upcycle import (
    AdapterVerified,
    BlendDeleted,
    BlendLoaded,
    BlendStored,
    BlendUnloaded,
    DriftObserved,
    EffectPrint,
    InjectionRequested,
    Resident,
    RollbackRequested,
    RolledBack,
)
from kite_schemas.why import Order
from kite_schemas.yoco import (
    Device,
    DrainRequested,
    EngineOffer,
    Found,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderFailed,
    OrderRequested,
    Path,
    SleepMode,
)
from kite_schemas.yoco import (
    State as Life,
)

AnyOrder = TypeVar("AnyOrder", bound=Order)


@dataclass
class Story:
    """Feeds rows to the core; `decided` holds every decision so far, `last` those of the last row."""

    state: State = field(default_factory=core.initial)
    rows: list[Row] = field(default_factory=list[Row])
    decided: list[Row] = field(default_factory=list[Row])
    last: tuple[Row, ...] = ()
    now_us: int = 1_000_000
    step_us: int = STEP_US
    seqs: dict[str, int] = field(default_factory=dict[str, int])
    engines: tuple[EngineOffer, ...] = ()
    """What nodes tell of their engines when they register."""

    drift_us: int | None = None
    """How often a node looks at what its engines hold; by default never, and then nobody is told what they should."""

    def tell(self, data: Data, subject: str = "instance/x") -> tuple[Row, ...]:
        """Append one input, `step_us` after the last one, and return what was decided."""
        return self.tell_at(self.now_us + self.step_us, data, subject)

    def tell_at(self, now_us: int, data: Data, subject: str = "instance/x") -> tuple[Row, ...]:
        """Append one input at a moment of ledger time, which never goes back."""
        self.now_us = max(now_us, self.state.now_us + 1)
        pos = self.state.pos + 1
        row = Row(
            pos=pos,
            id=str(uuid5(UUID(LEDGER), f"row {pos}")),
            type=data.TYPE,
            subject=subject,
            ledger_us=self.now_us,
            data=data,
        )
        self.state, self.last = core.step(self.state, row)
        self.rows += [row, *self.last]
        self.decided += self.last
        return self.last

    def wait(self, us: int) -> tuple[Row, ...]:
        """Let ledger time pass, and tick."""
        return self.tell_at(self.now_us + us, Tick(), "ledger/fleet")

    def kinds(self) -> list[str]:
        """Return the last decisions' kinds, short."""
        return [row.type.split(".")[2] for row in self.last]

    def orders(self, kind: type[AnyOrder]) -> list[tuple[str, AnyOrder]]:
        """Return the last decisions of one kind of order, with their ids."""
        return [(row.id, row.data) for row in self.last if isinstance(row.data, kind)]

    def open(self, target: str) -> str:
        """Return the id of the open order for a target."""
        return next(order.id for order in self.state.orders.values() if order.target == target)

    # --- what a healthy fleet reports

    def begin(
        self, *, ready: int = 1, standbys: int = 1, nodes: Sequence[str] = (NODE,), **fields: JsonValue
    ) -> "Story":
        """Create the ledger, set the shipped policy with one pool on each node, register the nodes."""
        self.tell(Created(ledger=LEDGER, format=core.FORMAT), "ledger/fleet")
        self.tell(ChangeRequested(actor="test", policy=shipped.policy()), "policy/fleet")
        pools: list[JsonValue] = [pool(node, ready, standbys, **fields) for node in nodes]
        self.amend({"fleet.pools": pools, "upcycle.drift_interval_us": self.drift_us})
        for node in nodes:
            self.register(node=node)
        return self

    def amend(self, settings: Mapping[str, JsonValue]) -> tuple[Row, ...]:
        """Change settings of the policy, by their keys."""
        changes = tuple(Change(key=key, value=value) for key, value in settings.items())
        return self.tell(ChangeRequested(actor="test", changes=changes), "policy/fleet")

    def register(self, boot: str = "boot", *, node: str = NODE, found: tuple[Found, ...] = ()) -> tuple[Row, ...]:
        """A yoco starts, and finds what runs already; it counts its windows from 1."""
        self.seqs[node] = 0
        devices = tuple(Device(id=f"cpu{n}", kind="cpu", memory_bytes=1 << 34) for n in range(2))
        fact = NodeRegistered(
            node=node,
            boot=str(uuid5(UUID(LEDGER), boot)),
            devices=devices,
            memory_bytes=1 << 35,
            sleep_modes=(SleepMode.PAUSED,),
            instances=found,
            engines=self.engines,
        )
        return self.tell(fact, f"node/{node}")

    def window(
        self,
        doing: Told | None = None,
        *,
        node: str = NODE,
        at_us: int | None = None,
        fragmentation_ppm: int | None = 100_000,
        **fields: Any,
    ) -> tuple[Row, ...]:
        """Send the next window of a node, an interval after the last row; instances are HEALTHY, or as in `doing`.

        `fields` are those of `sent`, about the window's way.
        """
        at_us = self.now_us + WINDOW_US if at_us is None else at_us
        told: dict[str, Doing | None] = dict.fromkeys(self.running(node), HEALTHY)
        told |= {name: does for name, does in (doing or {}).items() if node_of(name) == node}
        window = self.sent(
            node,
            at_us,
            instances=tuple(InstanceWindow(id=i) if d is None else d.window(i) for i, d in sorted(told.items())),
            devices=(DeviceWindow(id="cpu0", fragmentation_ppm=fragmentation_ppm),),
            **fields,
        )
        return self.tell_at(at_us, window, f"node/{node}")

    def windows(
        self,
        us: int,
        doing: Told | None = None,
        *,
        nodes: Sequence[str] = (NODE,),
        **fields: Any,
    ) -> list[Row]:
        """Send windows for a while, ten a second of each node, with a tick in each second; return what was decided."""
        decided, began_us = list[Row](), self.now_us
        for number in range(1, us // WINDOW_US + 1):
            for node in nodes:
                decided += self.window(doing, node=node, at_us=began_us + number * WINDOW_US, **fields)
            if number % 10 == 0:
                decided += self.wait(1)
        return decided

    def sent(
        self,
        node: str,
        at_us: int,
        *,
        seq: int | None = None,
        lost: int = 0,
        lag_us: int = LAG_US,
        held_us: int = HELD_US,
        offset_us: int = 0,
        boot: str | None = None,
        interval_us: int = WINDOW_US,
        instances: tuple[InstanceWindow, ...] = (),
        devices: tuple[DeviceWindow, ...] = (),
    ) -> Window:
        """Return a window that arrives at `at_us`: its own `seq`, or the next after `lost` others.

        It was on its way for `lag_us`, from its sample to the bus for `held_us`, and its node's clock is `offset_us`
        ahead.
        """
        if seq is None:
            seq = self.seqs[node] = self.seqs[node] + 1 + lost
        emitted_us = WALL_US + at_us - lag_us + offset_us
        return Window(
            node=node,
            boot=self.state.nodes[node].boot if boot is None else str(uuid5(UUID(LEDGER), boot)),
            seq=seq,
            sampled_us=emitted_us - held_us,
            emitted_us=emitted_us,
            interval_us=interval_us,
            instances=instances,
            devices=devices,
        )

    def rest(self) -> "Story":
        """Let time pass until what instances count is what their users do, and nothing of KITE's own."""
        until_us = max(instance.probed_until_us for instance in self.state.instances.values())
        self.wait(max(SECOND_US, until_us - self.now_us))
        return self

    def running(self, node: str = NODE) -> list[str]:
        """Return the instances of a node that have a process."""
        return [i.id for i in self.state.instances.values() if i.node == node and i.state in RUNNING]

    def change(
        self, instance: str, old: str, new: str, code: str = "ordered", *, done: bool = False
    ) -> tuple[Row, ...]:
        order = self.open(f"instance/{instance}") if done else None
        return self.tell(
            InstanceChanged(
                order=order,
                done=done,
                instance=instance,
                node=node_of(instance),
                from_state=Life(old),
                to_state=Life(new),
                code=code,
                duration_us=1,
            )
        )

    def ready(self, instance: str, path: str = "cold", versions: tuple[str, ...] = ()) -> tuple[Row, ...]:
        return self.tell(
            InstanceReady(
                order=self.open(f"instance/{instance}"),
                done=True,
                instance=instance,
                node=node_of(instance),
                path=Path(path),
                pid=1,
                endpoint=f"http://127.0.0.1:{9000 + int(instance[-1])}",
                versions=versions,
                noise_micronats=0,
                t_wake_us=1,
                t_first_token_us=2,
            )
        )

    def up(self, *, ready: int = 1, standbys: int = 1, nodes: Sequence[str] = (NODE,), **fields: JsonValue) -> "Story":
        """Bring the whole pool of each node up: the first instances ready, the standbys asleep."""
        self.begin(ready=ready, standbys=standbys, nodes=nodes, **fields)
        for name in (f"{node}-{BASE}-{number}" for node in nodes for number in range(ready + standbys)):
            if not any(order.target == f"instance/{name}" for order in self.state.orders.values()):
                self.wait(1)
            self.change(name, "absent", "starting")
            self.ready(name)
            if int(name.rpartition("-")[2]) >= ready:
                self.sleep(name)
        return self

    def hold(self, instance: str) -> tuple[Row, ...]:
        """A spare that was told to is brought as far as without the weights."""
        self.change(instance, "absent", "starting")
        return self.change(instance, "starting", "prewarmed", "held", done=True)

    def fails(self, instance: str, stage: str, code: str = "x", *, state: Life = Life.FAILED) -> tuple[Row, ...]:
        """The order about an instance failed in a stage, and left it in a state."""
        order = self.open(f"instance/{instance}")
        failed = OrderFailed(
            order=order, done=True, instance=instance, state=state, stage=stage, code=code, message=""
        )  # fmt: skip
        return self.tell(failed)

    def found(self, instance: str, **fields: Any) -> Found:
        """Return an instance as a yoco that starts anew finds it: as it was, but for `fields`."""
        known = self.state.instances[instance]
        told: dict[str, Any] = {"state": known.state, "endpoint": known.endpoint, "versions": known.versions}
        return Found(instance=instance, pid=1, **{**told, **fields})

    def sleep(self, instance: str) -> None:
        """A standby that was told to drains, and goes to sleep."""
        self.change(instance, "ready", "draining")
        self.change(instance, "draining", "draining", "drained", done=True)
        self.change(instance, "draining", "asleep", "paused", done=True)

    def wake(self, instance: str) -> None:
        """A standby that was told to wakes, and has every promoted version."""
        versions = tuple(blend.resident.version for blend in self.state.blends.values())
        self.change(instance, "asleep", "waking")
        self.ready(instance, "hot", versions)

    def inject(self, name: str, *, blend: str = "risk", **fields: Any) -> str:
        """Request an injection; return the request's id."""
        request = InjectionRequested(actor="test", blend=blend, adapter=adapter(name), base=BASE, **fields)
        self.tell(request, f"blend/{blend}")
        return next(row.id for row in reversed(self.rows) if row.data is request)

    def verified(self, request: str, *, share_ppm: int = 3_000) -> tuple[Row, ...]:
        injection = self.state.injections[request]
        return self.tell(
            AdapterVerified(
                order=self.open(f"blend/{injection.request.blend}"),
                done=True,
                request=request,
                adapter=injection.request.adapter,
                parameters=1,
                share_ppm=share_ppm,
                rank=4,
                duration_us=1,
            )
        )

    def stored(self, request: str, share_ppm: int = 1, *, size_bytes: int | None = None) -> tuple[Row, ...]:
        blend = self.state.injections[request].request.blend
        return self.tell(
            BlendStored(
                order=self.open(f"blend/{blend}"),
                done=True,
                request=request,
                resident=self.resident(request),
                digest=digest_of(request),
                method="concatenate",
                rank=4,
                residual_ppm=0,
                share_ppm=share_ppm,
                size_bytes=size_bytes,
                duration_us=1,
            )
        )

    def resident(self, request: str) -> Resident:
        return self.resident_of(self.state.injections[request].request.blend, digest_of(request))

    def resident_of(self, blend: str, digest: str) -> Resident:
        return Resident(blend=blend, version=f"{blend}@{digest[:12]}", path=f"store/sha256/{digest}")

    def proven(self, request: str, instance: str) -> tuple[Row, ...]:
        """The worker loads the version into the instance and proves it."""
        return self.proves(self.resident(request).version, instance)

    def proves(self, version: str, instance: str, *, slots_taken: int | None = None) -> tuple[Row, ...]:
        """A load that was ordered brings a version into the instance, and its effect is there."""
        order = self.open(f"load/{version.partition('@')[0]}@{instance}")
        loaded = BlendLoaded(order=order, instance=instance, version=version, duration_us=1, slots_taken=slots_taken)
        self.tell(loaded)
        effect_print = EffectPrint(
            path=f"store/prints/{digest_of(version)}.json", digest=digest_of(version), distance_micronats=5
        )
        return self.tell(
            EffectProven(
                order=order,
                done=True,
                instance=instance,
                version=version,
                base_micronats=5,
                base_min_micronats=1,
                effect_print=effect_print,
            )
        )

    def misses(self, version: str, instance: str, code: Missing = Missing.LIKE_BASE) -> tuple[Row, ...]:
        """A load that was ordered brings a version into the instance, and its effect is missing."""
        order = self.open(f"load/{version.partition('@')[0]}@{instance}")
        self.tell(BlendLoaded(order=order, instance=instance, version=version, duration_us=1))
        missing = EffectMissing(order=order, done=True, instance=instance, version=version, code=code, message="")
        return self.tell(missing)

    def undoes(self, version: str, instance: str, *, healed: bool | None = None) -> tuple[Row, ...]:
        """A version that was to be taken out of the instance again is out."""
        order = self.open(f"load/{version.partition('@')[0]}@{instance}")
        request = self.state.orders[order].request
        assert request is not None  # noqa: S101 # every order to undo something names who asked for it
        return self.tell(
            RolledBack(order=order, done=True, request=request, instance=instance, version=version, healed=healed)
        )

    def unloads(self, version: str, instance: str, *, slots_taken: int | None = None) -> tuple[Row, ...]:
        """A version that was to be retired has left the instance."""
        order = self.open(f"retire/{version}@{instance}")
        return self.tell(
            BlendUnloaded(
                order=order, done=True, instance=instance, version=version, slots_taken=slots_taken, duration_us=1
            )
        )

    def deletes(self, version: str) -> tuple[Row, ...]:
        """A version that was to be deleted is no longer in the store."""
        order, stored = self.open(f"delete/{version}"), self.state.versions[version]
        return self.tell(
            BlendDeleted(order=order, done=True, version=version, digest=stored.digest, freed_bytes=stored.size_bytes),
            f"version/{version}",
        )

    def rollback(self, blend: str = "risk", **fields: Any) -> str:
        """Ask for an earlier version of a blend; return the request's id."""
        request = RollbackRequested(actor="test", blend=blend, **fields)
        self.tell(request, f"blend/{blend}")
        return next(row.id for row in reversed(self.rows) if row.data is request)

    def drifts(self, instance: str, found: Sequence[str], missing: Sequence[str] = ()) -> tuple[Row, ...]:
        """The node's upcycle has looked at what an instance holds."""
        told = self.state.instances[instance].told
        assert told is not None  # noqa: S101 # it looks only for what it was told
        drift = DriftObserved(
            node=node_of(instance),
            instance=instance,
            told=told.id,
            expected=told.versions,
            found=tuple(found),
            missing=tuple(missing),
        )
        return self.tell(drift)

    def promote(self, name: str, *, size_bytes: int | None = None, **fields: Any) -> str:
        """Carry one injection through on every ready instance; return the request's id."""
        request = self.inject(name, **fields)
        self.verified(request)
        targets = self.state.injections[request].targets
        self.stored(request, size_bytes=size_bytes)
        for instance in targets:
            self.proven(request, instance)
        return request

    def order(self, **fields: Any) -> tuple[Row, ...]:
        return self.tell(OrderRequested(actor="test", base=BASE, **fields), f"base/{BASE}")

    def drain(self, instance: str, **fields: Any) -> tuple[Row, ...]:
        """Somebody wants an instance out of service."""
        return self.tell(DrainRequested(actor="test", instance=instance, **fields), f"instance/{instance}")
