"""What each member may do on the bus is what it does; everything else is refused by the server, or by a signature."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from kite.bus import DEC, EVT, TEL, Bus, BusForbidden, Outgoing, PublishFailed, dec_filters, dec_subject, tel_subject
from kite.bus.link import Link
from kite.bus.server import find_server
from kite.events import Composed, Origin, compose, new_id, publish
from kite.testing.eventually import eventually
from kite.trust import SIGNATURE, load_signer
from kite_cli.deploy.members import ARBITRATOR, NODE_SERVICES, OPERATOR, PROVISIONER, members
from kite_cli.deploy.testing import NODES, Deployment, made
from kite_schemas.guard import ComparisonFailed
from kite_schemas.policy import Change, ChangeRequested
from kite_schemas.upcycle import ChannelSampled
from kite_schemas.yoco import OrderFailed, State

FIRST, SECOND = NODES
WORKERS = tuple(f"{service}-{FIRST}" for service in NODE_SERVICES)
EVERYBODY = tuple(member.name for member in members((FIRST,)))
STREAMS = (EVT, DEC, TEL)

FACTS = {
    "upcycle": "kite.evt.v1.upcycle.instance.a.blend_loaded",
    "yoco": "kite.evt.v1.yoco.instance.a.instance_ready",
    "guard": "kite.evt.v1.guard.instance.a.compared",
}
REQUEST = "kite.evt.v1.policy.policy.fleet.change_requested"
INJECTION = "kite.evt.v1.upcycle.blend.b.injection_requested"
KEY_ADDED = "kite.evt.v1.ledger.ledger.fleet.producer_key_added"
DECISION = dec_subject("yoco", SECOND, "wake_ordered", "i")

SAYS = {
    PROVISIONER: (),
    ARBITRATOR: (DECISION, dec_subject("guard", "_", "expired", "x")),
    OPERATOR: (REQUEST, INJECTION, KEY_ADDED),
    f"upcycle-{FIRST}": (FACTS["upcycle"], f"kite.evt.v1.upcycle.node.{FIRST}.channel_sampled"),
    f"yoco-{FIRST}": (FACTS["yoco"], FACTS["upcycle"], tel_subject(FIRST)),
    f"guard-{FIRST}": (FACTS["guard"],),
}
ANYTHING = (
    *FACTS.values(),
    REQUEST,
    DECISION,
    dec_subject("guard", "_", "expired", "x"),
    KEY_ADDED,
    INJECTION,
    f"kite.evt.v1.upcycle.node.{FIRST}.channel_sampled",
    f"kite.evt.v1.upcycle.node.{SECOND}.channel_sampled",
    f"kite.evt.v1.yoco.node.{SECOND}.node_registered",
    tel_subject(FIRST),
    tel_subject(SECOND),
    "kite.evt.v1.unknown.a.b.c",
)


def test_the_server_takes_the_configuration(tmp_path: Path):
    directory = made(tmp_path)
    server = asyncio.run(find_server())
    done = subprocess.run([server, "-c", "nats.conf", "-t"], cwd=directory, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stderr


@pytest.mark.parametrize("name", EVERYBODY)
async def test_it_publishes_what_it_says_and_nothing_else(deployment: Deployment, name: str):
    async with await deployment.connect(name) as bus:
        for subject in ANYTHING:
            (outcome,) = await bus.publish_many([Outgoing(subject, b"{}", new_id())])
            if subject in SAYS[name]:
                assert not isinstance(outcome, PublishFailed), outcome
            else:
                assert isinstance(outcome, PublishFailed), f"{name} may publish on {subject}"
                assert "forbids" in str(outcome)
                assert "nats.conf" in outcome.hint


@pytest.mark.parametrize("name", EVERYBODY)
@pytest.mark.parametrize("stream", STREAMS)
async def test_it_changes_no_stream(deployment: Deployment, name: str, stream: str):
    config: dict[str, object] = {"name": stream, "subjects": ["x"]}
    requests: dict[str, dict[str, object]] = {
        f"STREAM.DELETE.{stream}": {},
        f"STREAM.PURGE.{stream}": {},
        f"STREAM.MSG.DELETE.{stream}": {"seq": 1},
        "STREAM.CREATE.OTHER": config,
        f"STREAM.SNAPSHOT.{stream}": {"deliver_subject": "x"},
        f"STREAM.RESTORE.{stream}": {"config": config},
        f"CONSUMER.DELETE.{stream}.upcycle-{SECOND}": {},
        f"CONSUMER.PAUSE.{stream}.upcycle-{SECOND}": {},
        f"CONSUMER.LIST.{stream}": {},
        "STREAM.LIST": {},
        "INFO": {},
        **({} if name == PROVISIONER else {f"STREAM.UPDATE.{stream}": config, f"STREAM.CREATE.{stream}": config}),
    }
    async with deployment.link(name) as link:
        for request, body in requests.items():
            with pytest.raises(BusForbidden):
                await link.api(request, body)


@pytest.mark.parametrize("name", EVERYBODY)
async def test_it_makes_no_consumer_but_its_own(deployment: Deployment, name: str):
    """A worker has one of its name, and reads of no other node; readers of whole streams read those alone."""
    durable = f"upcycle-{SECOND}"
    wanted = [f"{stream}.anything" for stream in STREAMS] + [f"{TEL}.x.{tel_subject(SECOND)}", f"{DEC}.{durable}"]
    reads = {ARBITRATOR: (EVT, TEL), OPERATOR: (EVT, DEC)}.get(name, ())
    async with deployment.link(name) as link:
        for one in wanted:
            stream, consumer, *rest = one.split(".")
            config = {"name": consumer, "filter_subject": ".".join(rest)}
            request = {"stream_name": stream, "config": config}
            if stream in reads and not rest:
                await link.api(f"CONSUMER.CREATE.{one}", request)
                continue
            with pytest.raises(BusForbidden):
                await link.api(f"CONSUMER.CREATE.{one}", request)
            with pytest.raises(BusForbidden):
                await link.api(f"CONSUMER.DURABLE.CREATE.{stream}.{consumer}", request)


async def test_upcycle_follows_the_windows_of_its_own_node_whatever_it_asks_for(deployment: Deployment):
    async with deployment.link(f"upcycle-{FIRST}") as link:
        for config in ({}, {"filter_subject": tel_subject(SECOND)}, {"filter_subjects": ["kite.tel.v1.>", "x"]}):
            body = {"stream_name": TEL, "config": {"name": "x", **config}}
            with pytest.raises(Exception, match="filter"):
                await link.api(f"CONSUMER.CREATE.{TEL}.x.{tel_subject(FIRST)}", body)


@pytest.mark.parametrize("name", EVERYBODY)
async def test_nobody_hears_what_is_answered_to_others(deployment: Deployment, name: str):
    heard: list[str] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg.subject)

    denied: list[str] = []
    other = f"guard-{SECOND}"
    public = deployment.login(other).inbox
    tried = (f"{public}.>", "_INBOX.>", "*.>", ">", "kite.>", "$JS.>", "$SYS.>")
    async with deployment.link(name) as link, await deployment.connect(other) as bus:
        link.guard(denied.append)
        for subject in tried:
            await link.listen(subject, hear)
        await eventually(lambda: len(denied) == len(tried))
        await bus.publish(FACTS["guard"], b"{}", new_id())
        await link.nc.flush()
    assert heard == []
    assert sorted(denied) == sorted(subject.lower() for subject in tried)


@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_takes_its_own_orders(deployment: Deployment, name: str):
    service = name.partition("-")[0]
    subject = dec_subject(service, FIRST, "something_ordered", "x")
    async with await deployment.connect(ARBITRATOR) as arbitrator, await deployment.connect(name) as bus:
        works = bus.work(DEC, name, dec_filters(service, FIRST))
        await arbitrator.publish(subject, b"order", new_id())
        work = await anext(works)
        assert work.message.payload == b"order"
        assert await work.ack()
        await works.aclose()


async def injected(link: Link, seq: int, to: str) -> None:
    """Have the server put a window into another stream, past all permissions: it answers to any subject."""
    await link.send(f"$JS.API.DIRECT.GET.{TEL}", json.dumps({"seq": seq}).encode(), reply=to)


async def test_a_decision_that_a_node_injects_is_carried_out_by_nobody(deployment: Deployment):
    """The worker does not believe it, also when somebody else's key signed it, and goes on."""
    name = f"yoco-{SECOND}"
    async with (
        deployment.link(f"yoco-{FIRST}") as forger,
        deployment.link(f"upcycle-{FIRST}") as accomplice,
        await deployment.connect(ARBITRATOR, signed_by=ARBITRATOR) as arbitrator,
        await deployment.connect(name, trusting=True) as bus,
    ):
        signature = load_signer(deployment.key(f"yoco-{FIRST}")).sign(b"forged").header
        await forger.nc.request(tel_subject(FIRST), b"unsigned")
        await forger.nc.request(tel_subject(FIRST), b"forged", headers={SIGNATURE: signature})
        await injected(accomplice, 1, DECISION)
        await injected(accomplice, 2, DECISION)
        await eventually(lambda: in_stream(arbitrator, DEC, 2))
        await arbitrator.publish(DECISION, b"genuine", new_id())
        works = bus.work(DEC, name, dec_filters("yoco", SECOND))
        work = await anext(works)
        assert work.message.payload == b"genuine"
        assert work.message.seq == 3, "the forged ones came first"
        assert await work.ack()
        await works.aclose()


async def test_without_a_key_to_trust_it_would_be_taken(deployment: Deployment):
    """What the signature is for: the permissions of the server (2.15.1) let it pass."""
    name = f"yoco-{SECOND}"
    async with (
        deployment.link(f"yoco-{FIRST}") as forger,
        deployment.link(f"upcycle-{FIRST}") as accomplice,
        await deployment.connect(name) as bus,
    ):
        await forger.nc.request(tel_subject(FIRST), b"forged")
        await injected(accomplice, 1, DECISION)
        works = bus.work(DEC, name, dec_filters("yoco", SECOND))
        assert (await anext(works)).message.payload == b"forged"
        await works.aclose()


async def test_what_a_consumer_is_made_to_send_elsewhere_reaches_no_worker(deployment: Deployment):
    """It keeps its subject in the other stream, where no worker asks for that; pushed, it reaches nobody at all."""
    async with (
        deployment.link(f"yoco-{FIRST}") as forger,
        deployment.link(f"upcycle-{FIRST}") as accomplice,
        await deployment.connect(ARBITRATOR) as arbitrator,
        await deployment.connect(OPERATOR) as reader,
    ):
        await forger.nc.request(tel_subject(FIRST), b"forged")
        for consumer, to in (("pushed", {"deliver_subject": DECISION}), ("pulled", {})):
            config = {"name": consumer, "filter_subject": tel_subject(FIRST), "ack_policy": "none", **to}
            body = {"stream_name": TEL, "config": config}
            await accomplice.api(f"CONSUMER.CREATE.{TEL}.{consumer}.{tel_subject(FIRST)}", body)
        await accomplice.send(f"$JS.API.CONSUMER.MSG.NEXT.{TEL}.pulled", b'{"batch": 1}', reply=DECISION)
        await eventually(lambda: in_stream(arbitrator, DEC, 1))
        await arbitrator.publish(DECISION, b"genuine", new_id())
        found = [await reader.message(DEC, seq) for seq in (1, 2)]
        assert [message and message.subject for message in found] == [tel_subject(FIRST), DECISION]
        assert (await reader.stream(DEC)).last_seq == 2


async def in_stream(bus: Bus, stream: str, count: int) -> bool:
    return (await bus.stream(stream)).last_seq >= count


def fact(service: str, node: str) -> Composed:
    """A fact of each service, about its own node's work."""
    origin = Origin(f"kite/{service}/{node}", f"{service}@0")
    order = {"order": new_id(), "attempt": 1, "done": True}
    match service:
        case "yoco":
            data = OrderFailed(instance="a", state=State.FAILED, stage="start", code="failed", message="x")
        case "guard":
            data = ComparisonFailed.model_validate(
                {**order, "request": new_id(), "first": "a", "second": "b", "code": "late", "message": ""}
            )
        case _:
            data = ChannelSampled(node=node, decay_ppm=None, kv_pollution_ppm=None, shifts=())
    return compose(f"node/{node}" if isinstance(data, ChannelSampled) else "instance/a", data, origin)


def asked() -> Composed:
    change = Change(key="arbitration.idle_tick_us", value=1_000_000)
    return compose("policy/fleet", ChangeRequested(actor="me", changes=(change,)), Origin("kite/cli/me", "cli@0"))


async def test_each_publishes_its_events_signed(deployment: Deployment):
    """As the services do, through `kite.events`: subjects of real types are among those that are granted."""
    for service in NODE_SERVICES:
        name = f"{service}-{FIRST}"
        async with await deployment.connect(name, signed_by=name) as bus:
            await publish(bus, fact(service, FIRST))
    async with await deployment.connect(OPERATOR, signed_by=OPERATOR) as bus:
        await publish(bus, asked())
        assert (await bus.stream(EVT)).last_seq == 4
