"""What load brings about, told: a line for each decision, why it was taken or not, and no window told one by one."""

import doctest
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from kite.ledger import Draft, Ledger, Reader
from kite.ledger import Row as LedgerRow
from kite_arbitrator.records import Row
from kite_arbitrator.testing import BASE, LEDGER, NODE, Story
from kite_incident import gaps, timeline, units
from kite_incident.explain import explain
from kite_incident.refusals import NothingSkipped, why_not
from kite_incident.testing import record
from kite_schemas.arbitration import (
    Channel,
    ChannelSelected,
    Discarded,
    GapAcknowledged,
    Held,
    Mode,
    ModeChanged,
    PressureChanged,
    Transport,
    TransportChanged,
)
from kite_schemas.ledger import BusGap, DeadlineMissed, Tick
from kite_schemas.model import Data
from kite_schemas.telemetry import DeviceWindow, InstanceWindow, NodeFound, NodeLost, Window
from kite_schemas.upcycle import ChannelSampled as UpcycleSampled
from kite_schemas.upcycle import DecaySet, Ending, InjectionClosed
from kite_schemas.why import Candidate, InputAge, Reason, Why
from kite_schemas.yoco import ChannelSampled, DrainOrdered, PrewarmBlocked, PrewarmReleased, SleepOrdered, WakeOrdered

BLEND = "risk"


def because(reason: Reason, *candidates: Candidate, causes: tuple[int, ...] = (1,), inputs: tuple[InputAge, ...] = ()):
    return Why(reason=reason, candidates=candidates, causes=causes, inputs=inputs)


def window(seq: int = 7, **fields: object) -> Window:
    told = {"node": NODE, "boot": LEDGER, "seq": seq, "interval_us": 100_000, "sampled_us": 0, "emitted_us": 0}
    return Window.model_validate({**told, **fields})


SELECTED = ChannelSelected(blend=BLEND, channel=Channel.YOCO, why=because(Reason.LIMIT_CROSSED))
BLOCKED = PrewarmBlocked(node=NODE, why=because(Reason.SHEDDING))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (SELECTED, "risk on the yoco channel: limit_crossed"),
        (
            PressureChanged(node=NODE, base=BASE, on=True, lasted_us=5_100_000, why=because(Reason.SUSTAINED)),
            "tiny on n1 under pressure, above its limit for 5.1 s",
        ),
        (
            PressureChanged(node=NODE, base=BASE, on=False, lasted_us=75_000_000, why=because(Reason.CALM)),
            "tiny on n1 out of pressure after 1 min 15 s: calm",
        ),
        (
            DecaySet(base=BASE, decay_ppm=710_000, why=because(Reason.PRESSURE)),
            "weight decay of tiny 71 %: pressure",
        ),
        (BLOCKED, "prewarms of n1 blocked: shedding"),
        (
            PrewarmReleased(node=NODE, lasted_us=417_000, why=because(Reason.CALM)),
            "prewarms of n1 released after 417 ms",
        ),
        (
            TransportChanged(node=NODE, boot=LEDGER, transport=Transport.RELIABLE, why=because(Reason.LOSS)),
            "windows of n1 on reliable transport: loss",
        ),
        (ModeChanged(mode=Mode.DEGRADED, why=because(Reason.GAP)), "mode degraded: gap"),
        (NodeLost(node=NODE, silence_us=5_000_000, why=because(Reason.SILENT)), "n1 lost: silent for 5.0 s"),
        (NodeFound(node=NODE, silence_us=9_000_000, why=because(Reason.HEARD)), "n1 heard again after 9.0 s"),
        (
            Discarded(decision=SleepOrdered.TYPE, target="instance/a", why=because(Reason.JITTER)),
            "discarded: sleep_ordered of instance/a too soon after its opposite",
        ),
        (DeadlineMissed(first=3, last=4, took_us=41_000, deadline_us=17_000), "decided after 41 ms, deadline 17 ms"),
        (BusGap(stream="KITE_EVT", first=8, last=10), "3 messages of KITE_EVT lost"),
        (ChannelSampled(node=NODE, instances=3), "nothing is known"),
        (
            ChannelSampled(node=NODE, instances=3, healthy_ppm=1_000_000, fragmentation_ppm=123_400),
            "healthy 100 %, fragmentation 12.34 %",
        ),
        (window(), "window 7"),
        (
            window(
                instances=(InstanceWindow(id="a", running=3, waiting=1), InstanceWindow(id="b")),
                devices=(DeviceWindow(id="x", fragmentation_ppm=100_000), DeviceWindow(id="y")),
            ),
            "window 7, a 3 running 1 waiting, b unknown, fragmentation 10 %",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Data) else "",
)
def test_each_is_told_in_one_line(data: Data, said: str):
    assert timeline.detail(data) == said


@pytest.mark.parametrize("module", [units, timeline])
def test_the_examples_in_docstrings_hold(module: object):
    assert doctest.testmod(module).failed == 0  # pyright: ignore[reportArgumentType] # a module is an object


class Told:
    """A ledger made row by row: facts and decisions as a test says them."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path / 'told.db'}"
        self._story = Story()

    def add(self, data: Data, subject: str) -> int:
        """Append one row and return its position; nothing is decided."""
        row = self._row(data, subject)
        self._story.rows.append(row)
        self._story.state = structs.replace(self._story.state, pos=row.pos)
        return row.pos

    def _row(self, data: Data, subject: str) -> Row:
        pos = self._story.state.pos + 1
        return Row(
            pos=pos, id=f"{pos:08x}{LEDGER[8:]}", type=data.TYPE, subject=subject, ledger_us=pos * 1_000, data=data
        )

    def reader(self) -> Reader:
        record(self._story.rows, self.url)
        return Reader.open(self.url)


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def unreadable(pos: int) -> Draft:
    """A window whose bytes are no event: whoever decodes it fails."""
    event_id = f"{pos:08x}{LEDGER[8:]}"
    return Draft(
        event_id=event_id,
        type=Window.TYPE,
        subject=f"node/{NODE}",
        occurred_us=pos * 1_000,
        ledger_us=pos * 1_000,
        raw=b"\x00",
    )


def test_windows_and_ticks_are_neither_told_nor_decoded(told: Told):
    cause = told.add(window(), f"node/{NODE}")
    decided = told.add(SELECTED, f"channel/{BLEND}")
    told.add(Tick(), "ledger/fleet")
    told.reader().close()
    with Ledger.open(told.url) as ledger:
        ledger.append([unreadable(pos) for pos in range(100, 110)])
    with Reader.open(told.url) as reader:
        (entry,) = timeline.timeline(reader.rows())
        assert [step.pos for step in entry.steps] == [decided]
        assert entry.title == "channel selected (channel/risk)"
        found = explain(reader, str(decided))
    assert [event.pos for event in found.causes] == [cause]
    assert found.consequences == ()


def test_what_a_node_reports_again_and_again_is_one_entry(told: Told):
    first = told.add(ChannelSampled(node=NODE, instances=3), f"node/{NODE}")
    told.add(SELECTED, f"channel/{BLEND}")
    last = told.add(ChannelSampled(node=NODE, instances=3, healthy_ppm=666_666), f"node/{NODE}")
    other = told.add(UpcycleSampled(node=NODE, decay_ppm=930_000), f"node/{NODE}")
    with told.reader() as reader:
        entries = timeline.timeline(reader.rows())
    assert [[step.pos for step in entry.steps] for entry in entries] == [[first, last], [first + 1], [other]]
    assert [entry.outcome for entry in entries] == [
        "healthy 66.6666 %",
        "risk on the yoco channel: limit_crossed",
        "weight decay 93 %",
    ]


def test_an_injection_is_told_by_how_it_closed():
    closed = InjectionClosed(
        request=LEDGER, blend=BLEND, outcome=Ending.PROMOTED, version=None, why=because(Reason.EFFECT_PROVEN)
    )
    step = timeline.Step(1, LEDGER, 1, "arbitrator", closed.TYPE, "blend/risk", True, timeline.detail(closed))
    after = timeline.Step(2, LEDGER, 1, "arbitrator", SELECTED.TYPE, "channel/risk", True, timeline.detail(SELECTED))
    assert timeline.Entry(LEDGER, "inject", "", [step, after]).outcome == "promoted: effect_proven"
    assert timeline.Entry(LEDGER, "other", "", [after]).outcome == timeline.detail(SELECTED)


def test_the_age_of_a_window_counts_from_its_sampling(told: Told):
    cause = told.add(window(instances=(InstanceWindow(id="a", running=9, waiting=2),)), f"node/{NODE}")
    seen = InputAge(id=f"window/{NODE}", pos=cause, age_us=33_000)
    held = Held(detail="upcycle goes on", why=because(Reason.STALE, causes=(cause,), inputs=(seen,)))
    decided = told.add(held, f"channel/{BLEND}")
    with told.reader() as reader:
        (found,) = explain(reader, str(decided)).inputs
    assert (found.event.pos, found.age_us, found.sampled) == (cause, 33_000, True)
    assert found.said == "window 7, a 9 running 2 waiting"


def held(reason: Reason, *candidates: Candidate) -> Held:
    return Held(detail="not now", why=because(reason, *candidates))


STANDBY = Candidate(id="a", chosen=False, reason=Reason.NO_STANDBY)


@pytest.mark.parametrize(
    ("what", "data", "subject"),
    [
        ("channel", held(Reason.STALE), "channel/risk"),
        ("channel", held(Reason.INPUT_ABSENT), "channel/risk"),
        ("wake", held(Reason.NO_STANDBY, STANDBY), "capacity/n1.tiny"),
        ("wake", held(Reason.STALE, STANDBY), "capacity/n1.tiny"),
        ("sleep", held(Reason.STALE), "capacity/n1.tiny"),
        ("sleep", held(Reason.DEGRADED), "capacity/n1.tiny"),
        ("start", held(Reason.MEMORY), "instance/a"),
        ("compare", held(Reason.NO_PEER), "blend/risk"),
        *(
            (what, Discarded(decision=model.TYPE, target="x/y", why=because(Reason.JITTER)), "x/y")
            for what, model in (
                ("wake", WakeOrdered),
                ("sleep", SleepOrdered),
                ("sleep", DrainOrdered),
                ("channel", ChannelSelected),
                ("shed", PrewarmBlocked),
            )
        ),
    ],
)
def test_why_not_finds_the_skip_of_its_kind_only(told: Told, what: str, data: Data, subject: str):
    skip = told.add(data, subject)
    told.add(held(Reason.ALREADY_HOT), "reserve/n1.tiny")  # a reserve that is there already is no skip
    with told.reader() as reader:
        assert why_not(reader, what) == skip
        for other in {"wake", "sleep", "start", "channel", "shed", "compare"} - {what}:
            with pytest.raises(NothingSkipped, match=f"no {other} was ever held back"):
                why_not(reader, other)


@pytest.mark.parametrize(
    ("what", "skip", "done", "subject"),
    [
        ("channel", held(Reason.STALE), SELECTED, f"channel/{BLEND}"),
        ("shed", Discarded(decision=PrewarmBlocked.TYPE, target="x", why=because(Reason.JITTER)), BLOCKED, "node/n1"),
    ],
)
def test_a_skip_that_was_overtaken_is_not_in_force(told: Told, what: str, skip: Data, done: Data, subject: str):
    told.add(skip, subject)
    pos = told.add(done, subject)
    with told.reader() as reader, pytest.raises(NothingSkipped, match=f"at position {pos}"):
        why_not(reader, what)


def rows(told: Told) -> Iterator[LedgerRow]:
    with told.reader() as reader:
        yield from reader.find(types=gaps.OPENED)


def test_an_acknowledgement_is_for_every_gap_before_it(told: Told):
    lost = BusGap(stream="KITE_EVT", first=1, last=2)
    first, second = told.add(lost, "ledger/fleet"), told.add(lost, "ledger/fleet")
    word = told.add(GapAcknowledged(actor="me", reason="a disk"), "arbitration/fleet")
    again = told.add(GapAcknowledged(actor="you"), "arbitration/fleet")
    third = told.add(lost, "ledger/fleet")
    found = gaps.holes(rows(told)).gaps
    assert [(gap.pos, gap.acknowledged_pos, gap.actor) for gap in found] == [
        (first, word, "me"),
        (second, word, "me"),
        (third, 0, ""),
    ]
    assert again < third
