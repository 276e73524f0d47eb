"""What a person sees of YOCO: pools and their paths, how a drain and an order end, logs, sentences of a timeline."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from kite.errors import MissingPath
from kite_arbitrator.records import Instance, Passage, pool_subject
from kite_arbitrator.state import State, instance_id, put
from kite_arbitrator.testing import BASE, NODE, Story
from kite_cli import logs, pools
from kite_cli.asking.capacity import Handover, answers, rested
from kite_cli.asking.following import ANSWER_S, Fact, patience_s
from kite_cli.asking.following import Story as Asked
from kite_cli.embedded.readiness import settled
from kite_cli.health import judge, posts
from kite_cli.yoco import record
from kite_cli.yoco import tell as told
from kite_incident.lives import held
from kite_incident.timeline import detail, title
from kite_schemas.arbitration import Held
from kite_schemas.envelope import Event, Header
from kite_schemas.model import Data
from kite_schemas.policy import Pool
from kite_schemas.why import Candidate, Reason, RuleValue, Why
from kite_schemas.yoco import (
    Device,
    DrainRequested,
    EngineOffer,
    Found,
    InstanceChanged,
    Lack,
    NodeRegistered,
    OrderRefused,
    OrderRequested,
    PathOffer,
    SleepMode,
    Source,
)
from kite_schemas.yoco import Path as Way
from kite_schemas.yoco import State as Life

ID = "018f0000-0000-7000-8000-000000000000"
SECOND_US = 1_000_000
CPU = Device(id="cpu0", kind="cpu", memory_bytes=1)
OFFER = EngineOffer(
    kind="fake",
    version="1",
    modes=(SleepMode.PAUSED,),
    lacks=(Lack(mode=SleepMode.L1, reason="a CPU has no memory to free"),),
    paths=(
        PathOffer(path=Way.HOT, mode=SleepMode.PAUSED, expected_us=7_000, source=Source.PUBLISHED),
        PathOffer(path=Way.COLD, expected_us=55 * SECOND_US, source=Source.COMPUTED),
    ),
)


@pytest.fixture
def state() -> State:
    """A fleet of one ready instance and a standby, on a node that tells what its engine can do; nothing is counted."""
    state = structs.replace(Story().up().state, passages={})
    kind = pool_of(state).spec.kind
    return put(state, structs.replace(state.nodes[NODE], offers=(OFFER.model_copy(update={"kind": kind}),)))


def pool_of(state: State) -> Pool:
    assert state.policy is not None
    return state.policy.fleet.pools[0]


def passed(state: State, *took_ms: int, met: int = 0, missed: int = 0) -> State:
    took_us = tuple(ms * 1_000 for ms in took_ms)
    known = Passage(node=NODE, base=BASE, path=Way.HOT, ready=len(took_us), met=met, missed=missed, took_us=took_us)
    return put(state, known)


def with_pool(state: State, **fields: object) -> State:
    assert state.policy is not None
    pool = pool_of(state).model_copy(update=fields)
    fleet = state.policy.fleet.model_copy(update={"pools": (pool,)})
    return structs.replace(state, policy=state.policy.model_copy(update={"fleet": fleet}))


def event(data: Data, *, correlation: str | None = ID) -> Event:
    header = Header(
        id=ID,
        source="kite/test/1",
        type=data.TYPE,
        subject="instance/a",
        time="2026-01-01T00:00:00.000000Z",
        producer="test@0",
        correlationid=correlation,
    )
    return Event(header=header, data=data)


def one(state: State) -> dict[str, object]:
    (found,) = pools.records(state, pools.pools(state))
    return dict(found)


def test_a_pool_tells_what_its_paths_take_and_where_that_comes_from(state: State):
    hot, cold = pools.ways(passed(state, 20, 10, 30, met=2, missed=1), pool_of(state))
    assert (hot.path, hot.expected_us, hot.source) == (Way.HOT, 20_000, Source.MEASURED)
    assert (hot.p50_us, hot.p99_us, hot.on_time_ppm) == (20_000, 29_800, 666_666)
    assert (cold.path, cold.expected_us, cold.source) == (Way.COLD, 55 * SECOND_US, Source.COMPUTED)
    assert (cold.ready, cold.p50_us, cold.on_time_ppm) == (0, None, None)


def test_a_pool_tells_what_there_is_of_what_there_should_be(state: State):
    found = one(with_pool(state, prewarmed=1))
    assert found["wanted"] == {"ready": 1, "standbys": 1, "prewarmed": 1}
    assert found["found"] == {"ready": 1, "asleep": 1, "prewarmed": 0, "parked": 0, "under_way": 0, "failed": 0}
    assert (found["modes"], found["lacks"]) == (["paused"], {"l1": "a CPU has no memory to free"})
    assert list(pools.notes(state, pools.pools(state))) == [
        f"{BASE} on {NODE} cannot sleep by l1: a CPU has no memory to free"
    ]


def test_when_the_next_prewarm_is_due(state: State):
    pool = pool_of(with_pool(state, prewarmed=1))
    last = structs.replace(state, prewarmed_us={pool_subject(NODE, BASE): state.now_us - 30 * SECOND_US})
    assert pools.prewarm(last, pool).due_us == 90 * SECOND_US
    assert pools.prewarm(last, pool.model_copy(update={"critical": True})).due_us == 60 * SECOND_US
    assert pools.prewarm(state, pool).due_us == 0
    (cells,) = pools.rows(with_pool(last, prewarmed=1), [pool])
    assert cells[-1] == "every 2 min 0 s, next in 1 min 30 s"
    blocked = structs.replace(state, blocks={NODE: state.now_us - SECOND_US})
    assert pools.prewarm(blocked, pool).blocked == f"prewarm_blocked for 1.0 s: {NODE} sheds"


def test_a_live_view_is_drawn_again_for_news_only(state: State):
    def seen(state: State) -> object:
        return pools.signature(state, pools.pools(state))

    kept = with_pool(structs.replace(state, prewarmed_us={pool_subject(NODE, BASE): state.now_us}), prewarmed=1)
    assert seen(kept) == seen(structs.replace(kept, now_us=kept.now_us + SECOND_US))
    assert seen(kept) != seen(structs.replace(kept, now_us=kept.now_us + 200 * SECOND_US))
    assert seen(kept) != seen(passed(kept, 20))


def test_a_fleet_with_spares_is_settled_when_they_are_prewarmed(state: State):
    kept = with_pool(state, prewarmed=1)
    pool = pool_of(kept)
    spare = Instance(id=instance_id(pool, 2), node=NODE, base=BASE, device="cpu0", standby=True, state=Life.STARTING)
    assert [where for _, where in posts(pool)] == [Life.READY, Life.ASLEEP, Life.PREWARMED]
    assert not settled(put(kept, spare), pool, 0)
    there = put(kept, structs.replace(spare, state=Life.PREWARMED))
    assert settled(there, pool, 0)
    assert judge(there, 0) == ("healthy", "1 ready, 1 asleep, 1 prewarmed of 3 instances, 0 blends")


def test_what_somebody_drained_is_parked_and_no_illness(state: State):
    first = state.instances[instance_id(pool_of(state), 0)]
    parked = put(state, structs.replace(first, state=Life.ASLEEP, parked=True, mode=SleepMode.PAUSED, path=Way.COLD))
    found = record(parked.instances[first.id], parked)
    assert (found["state"], found["mode"], found["parked"], found["last_path"]) == ("asleep", "paused", True, "cold")
    assert judge(parked, 0)[0] == "healthy"
    assert f"`kite yoco order {BASE} --instance {first.id}`" in list(pools.notes(parked, pools.pools(parked)))[-1]


def changed(instance: str, to: Life, *, done: bool = True) -> InstanceChanged:
    return InstanceChanged(
        instance=instance, node="n", from_state=Life.READY, to_state=to, code="x", duration_us=1, done=done
    )


def no(reason: Reason, request: str | None = None) -> Held:
    return Held(why=Why(reason=reason), detail="", request=request)


def test_a_drain_ends_with_sleep_or_with_what_is_in_its_way():
    last = rested("a")
    assert not last(event(changed("a", Life.DRAINING)))
    assert not last(event(changed("b", Life.ASLEEP)))
    assert last(event(changed("a", Life.ASLEEP)))
    assert last(event(no(Reason.LAST_INSTANCE, ID)))
    assert last(event(no(Reason.MODE_UNSUPPORTED)))
    assert not last(event(no(Reason.PREWARM_RECENT)))


def test_an_order_goes_on_when_a_worker_would_be_late():
    refused = OrderRefused(instance="a", code="deadline_unreachable", message="", done=True)
    assert not answers(event(refused))
    assert answers(event(refused.model_copy(update={"code": "wrong_state"})))
    assert answers(event(no(Reason.DEADLINE_UNREACHABLE, ID)))


def test_a_deadline_that_nothing_meets_says_what_would(capsys: pytest.CaptureFixture[str]):
    rule = RuleValue(id="yoco.deadline_us", value=2_000_400, threshold=417_000, margin=1, fired=True)
    why_not = Held(why=Why(reason=Reason.DEADLINE_UNREACHABLE, rules=(rule,)), detail="a is the fastest", request=ID)
    story = Asked(ID, "trace", (Fact(1, 1, event(why_not)),))
    ended = Handover(story, None, 0, 0, "deadline_unreachable", "a is the fastest")
    assert ended.expected_us == 2_000_400
    told(ended)
    said = capsys.readouterr().err
    assert said.startswith("error: not done (deadline_unreachable): a is the fastest\n")
    assert "`--deadline 2001` allows that, `--late` takes the fastest" in said


def test_a_start_may_be_silent_as_long_as_it_lives():
    story = Story().begin()
    start = next(row.data for row in story.register() if row.type == "kite.yoco.start_ordered.v1")
    assert start is not None
    assert patience_s(event(start), 1.0) == getattr(start, "ttl_us", 0) / SECOND_US + ANSWER_S
    assert patience_s(event(changed("a", Life.STARTING)), 1.0) == 1.0


def test_the_sentences_of_a_life():
    found = Found(instance="a", pid=1, state=Life.ASLEEP, endpoint="http://127.0.0.1:1", mode=SleepMode.PAUSED)
    node = NodeRegistered(node="n", boot=ID, devices=(CPU,), memory_bytes=1, sleep_modes=(), instances=(found,))
    assert detail(node) == "adopted a (paused)"
    asked = OrderRequested(actor="me", base="tiny", deadline_us=SECOND_US, late=True)
    assert title(event(asked).header, asked) == "order one more tiny within 1.0 s, or late"
    drain = DrainRequested(actor="me", instance="a", force=True)
    assert title(event(drain).header, drain) == "drain a, even if it is the last"
    rule = RuleValue(id="yoco.deadline_us", value=55 * SECOND_US, threshold=417_000, margin=1, fired=True)
    best = Candidate(id="a", chosen=False, reason=Reason.DEADLINE_UNREACHABLE)
    late = Held(why=Why(reason=Reason.DEADLINE_UNREACHABLE, rules=(rule,), candidates=(best,)), detail="")
    assert held(late) == "not done: the fastest, a, takes 55.0 s, the deadline is 417 ms"


# --- logs


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a log of an embedded fleet."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / logs.LOGS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_end_of_a_log_and_of_the_one_before(folder: Callable[[str, str], Path], tmp_path: Path):
    folder("a.log", "1\n2\n3\n")
    folder("a.former.log", "died\n")
    assert logs.last(logs.find(tmp_path, "a", former=False), 2) == ["2", "3"]
    assert logs.last(logs.find(tmp_path, "a", former=True), 2) == ["died"]
    assert logs.last(logs.find(tmp_path, "a", former=False), 0) == []


def test_a_log_that_is_not_there_says_which_are(folder: Callable[[str, str], Path], tmp_path: Path):
    with pytest.raises(MissingPath):
        logs.find(tmp_path, "a", former=False)
    folder("a.log", "")
    for name in ("b", "../logs/a"):
        with pytest.raises(logs.NoLog) as error:
            logs.find(tmp_path, name, former=False)
        assert error.value.known == ["a"]
    with pytest.raises(logs.NoLog) as error:
        logs.find(tmp_path, "a", former=True)
    assert error.value.hint == "there are logs of: none"


def test_a_log_is_followed_into_the_next_process(folder: Callable[[str, str], Path]):
    log = folder("a.log", "before\n")
    lines = logs.added(log)
    with log.open("a", encoding="utf-8") as stream:
        stream.write("one\n")
    assert next(lines) == "one"
    log.rename(log.with_suffix(".former.log"))
    folder("a.log", "anew\n")
    assert next(lines) == "anew"
