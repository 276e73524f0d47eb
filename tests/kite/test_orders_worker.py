"""A worker on a real bus: each order once, in its lane, in its time, and its end told whatever happens."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kite import clock, tracing
from kite.bus import DEC, Bus, dec_filters, dec_subject
from kite.errors import KiteError
from kite.events import Composed, Origin, new_id
from kite.orders import ATTEMPTS_MAX, GRACE_US, Emit, Journal, Received, State, Task, Tasks, Worker, stage
from kite.orders.report import fact_id
from kite.testing.bus import bus
from kite.testing.eventually import eventually
from kite.testing.orders import ASKED, TTL_US, Said, expire, facts, give, ordered, relay, stop_order
from kite.testing.otlp import Receiver
from kite_schemas.arbitration import Held
from kite_schemas.upcycle import AdapterRef, AdapterRefused, Violation
from kite_schemas.why import Outcome
from kite_schemas.yoco import InstanceChanged, OrderFailed, StopOrdered
from kite_schemas.yoco import State as Life

ORIGIN = Origin(source="kite/yoco/n1", producer="yoco@test")
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ACK_WAIT_S = 1.0
REDELIVERY_S = 3.0  # an order that is not renewed has come again by then


class EngineBroken(KiteError):
    code = "engine_broken"


def changed(received: Received[StopOrdered], to: Life) -> InstanceChanged:
    return InstanceChanged(
        instance=received.data.instance,
        node=received.data.node,
        from_state=Life.READY,
        to_state=to,
        code="asked",
        duration_us=1,
    )


def failed(received: Received[StopOrdered], at: str, code: str, message: str) -> Outcome:
    return OrderFailed(instance=received.data.instance, state=Life.FAILED, stage=at, code=code, message=message)


@dataclass
class Engine:
    """What the handler acts on: it holds every stop until `gate` opens, and remembers who came."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])
    attempts: list[int] = field(default_factory=list[int])

    async def stop(self, received: Received[StopOrdered], emit: Emit) -> Outcome:
        self.begun.append(received.data.instance)
        self.attempts.append(received.attempt)
        stage("draining")
        await emit(changed(received, Life.DRAINING))
        await self.gate.wait()
        self.ended.append(received.data.instance)
        return changed(received, Life.ABSENT)

    @property
    def tasks(self) -> Tasks:
        return {StopOrdered: Task(self.stop, failed)}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncGenerator[Bus]:
    async with bus(tmp_path) as connected:
        yield connected


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.sqlite"


@pytest.fixture
def engine() -> Engine:
    ready = Engine()
    ready.gate.set()
    return ready


def worker_of(client: Bus, path: Path, tasks: Tasks, *, ack_wait_s: float = 30.0, renew_s: float = 10.0) -> Worker:
    return Worker(
        bus=client,
        origin=ORIGIN,
        service="yoco",
        node="n1",
        journal=path,
        handlers=tasks,
        ack_wait_s=ack_wait_s,
        renew_s=renew_s,
    )


@asynccontextmanager
async def working(worker: Worker) -> AsyncGenerator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def stop(client: Bus, instance: str, *, node: str = "n1", ttl_us: int = TTL_US) -> Composed:
    return await give(client, "yoco", stop_order(instance, node=node, ttl_us=ttl_us), f"instance/{instance}")


async def ends(client: Bus, count: int) -> list[Said]:
    """Wait for `count` last facts of orders."""

    async def enough() -> list[Said]:
        last = [said for said in await facts(client) if isinstance(said.event.data, Outcome) and said.event.data.done]
        return last if len(last) >= count else []

    return await eventually(enough)


def failure(said: Said) -> OrderFailed:
    assert isinstance(said.event.data, OrderFailed)
    return said.event.data


async def test_an_order_runs_once_and_its_facts_say_where_they_come_from(
    client: Bus, path: Path, engine: Engine
) -> None:
    order = ordered(stop_order("a"), "instance/a", traceparent=CALLER)
    async with working(worker_of(client, path, engine.tasks)):
        await relay(client, "yoco", order)
        await ends(client, 1)
    first, last = await facts(client)
    assert [first.event.header.id, last.event.header.id] == [
        fact_id(order.header.id, "1", 1),
        fact_id(order.header.id, "done", 1),
    ]
    for said, done, to in ((first, False, Life.DRAINING), (last, True, Life.ABSENT)):
        header, data = said.event.header, said.event.data
        assert isinstance(data, InstanceChanged)
        assert (data.order, data.attempt, data.done, data.to_state) == (order.header.id, 1, done, to)
        assert (header.causationid, header.correlationid) == (order.header.id, order.header.correlationid)
        assert (header.subject, header.source, header.producer) == ("instance/a", ORIGIN.source, ORIGIN.producer)
        assert header.traceparent == CALLER, "without a collector the trace goes on unchanged"
    with Journal.open(path) as journal:
        entry = journal.find(order.header.id)
    assert entry
    assert (entry.state, entry.outcome) == (State.DONE, last.raw)
    assert engine.ended == ["a"]


async def test_a_fleet_wide_order_is_taken_and_another_nodes_is_not(client: Bus, path: Path, engine: Engine) -> None:
    async with working(worker_of(client, path, engine.tasks)):
        await stop(client, "other", node="n2")
        fleet = ordered(stop_order("mine"), "instance/mine")
        await client.publish(dec_subject("yoco", "_", "stop_ordered", "instance/mine"), fleet.raw, fleet.header.id)
        await ends(client, 1)
    assert engine.ended == ["mine"]


async def test_a_done_order_that_comes_again_is_answered_with_the_same_bytes(
    client: Bus, path: Path, tmp_path: Path, engine: Engine
) -> None:
    async with working(worker_of(client, path, engine.tasks)):
        order = await stop(client, "a")
        (said,) = await ends(client, 1)
        with capture_logs() as logs:
            await relay(client, "yoco", order, msg_id=new_id())
            await eventually(lambda: [line for line in logs if line.get("step") == "republish"])
            await stop(client, "b")
            await ends(client, 2)
    assert len(await facts(client)) == 4, "the bus knows the id and stores it once"
    async with bus(tmp_path / "another") as elsewhere, working(worker_of(elsewhere, path, engine.tasks)):
        await relay(elsewhere, "yoco", order)
        (again,) = await ends(elsewhere, 1)
    assert again.raw == said.raw
    assert engine.ended == ["a", "b"]


async def test_orders_of_one_target_wait_for_each_other_and_others_do_not(client: Bus, path: Path) -> None:
    engine = Engine()
    async with working(worker_of(client, path, engine.tasks)):
        for instance in ("a", "a", "b", "a"):
            await stop(client, instance)
        await eventually(lambda: len(engine.begun) == 2)
        assert engine.begun == ["a", "b"]
        engine.gate.set()
        await ends(client, 4)
    assert engine.begun == ["a", "b", "a", "a"]


@pytest.mark.parametrize(("renew_s", "again"), [(0.2, False), (60.0, True)])
async def test_an_order_in_hand_is_not_delivered_again_while_it_is_renewed(
    client: Bus, path: Path, renew_s: float, again: bool
) -> None:
    engine = Engine()
    async with working(worker_of(client, path, engine.tasks, ack_wait_s=ACK_WAIT_S, renew_s=renew_s)):
        await stop(client, "a")
        await stop(client, "a")
        await eventually(lambda: engine.begun)
        with capture_logs() as logs:
            rival = client.work(DEC, "yoco-n1", dec_filters("yoco", "n1"), ack_wait_s=ACK_WAIT_S)
            async with aclosing(rival) as deliveries:
                seen = None
                with suppress(TimeoutError):
                    async with asyncio.timeout(REDELIVERY_S):
                        seen = await anext(deliveries)
        assert (seen is not None) == again, logs
        engine.gate.set()
        await ends(client, 2)
    assert engine.ended == ["a", "a"]


async def test_an_order_that_comes_again_while_in_hand_runs_once(client: Bus, path: Path) -> None:
    engine = Engine()
    async with working(worker_of(client, path, engine.tasks)):
        order = await stop(client, "a")
        await eventually(lambda: engine.begun)
        await relay(client, "yoco", order, msg_id=new_id())
        await stop(client, "b")
        await eventually(lambda: len(engine.begun) == 2)
        engine.gate.set()
        await ends(client, 2)
    assert engine.begun == ["a", "b"]


async def test_the_redelivery_of_an_order_that_was_resumed_is_only_answered(client: Bus, path: Path) -> None:
    engine = Engine()
    with capture_logs() as logs:
        async with working(worker_of(client, path, engine.tasks, ack_wait_s=ACK_WAIT_S)):
            await stop(client, "a")
            await eventually(lambda: engine.begun)
        engine.gate.set()
        async with working(worker_of(client, path, engine.tasks, ack_wait_s=ACK_WAIT_S)):
            await eventually(lambda: [line for line in logs if line.get("step") == "republish"])
            rival = client.work(DEC, "yoco-n1", dec_filters("yoco", "n1"), ack_wait_s=ACK_WAIT_S)
            async with aclosing(rival) as deliveries:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(REDELIVERY_S):
                        await anext(deliveries)
    assert (engine.attempts, engine.ended) == ([1, 2], ["a"])
    assert [line["step"] for line in logs if line["event"] == "order_taken"] == ["begin", "resume", "republish"]


async def test_a_handler_that_takes_longer_than_its_order_may_is_stopped_and_the_failure_told(
    client: Bus, path: Path
) -> None:
    engine = Engine()
    async with working(worker_of(client, path, engine.tasks)):
        await stop(client, "a", ttl_us=100_000)
        (said,) = await ends(client, 1)
    assert (failure(said).stage, failure(said).code) == ("draining", "timeout")
    assert (engine.begun, engine.ended) == (["a"], [])


async def test_an_expired_order_is_stopped_and_one_that_waits_is_never_begun(client: Bus, path: Path) -> None:
    engine = Engine()
    async with working(worker_of(client, path, engine.tasks)):
        under_way, waiting = await stop(client, "a"), await stop(client, "a")
        await eventually(lambda: engine.begun)
        await expire(client, "yoco", waiting)
        await expire(client, "yoco", under_way)
        (said,) = await ends(client, 1)
        assert (failure(said).order, failure(said).code) == (under_way.header.id, "expired")
        await relay(client, "yoco", waiting, msg_id=new_id())
        engine.gate.set()
        await stop(client, "a")
        await ends(client, 2)
    assert (engine.begun, engine.ended) == (["a", "a"], ["a"])


async def test_a_kite_error_becomes_the_failure_of_the_order_and_the_worker_goes_on(client: Bus, path: Path) -> None:
    async def refuse(received: Received[StopOrdered], _emit: Emit) -> Outcome:
        stage("asking")
        if received.data.instance == "bad":
            raise EngineBroken("it does not answer " + "x" * 3_000)
        return changed(received, Life.ABSENT)

    async with working(worker_of(client, path, {StopOrdered: Task(refuse, failed)})):
        await stop(client, "bad")
        await stop(client, "good")
        said = {said.event.header.subject: said for said in await ends(client, 2)}
    bad = failure(said["instance/bad"])
    assert (bad.stage, bad.code, bad.attempt, bad.done) == ("asking", "engine_broken", 1, True)
    assert bad.message.startswith("it does not answer x")
    assert isinstance(said["instance/good"].event.data, InstanceChanged)


async def test_any_other_error_ends_the_worker_and_the_next_one_tries_again(
    client: Bus, path: Path, engine: Engine
) -> None:
    async def stumble(_received: Received[StopOrdered], _emit: Emit) -> Outcome:
        raise ZeroDivisionError

    await stop(client, "a")
    with pytest.raises(ZeroDivisionError):
        await worker_of(client, path, {StopOrdered: Task(stumble, failed)}).run()
    assert await facts(client) == []
    async with working(worker_of(client, path, engine.tasks)):
        (said,) = await ends(client, 1)
    assert isinstance(said.event.data, InstanceChanged)
    assert (said.event.data.attempt, engine.attempts) == (2, [2])


async def test_a_timeout_of_the_handlers_own_is_its_bug(client: Bus, path: Path) -> None:
    async def stumble(_received: Received[StopOrdered], _emit: Emit) -> Outcome:
        raise TimeoutError

    await stop(client, "a")
    with pytest.raises(TimeoutError):
        await worker_of(client, path, {StopOrdered: Task(stumble, failed)}).run()


@pytest.mark.parametrize(
    ("attempts", "ttl_us", "code"), [(ATTEMPTS_MAX, TTL_US, "attempts_exhausted"), (1, 0, "timeout")]
)
async def test_an_order_that_is_not_tried_again_still_gets_its_failure(
    client: Bus, path: Path, *, attempts: int, ttl_us: int, code: str
) -> None:
    engine = Engine()
    order = ordered(stop_order("a", ttl_us=ttl_us), "instance/a")
    with Journal.open(path) as journal:
        for _ in range(attempts):
            journal.begin(order.header.id, "instance/a", order.raw, clock.wall_us() - 2 * GRACE_US)
    async with working(worker_of(client, path, engine.tasks)):
        (said,) = await ends(client, 1)
    assert (failure(said).code, failure(said).attempt, engine.begun) == (code, attempts, [])


async def test_what_is_no_order_of_this_worker_is_passed_over(client: Bus, path: Path, engine: Engine) -> None:
    subject = dec_subject("yoco", "n1", "x", "y")
    held = ordered(Held(detail="", why=ASKED), "base/b")
    unknown = held.raw.replace(b"arbitration.held", b"future.thing_ordered")
    with capture_logs() as logs:
        async with working(worker_of(client, path, engine.tasks)):
            for payload in (b"\xff not an event", b"{}", held.raw, unknown):
                await client.publish(subject, payload, new_id())
            await stop(client, "a")
            await ends(client, 1)
        async with working(worker_of(client, path, {})):
            await stop(client, "b")
            await eventually(lambda: [line for line in logs if line.get("reason", "").startswith("no handler")])
    assert len([line for line in logs if line["event"] == "order_unknown"]) == 5
    assert len(await ends(client, 1)) == 1


async def test_an_outcome_too_large_for_the_bus_is_told_as_a_failure(client: Bus, path: Path) -> None:
    text = "\N{HIGH VOLTAGE SIGN}" * 2_000

    async def refuse(_received: Received[StopOrdered], _emit: Emit) -> Outcome:
        broken = Violation(code="c", where=text, expected=text, found=text)
        adapter = AdapterRef(name="a", path="a", digest="0" * 64)
        return AdapterRefused(request=new_id(), adapter=adapter, violations=(broken,) * 64, total=64, duration_us=1)

    async with working(worker_of(client, path, {StopOrdered: Task(refuse, failed)})):
        await stop(client, "a")
        (said,) = await ends(client, 1)
    assert failure(said).code == "outcome_too_large"


async def test_a_service_may_name_what_an_outcome_is_about_and_say_what_nobody_ordered(
    client: Bus, path: Path, engine: Engine
) -> None:
    worker = Worker(
        bus=client,
        origin=ORIGIN,
        service="yoco",
        node="n1",
        journal=path,
        handlers=engine.tasks,
        subject_of=lambda outcome: f"node/{outcome.TYPE.split('.')[1]}",
    )
    with tracing.span("boot", parent=CALLER):
        received = Received(new_id(), 1, stop_order("a"), ordered(stop_order("a"), "instance/a").header, 0)
        await worker.publish("instance/a", changed(received, Life.FAILED), correlation=received.id)
    async with working(worker):
        await stop(client, "a")
        await ends(client, 1)
    own, _, last = await facts(client)
    assert (own.event.header.subject, own.event.header.correlationid) == ("instance/a", received.id)
    assert (own.event.header.traceparent, own.event.header.causationid) == (CALLER, None)
    assert last.event.header.subject == "node/yoco"


async def test_an_order_is_one_span_below_its_cause_and_above_its_facts(
    client: Bus, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(received: Received[StopOrdered], _emit: Emit) -> Outcome:
        with tracing.span("look"):
            if received.data.instance == "bad":
                raise EngineBroken("gone")
        return changed(received, Life.ABSENT)

    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing.start("yoco")
        with tracing.span("decide") as root:
            orders = [ordered(stop_order(name), "instance/a", traceparent=root.traceparent) for name in ("a", "bad")]
        async with working(worker_of(client, path, {StopOrdered: Task(look, failed)})):
            for order in orders:
                await relay(client, "yoco", order)
            said = await ends(client, 2)
        await asyncio.to_thread(tracing.stop)
        tree = receiver.tree(root.trace_id)
    spans = {span.attributes["kite.order.id"]: span for span in tree.walk() if span.kind == "consumer"}
    good, bad = (spans[order.header.id] for order in orders)
    assert good.name == "process kite.dec.v1.yoco.n1"
    assert good.parent_id == tree.span.span_id == good.links[0]
    assert good.attributes["kite.event.type"] == "kite.yoco.stop_ordered.v1"
    assert (good.attributes["kite.stream"], good.attributes["kite.attempt"]) == ("KITE_DEC", 1)
    assert (good.failed, bad.failed, bad.error) == (False, True, "engine_broken")
    assert sorted(span.parent_id for span in tree.walk() if span.name == "look") == sorted([good.span_id, bad.span_id])
    assert {str(fact.event.header.traceparent)[36:52] for fact in said} == {good.span_id, bad.span_id}
