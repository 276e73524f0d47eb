"""Orders and notices for tests of workers, published as the arbitrator's relay does, and what comes of them.

`work` is a worker whose effects can be counted, also as a process that is killed (`kite.testing.crash`).
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from kite.bus import EVT, Bus, dec_subject
from kite.bus.monitor import read
from kite.events import Composed, Origin, compose, new_id
from kite.orders import ACK_WAIT_S, Emit, Received, Task, Tasks, Worker
from kite.testing.eventually import eventually
from kite_schemas.arbitration import OrderExpired, Transport, TransportChanged
from kite_schemas.envelope import Event, decode
from kite_schemas.why import Decision, Order, Outcome, Reason, Why
from kite_schemas.yoco import InstanceChanged, OrderFailed, State, StopOrdered

ARBITRATOR = Origin(source="kite/arbitrator/test", producer="arbitrator@test")
ASKED = Why(reason=Reason.ASKED)
TTL_US = 60_000_000
EFFECTS = "effects"
PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Said:
    """One fact on the bus: the event and its exact bytes."""

    event: Event
    raw: bytes


def stop_order(instance: str, *, node: str = "n1", ttl_us: int = TTL_US) -> StopOrdered:
    """Return the simplest order there is."""
    return StopOrdered(
        node=node, target=f"instance/{instance}", instance=instance, expires_us=ttl_us, ttl_us=ttl_us, why=ASKED
    )


def ordered(order: Decision, subject: str, *, traceparent: str | None = None) -> Composed:
    """Return a decision with its envelope, caused by some event and part of some correlation."""
    return compose(subject, order, ARBITRATOR, causation=new_id(), correlation=new_id(), traceparent=traceparent)


async def relay(bus: Bus, service: str, event: Composed, *, msg_id: str | None = None) -> None:
    """Publish a decision on its subject. Another `msg_id` than the event's makes the bus deliver it once more."""
    match decode(event.raw).data:
        case Order(node=node, target=target) | OrderExpired(node=node, target=target):
            pass
        case TransportChanged(node=node):
            target = f"node/{node}"
        case _:
            raise TypeError(f"{event.header.type} goes to no worker")
    subject = dec_subject(service, node, event.header.type.split(".")[2], target)
    headers = {"traceparent": event.header.traceparent} if event.header.traceparent else None
    await bus.publish(subject, event.raw, msg_id or event.header.id, headers)


async def give(bus: Bus, service: str, order: Order, subject: str) -> Composed:
    """Publish an order and return it."""
    event = ordered(order, subject)
    await relay(bus, service, event)
    return event


async def expire(bus: Bus, service: str, event: Composed) -> None:
    """Give an order up, as the arbitrator does when its time has passed."""
    order = decode(event.raw).data
    assert isinstance(order, Order)  # noqa: S101 # only orders expire
    kind = event.header.type.split(".")[2]
    data = OrderExpired(
        order=event.header.id, service=service, kind=kind, target=order.target, node=order.node, why=ASKED
    )
    await relay(bus, service, ordered(data, f"order/{event.header.id}"))


async def notify(bus: Bus, transport: Transport, boot: str, *, node: str = "n1") -> Composed:
    """Tell a yoco how its windows travel from here, and return the notice."""
    changed = TransportChanged(node=node, boot=boot, transport=transport, why=ASKED)
    event = ordered(changed, f"node/{node}")
    await relay(bus, "yoco", event)
    return event


async def facts(bus: Bus) -> list[Said]:
    """Return everything that is on the stream of facts, in order."""
    last = (await bus.stream(EVT)).last_seq
    found = [await bus.message(EVT, seq) for seq in range(1, last + 1)]
    return [Said(decode(message.payload), message.payload) for message in found if message is not None]


def effects(folder: Path) -> list[str]:
    """Return what the worker of `stops` did, one line for each effect: instance, order and attempt."""
    path = folder / EFFECTS
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def pause(folder: Path) -> Path:
    """Return the path of a file: while it is there, the worker of `stops` waits between an effect and its outcome."""
    return folder / "pause"


def stops(folder: Path) -> Tasks:
    """Return how stops are carried out by a line in a file, as an adapter is a name in an engine: looked for first."""

    async def stop(received: Received[StopOrdered], _emit: Emit) -> Outcome:
        found = any(received.id in line for line in effects(folder))
        if not found:
            with (folder / EFFECTS).open("a", encoding="utf-8") as file:
                file.write(f"{received.data.instance} {received.id} {received.attempt}\n")
        await eventually(lambda: not pause(folder).exists(), deadline_s=PAUSE_S)
        return InstanceChanged(
            instance=received.data.instance,
            node=received.data.node,
            from_state=State.READY,
            to_state=State.ABSENT,
            code="found" if found else "made",
            duration_us=1,
        )

    return {StopOrdered: Task(stop, failed)}


def failed(received: Received[StopOrdered], at: str, code: str, message: str) -> Outcome:
    """Return the failure of a stop."""
    return OrderFailed(instance=received.data.instance, state=State.FAILED, stage=at, code=code, message=message)


def journal_of(folder: Path) -> Path:
    """Return the journal of the worker in a folder."""
    return folder / "orders.sqlite"


async def work(url: str, folder: Path, node: str = "n1", ack_wait_s: float = ACK_WAIT_S) -> None:
    """Be the yoco of a node, with `stops` for its orders and everything of it in `folder`, until cancelled."""
    async with await Bus.connect(url, f"yoco-{node}") as bus:
        await Worker(
            bus=bus,
            origin=Origin(source=f"kite/yoco/{node}", producer="yoco@test"),
            service="yoco",
            node=node,
            journal=journal_of(folder),
            handlers=stops(folder),
            ack_wait_s=ack_wait_s,
        ).run()


def run(url: str, folder: Path, node: str = "n1", ack_wait_s: float = ACK_WAIT_S) -> None:
    """Be that yoco as a process."""
    asyncio.run(work(url, folder, node, ack_wait_s))


async def left(monitor_url: str, service: str, node: str) -> int:
    """Return how many orders the bus still has for a worker: not delivered, or delivered and not acknowledged."""
    listed = json.loads(await read(monitor_url, "jsz?consumers=true"))
    streams = [stream for account in listed["account_details"] for stream in account["stream_detail"]]
    found = [c for stream in streams for c in stream.get("consumer_detail", ()) if c["name"] == f"{service}-{node}"]
    return sum(consumer["num_pending"] + consumer["num_ack_pending"] for consumer in found)
