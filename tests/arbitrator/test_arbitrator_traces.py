"""What is decided later than it was asked for is still a part of the request's trace."""

import secrets

from kite.events import Origin, compose
from kite.trust import Keyring
from kite_arbitrator.batch import TRACES_MAX, Batch, Traces
from kite_arbitrator.testing import BASE, Story
from kite_schemas.arbitration import Discarded
from kite_schemas.ledger import Tick
from kite_schemas.model import Data
from kite_schemas.yoco import OrderRequested, WakeOrdered

ORIGIN = Origin("kite/arbitrator/leader", "arbitrator@test")
WINDOW_US = 10_000_000


def batch(fleet: Story, at_us: int, traces: Traces) -> Batch:
    return Batch(fleet.state, lambda last_us: max(last_us + 1, at_us), ORIGIN, 1, Keyring(None), {}, traces)


def test_a_wake_that_was_put_off_belongs_to_the_trace_of_its_request():
    fleet, traces, trace_id = Story().up(), Traces(), secrets.token_hex(16)
    fleet.amend({"arbitration.switch_window_us": WINDOW_US})
    request: Data = OrderRequested(actor="me", base=BASE)
    asked = compose(f"base/{BASE}", request, ORIGIN, traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01")
    first = batch(fleet, fleet.now_us + 1_000, traces)
    first.put(asked, request)
    assert [draft.type for draft in first.drafts][1:] == [Discarded.TYPE]
    fleet.state = first.state
    later = batch(fleet, fleet.now_us + WINDOW_US, traces)
    later.write(Tick())
    (woken,) = [draft for draft in later.drafts if draft.type == WakeOrdered.TYPE]
    assert woken.trace_id == trace_id


def test_only_the_last_requests_are_remembered():
    traces = Traces()
    header = compose("base/x", OrderRequested(actor="me", base="x"), ORIGIN).header
    for number in range(TRACES_MAX + 1):
        traces.keep(header.model_copy(update={"id": str(number), "traceparent": f"00-{number:032x}-{1:016x}-01"}))
    assert len(traces) == TRACES_MAX
    assert "0" not in traces
