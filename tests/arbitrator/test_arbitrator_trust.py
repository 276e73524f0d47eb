"""Who is believed: with an operator's key every message has to be signed by whoever may say it."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kite.bus import DEC, FLEET, Bus, dec_subject, tel_subject
from kite.events import Composed, Origin, compose, publish
from kite.ledger import Reader
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.trust import KeyFileMissing, Signer, new_key, verifies
from kite_arbitrator.service import OperatorKeyMissing
from kite_arbitrator.testing.running import Place, arbitrator, served
from kite_incident.replay import verify
from kite_schemas.envelope import decode
from kite_schemas.ledger import Checkpointed, LeaseTaken, ProducerKeyAdded, Refusal, Rejected, Tick, sealed
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.telemetry import Window
from kite_schemas.yoco import OrderFailed, State

NODE = "n1"
BOOT = "00000000-0000-4000-8000-000000000009"
CLI = Origin(source="kite/cli/me", producer="cli@0")
YOCO = Origin(source=f"kite/yoco/{NODE}", producer="yoco@0")
SLACK_ROWS = 10


@pytest.fixture
def operator(tmp_path: Path) -> Signer:
    return new_key(tmp_path / "operator.key")


@pytest.fixture
async def place(tmp_path: Path, operator: Signer) -> AsyncGenerator[Place]:
    assert operator.public
    async with nats(tmp_path) as server:
        place = Place.beside(server, tmp_path)
        place.more["operator_key"] = tmp_path / "operator.pub"
        yield place


def asked(actor: str = "me") -> Composed:
    change = Change(key="arbitration.idle_tick_us", value=1_000_000)
    return compose("policy/fleet", ChangeRequested(actor=actor, changes=(change,)), CLI)


def failed(message: str, origin: Origin = YOCO) -> Composed:
    said = OrderFailed(instance="a", state=State.FAILED, stage="start", code="failed", message=message)
    return compose("instance/a", said, origin)


def key_added(source: str, signer: Signer) -> Composed:
    return compose("ledger/fleet", ProducerKeyAdded(actor="me", source=source, public_key=signer.public.hex()), CLI)


async def say(place: Place, signer: Signer | None, *events: Composed) -> None:
    async with await Bus.connect(place.server.url, "somebody", signer=signer) as bus:
        for event in events:
            await publish(bus, event)


async def refusals(place: Place, count: int) -> list[Refusal]:
    await eventually(lambda: len(place.found(Rejected)) >= count)
    return [rejected.code for rejected in place.found(Rejected)]


async def test_the_operator_lets_a_producer_in_and_its_facts_carry_its_signature(place: Place, operator: Signer):
    yoco = Signer.generate()
    fact = failed("boom")
    async with arbitrator(place, signer=operator) as bus:
        await publish(bus, key_added(YOCO.source, yoco))
        await say(place, yoco, fact)
        await eventually(lambda: place.found(OrderFailed))
    with Reader.open(place.url) as reader:
        row = reader.by_event_id(fact.header.id)
        assert row is not None
        assert row.key_id == yoco.key_id
        assert verifies(yoco.public, row.raw, row.signature)
        assert verify(reader).identical


async def test_nobody_else_is_believed_and_each_refusal_says_why(place: Place, operator: Signer):
    yoco, stranger = Signer.generate(), Signer.generate()
    async with arbitrator(place, signer=operator) as bus:
        await publish(bus, key_added(YOCO.source, yoco))
        await say(place, None, failed("unsigned"))
        await say(place, stranger, failed("by a stranger"))
        await say(place, yoco, asked("yoco, as if it were the command line"))
        await say(place, yoco, failed("of another node", Origin(source="kite/yoco/n2", producer="yoco@0")))
        await say(place, yoco, key_added("kite/guard/n1", stranger))
        await say(place, operator, failed("by the operator, who asks and states nothing"))
        assert await refusals(place, 6) == [
            Refusal.UNSIGNED,
            Refusal.KEY_UNKNOWN,
            Refusal.NOT_OF_PRODUCER,
            Refusal.NOT_OF_PRODUCER,
            Refusal.NOT_OF_PRODUCER,
            Refusal.NOT_OF_PRODUCER,
        ]
        assert place.found(OrderFailed) == []
        assert len(place.found(ProducerKeyAdded)) == 1


async def test_a_forger_who_takes_an_id_first_does_not_keep_the_genuine_event_out(place: Place, operator: Signer):
    yoco = Signer.generate()
    genuine = failed("genuine")
    forged = Composed(genuine.header, genuine.raw.replace(b"genuine", b"forgery"))
    async with arbitrator(place, signer=operator) as bus:
        await publish(bus, key_added(YOCO.source, yoco))
        await say(place, None, forged)
        await say(place, yoco, genuine)
        (fact,) = await eventually(lambda: place.found(OrderFailed))
        assert fact.message == "genuine"
        assert await refusals(place, 1) == [Refusal.UNSIGNED]


async def test_windows_are_believed_of_their_own_node_only(place: Place, operator: Signer):
    yoco = Signer.generate()

    def window(seq: int, node: str, source: str = YOCO.source) -> Composed:
        data = Window(node=node, boot=BOOT, seq=seq, interval_us=100_000, sampled_us=1, emitted_us=1)
        return compose(f"node/{node}", data, Origin(source=source, producer="yoco@0"))

    async def comes(bus: Bus) -> bool:
        event = window(1, NODE)
        await bus.publish(tel_subject(NODE), event.raw, event.header.id)
        return bool(place.found(Window))

    async with arbitrator(place, signer=operator) as bus:
        await publish(bus, key_added(YOCO.source, yoco))
        await eventually(lambda: place.found(ProducerKeyAdded))
        async with await Bus.connect(place.server.url, "yoco", signer=yoco) as yoco_bus:
            await eventually(lambda: comes(yoco_bus))
            event = window(2, "n2")
            await yoco_bus.publish(tel_subject("n2"), event.raw, event.header.id)
        assert await refusals(place, 1) == [Refusal.NOT_OF_PRODUCER]


async def test_keys_outlive_the_arbitrator_and_demand_the_operators_key_of_the_next(place: Place, operator: Signer):
    yoco = Signer.generate()
    async with arbitrator(place, signer=operator) as bus:
        await publish(bus, key_added(YOCO.source, yoco))
        await eventually(lambda: place.found(ProducerKeyAdded))
    async with arbitrator(place):
        await say(place, yoco, failed("still known"))
        await eventually(lambda: place.found(OrderFailed))
    del place.more["operator_key"]
    with pytest.raises(ExceptionGroup) as refused:
        async with arbitrator(place):
            pass
    assert refused.group_contains(OperatorKeyMissing)


async def test_without_an_operator_nothing_has_to_be_signed_and_no_key_is_let_in(place: Place, operator: Signer):
    del place.more["operator_key"]
    async with arbitrator(place, signer=operator) as bus:
        await publish(bus, key_added(YOCO.source, Signer.generate()))
        await say(place, None, failed("unsigned"))
        await eventually(lambda: place.found(OrderFailed))
        assert await refusals(place, 1) == [Refusal.UNSIGNED]
        assert place.found(ProducerKeyAdded) == []


async def test_the_arbitrator_signs_the_end_of_the_ledger_as_it_grows_and_when_it_leaves(place: Place, tmp_path: Path):
    signer = new_key(tmp_path / "arbitrator.key")
    place.more |= {"signing_key": tmp_path / "arbitrator.key"}
    del place.more["operator_key"]
    async with arbitrator(place) as bus:
        await eventually(lambda: place.found(Tick))
        before = (await bus.stream(DEC)).last_seq
    async with await Bus.connect(place.server.url, "test") as bus:
        last = await bus.stream(DEC)
        assert last.last_seq == before + 1
        message = await bus.message(DEC, last.last_seq)
    assert message is not None
    assert message.subject == dec_subject(FLEET, FLEET, "checkpointed", "ledger/fleet")
    said = decode(message.payload).data
    assert isinstance(said, Checkpointed)
    with Reader.open(place.url) as reader:
        assert reader.head.pos == said.pos + 1
        row = reader.row(said.pos)
        assert row is not None
        assert row.hash.hex() == said.hash
        assert verify(reader).identical
    assert verifies(signer.public, sealed(said.ledger, said.pos, said.hash), bytes.fromhex(said.signature))


async def test_a_longer_ledger_is_signed_every_thousand_rows(place: Place, tmp_path: Path):
    new_key(tmp_path / "arbitrator.key")
    place.more |= {"signing_key": tmp_path / "arbitrator.key"}
    del place.more["operator_key"]
    async with arbitrator(place) as bus:
        for _ in range(500):
            await publish(bus, asked())
        await eventually(lambda: place.found(Checkpointed))
    (first, *_), (lease, *_) = place.found(Checkpointed), place.found(LeaseTaken)
    assert lease.epoch == 1
    assert 1_000 <= first.pos < 1_000 + 256 * 2 + SLACK_ROWS, "at most one transaction late"


async def test_served_without_its_key_file_it_ends_with_one_clear_error(place: Place):
    place.more["operator_key"] = Path("/nonexistent/operator.pub")
    async with served(place) as task:
        with pytest.raises(KeyFileMissing):
            await task
