"""A fleet that exists only as facts: a test says what happened, and sees what the core decides."""

from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID, uuid5

from pydantic import JsonValue

from kite_arbitrator import core, shipped
from kite_arbitrator.state import Row, State
from kite_schemas.ledger import Created, Tick
from kite_schemas.model import Data
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.proof import EffectProven
from kite_schemas.upcycle import (
    AdapterRef,
    AdapterVerified,
    BlendLoaded,
    BlendStored,
    EffectPrint,
    InjectionRequested,
    Resident,
)
from kite_schemas.why import Order
from kite_schemas.yoco import (
    Device,
    InstanceChanged,
    InstanceReady,
    NodeRegistered,
    OrderRequested,
    Path,
    SleepMode,
)
from kite_schemas.yoco import (
    State as Life,
)

AnyOrder = TypeVar("AnyOrder", bound=Order)
LEDGER = "00000000-0000-4000-8000-000000000001"
BASE = "tiny"
NODE = "n1"
STEP_US = 1_000


def digest_of(text: str) -> str:
    return uuid5(UUID(LEDGER), text).hex * 2


def adapter(name: str) -> AdapterRef:
    return AdapterRef(name=name, path=f"adapters/{name}", digest=digest_of(name))


@dataclass
class Story:
    """Feeds rows to the core; `decided` holds every decision so far, `last` those of the last row."""

    state: State = field(default_factory=core.initial)
    rows: list[Row] = field(default_factory=list[Row])
    decided: list[Row] = field(default_factory=list[Row])
    last: tuple[Row, ...] = ()
    now_us: int = 1_000_000

    def tell(self, data: Data, subject: str = "instance/x") -> tuple[Row, ...]:
        """Append one input and return what was decided."""
        self.now_us = max(self.now_us + STEP_US, self.state.now_us + 1)
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
        self.now_us += us
        return self.tell(Tick(), "ledger/fleet")

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

    def begin(self, *, ready: int = 1, standbys: int = 1) -> "Story":
        """Create the ledger, set the shipped policy with one pool, register the node."""
        self.tell(Created(ledger=LEDGER, format=core.FORMAT), "ledger/fleet")
        self.tell(ChangeRequested(actor="test", policy=shipped.policy()), "policy/fleet")
        pool: dict[str, JsonValue] = {
            "node": NODE,
            "base_path": "/bases/tiny",
            "base_digest": digest_of("base"),
            "ready": ready,
            "standbys": standbys,
            "standby_mode": "paused",
            "spec": {
                "kind": "fake",
                "base_path": "/bases/tiny",
                "served_name": BASE,
                "dtype": "float32",
                "max_model_len": 128,
                "max_loras": 4,
                "max_lora_rank": 8,
                "block_size": 32,
                "kv_cache_bytes": 1 << 30,
                "cpus": "",
            },
        }
        self.tell(ChangeRequested(actor="test", changes=(Change(key="fleet.pools", value=[pool]),)), "policy/fleet")
        self.register()
        return self

    def register(self, boot: str = "boot") -> tuple[Row, ...]:
        devices = tuple(Device(id=f"cpu{n}", kind="cpu", memory_bytes=1 << 30) for n in range(2))
        fact = NodeRegistered(
            node=NODE,
            boot=str(uuid5(UUID(LEDGER), boot)),
            devices=devices,
            memory_bytes=1 << 31,
            sleep_modes=(SleepMode.PAUSED,),
        )
        return self.tell(fact, f"node/{NODE}")

    def change(
        self, instance: str, old: str, new: str, code: str = "ordered", *, done: bool = False
    ) -> tuple[Row, ...]:
        order = self.open(f"instance/{instance}") if done else None
        return self.tell(
            InstanceChanged(
                order=order,
                done=done,
                instance=instance,
                node=NODE,
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
                node=NODE,
                path=Path(path),
                pid=1,
                endpoint=f"http://127.0.0.1:{9000 + int(instance[-1])}",
                versions=versions,
                noise_micronats=0,
                t_wake_us=1,
                t_first_token_us=2,
            )
        )

    def up(self, *, ready: int = 1, standbys: int = 1) -> "Story":
        """Bring the whole pool up: the first instances ready, the standbys asleep."""
        self.begin(ready=ready, standbys=standbys)
        for number in range(ready + standbys):
            name = f"{NODE}-{BASE}-{number}"
            if not any(order.target == f"instance/{name}" for order in self.state.orders.values()):
                self.wait(1)
            self.change(name, "absent", "starting")
            self.ready(name)
            if number >= ready:
                self.change(name, "ready", "draining")
                self.change(name, "draining", "draining", "drained", done=True)
                self.change(name, "draining", "asleep", "paused", done=True)
        return self

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

    def stored(self, request: str) -> tuple[Row, ...]:
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
                share_ppm=1,
                duration_us=1,
            )
        )

    def resident(self, request: str) -> Resident:
        blend = self.state.injections[request].request.blend
        digest = digest_of(request)
        return Resident(blend=blend, version=f"{blend}@{digest[:12]}", path=f"store/sha256/{digest}")

    def proven(self, request: str, instance: str) -> tuple[Row, ...]:
        """The worker loads the version into the instance and proves it."""
        resident = self.resident(request)
        order = self.open(f"load/{resident.blend}@{instance}")
        self.tell(BlendLoaded(order=order, instance=instance, version=resident.version, duration_us=1))
        effect_print = EffectPrint(path="store/prints/x.json", digest=digest_of("print"), distance_micronats=5)
        return self.tell(
            EffectProven(
                order=order,
                done=True,
                instance=instance,
                version=resident.version,
                base_micronats=5,
                base_min_micronats=1,
                effect_print=effect_print,
            )
        )

    def promote(self, name: str, **fields: Any) -> str:
        """Carry one injection through on every ready instance; return the request's id."""
        request = self.inject(name, **fields)
        self.verified(request)
        targets = self.state.injections[request].targets
        self.stored(request)
        for instance in targets:
            self.proven(request, instance)
        return request

    def order(self, **fields: Any) -> tuple[Row, ...]:
        return self.tell(OrderRequested(actor="test", base=BASE, **fields), f"base/{BASE}")
