"""What a yoco does, from what it knows."""

import pytest

from kite.engine import Activity
from kite_schemas.model import TEXT_MAX_CHARS
from kite_schemas.upcycle import EffectPrint, Resident
from kite_schemas.yoco import State
from kite_yoco import core
from kite_yoco.core import OPENINGS, Opening, Wake, plan_wake

PRINT = EffectPrint(path="store/prints/a.json", digest="a" * 64, distance_micronats=9)
RISK = Resident(blend="risk", version="risk@0123456789ab", path="store/sha256/1", effect_print=PRINT)
FRAUD = Resident(blend="fraud", version="fraud@0123456789ab", path="store/sha256/2", effect_print=PRINT)
UNPROVEN = RISK.model_copy(update={"effect_print": None})


@pytest.mark.parametrize(
    ("residents", "listed", "plan"),
    [
        ([], ["tiny"], Wake(load=(), prove=(), base=True)),
        ([RISK], ["tiny"], Wake(load=(RISK,), prove=((RISK, PRINT),), base=False)),
        ([RISK], ["tiny", RISK.version], Wake(load=(), prove=((RISK, PRINT),), base=False)),
        ([UNPROVEN], ["tiny"], Wake(load=(UNPROVEN,), prove=(), base=True)),
        (
            [FRAUD, UNPROVEN],
            ["tiny", UNPROVEN.version, "old@0123456789ab"],
            Wake(load=(FRAUD,), prove=((FRAUD, PRINT),), base=True),
        ),
    ],
)
def test_a_wake_loads_what_is_missing_and_proves_everything(
    residents: list[Resident], listed: list[str], plan: Wake
) -> None:
    assert plan_wake(residents, listed) == plan


def test_a_start_knows_what_to_do_in_every_state() -> None:
    assert set(OPENINGS) == set(State)
    assert OPENINGS[State.READY] is Opening.REPORT
    assert {state for state, opening in OPENINGS.items() if opening is Opening.REFUSE} == {
        State.DRAINING,
        State.ASLEEP,
        State.WAKING,
        State.QUARANTINED,
    }


def test_an_instance_is_lost_when_its_process_is_gone_or_was_never_ready() -> None:
    assert [state for state in State if core.is_lost(state, lives=True)] == [State.STARTING, State.WARMING]
    assert all(core.is_lost(state, lives=False) for state in State)


def test_idle_means_nothing_runs_and_nothing_waits() -> None:
    assert core.is_idle(Activity(running=0, waiting=0))
    assert not core.is_idle(Activity(running=1, waiting=0))
    assert not core.is_idle(Activity(running=0, waiting=1))


def test_a_message_fits_its_event() -> None:
    assert core.fitted("short") == "short"
    assert len(core.fitted("long" * TEXT_MAX_CHARS)) == TEXT_MAX_CHARS


def test_what_an_engine_holds_is_what_it_lists_beside_its_base() -> None:
    assert core.loaded(["tiny", RISK.version], "tiny") == (RISK.version,)
