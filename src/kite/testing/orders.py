"""Orders and notices for tests of workers, published as the arbitrator's relay does, and what comes of them."""

from dataclasses import dataclass

from kite.bus import EVT, Bus, dec_subject
from kite.events import Composed, Origin, compose, new_id
from kite_schemas.arbitration import OrderExpired, Transport, TransportChanged
from kite_schemas.envelope import Event, decode
from kite_schemas.why import Decision, Order, Reason, Why
from kite_schemas.yoco import StopOrdered

ARBITRATOR = Origin(source="kite/arbitrator/test", producer="arbitrator@test")
ASKED = Why(reason=Reason.ASKED)
TTL_US = 60_000_000


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
