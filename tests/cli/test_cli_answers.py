"""What ends a request for an order: its outcome, or a decision that answers it, and nothing that is held in passing."""

import pytest

from kite.clock import iso
from kite.events import new_id
from kite_cli.asking.following import Fact, Story
from kite_cli.asking.request import closes, obstacle
from kite_schemas.arbitration import Discarded, Held, OrderExpired
from kite_schemas.envelope import Event, Header
from kite_schemas.model import Data
from kite_schemas.why import Reason, Why
from kite_schemas.yoco import InstanceReady, OrderFailed, Path, State, WakeOrdered

REQUEST, ORDER = new_id(), new_id()


def event(data: Data) -> Event:
    header = Header(
        id=new_id(),
        source="kite/test/1",
        type=data.TYPE,
        subject="base/tiny",
        time=iso(0),
        producer="test@0",
        correlationid=REQUEST,
    )
    return Event(header=header, data=data)


def held(reason: Reason, request: str | None) -> Held:
    return Held(detail="none is free", request=request, why=Why(reason=reason))


def discarded(request: str) -> Discarded:
    why = Why(reason=Reason.JITTER)
    return Discarded(decision=WakeOrdered.TYPE, target="instance/a", request=request, why=why)


FAILED = OrderFailed(
    order=ORDER, done=True, instance="a", state=State.FAILED, stage="wake", code="dead", message="it died"
)
READY = InstanceReady(
    order=ORDER,
    done=True,
    instance="a",
    node="n",
    path=Path.HOT,
    pid=1,
    endpoint="http://127.0.0.1:1",
    versions=(),
    noise_micronats=0,
    t_wake_us=1,
    t_first_token_us=2,
)
EXPIRED = OrderExpired(
    order=ORDER, service="yoco", kind="wake", target="instance/a", node="n", why=Why(reason=Reason.EXPIRED)
)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (held(Reason.NO_STANDBY, REQUEST), ("no_standby", "none is free")),
        (FAILED, ("dead", "it died")),
        (EXPIRED, ("expired", "wake for instance/a expired")),
        (READY, ("", "")),
    ],
    ids=["held", "failed", "expired", "ready"],
)
def test_an_answer_ends_the_request_and_says_why(data: Data, said: tuple[str, str]):
    answer = event(data)
    assert closes(answer)
    assert obstacle(Story(REQUEST, "", (Fact(1, 1, answer),))) == said


@pytest.mark.parametrize(
    "data",
    [held(Reason.NO_STANDBY, None), discarded(REQUEST), READY.model_copy(update={"done": False})],
    ids=["held in passing", "put off", "a step"],
)
def test_what_comes_by_the_way_ends_nothing(data: Data):
    assert not closes(event(data))
