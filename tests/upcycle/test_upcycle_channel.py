"""What the report of the channel says."""

from kite.events import Origin, compose, new_id
from kite.orders import Received
from kite.testing.orders import ASKED, stop_order
from kite_schemas.telemetry import InstanceWindow, Window
from kite_schemas.upcycle import ChannelSampled, DecaySet, LoadOrdered, Resident, Shift
from kite_upcycle import cache, core
from kite_upcycle.cache import Counts, Seen, Tally
from kite_upcycle.channel import BASES_MAX, Channel, in_force, read, report
from kite_upcycle.engines import Engines
from kite_upcycle.shifts import Shifts

OLD, NEW = "risk@aaaaaaaaaaaa", "risk@bbbbbbbbbbbb"
SHIFT = Shift(version=NEW, former=OLD, kl_micronats=320_000)
RESIDENT = Resident(blend="risk", version=NEW, path=f"store/sha256/{'b' * 64}")
REPAIR = LoadOrdered(
    node="n1", target="load/risk@a", expires_us=1, ttl_us=1, why=ASKED,
    instance="a", endpoint="http://127.0.0.1:1", base="tiny", resident=RESIDENT, noise_micronats=0,
)  # fmt: skip
INJECTION = REPAIR.model_copy(update={"request": new_id()})
ORIGIN = Origin("kite/yoco/n1", "yoco@test")


def watched() -> Channel:
    return Channel("n1", Shifts(Engines(), ("a probe",)))


def decay(base: str, decay_ppm: int) -> DecaySet:
    return DecaySet(base=base, decay_ppm=decay_ppm, why=ASKED)


def window(seq: int, sampled_us: int, counts: Counts) -> Window:
    return Window(
        node="n1", boot=new_id(), seq=seq, interval_us=100_000, sampled_us=sampled_us, emitted_us=sampled_us,
        instances=(InstanceWindow(id="a", cache_queries=counts.queries, cache_hits=counts.hits),),
    )  # fmt: skip


def test_the_report_is_put_together_from_what_is_known() -> None:
    assert report("n1", None, {}, Seen(), ()) == ChannelSampled(node="n1")
    seen = Seen(tallies=(Tally(NEW, Counts(1_000, 800), Counts(1_000, 600)),))
    assert report("n1", "tiny", {"tiny": 710_000}, seen, [SHIFT]) == ChannelSampled(
        node="n1", decay_ppm=710_000, kv_pollution_ppm=250_000, shifts=(SHIFT,)
    )


def test_the_decay_is_that_of_the_base_that_the_node_serves() -> None:
    decays = {"tiny": 710_000, "large": 930_000}
    assert in_force(decays, "tiny") == 710_000
    assert in_force(decays, "other") is None
    assert in_force(decays, None) == 930_000
    assert in_force({}, None) is None


def test_the_channel_hears_decays_and_learns_its_base_from_loads() -> None:
    known = watched()
    assert known.sample() == ChannelSampled(node="n1")
    for notice in (decay("tiny", 930_000), decay("tiny", 710_000), decay("large", 930_000)):
        known.hear_decay(notice)
    assert known.sample().decay_ppm == 930_000
    known.taken(REPAIR)
    assert known.sample().decay_ppm == 710_000
    for number in range(2 * BASES_MAX):
        known.hear_decay(decay(f"base-{number}", 500_000))
    assert known.sample().decay_ppm is None  # it was pushed out, and is not known any more


def test_the_load_of_an_injection_pollutes_and_a_repair_does_not() -> None:
    for order, expected in ((INJECTION, 500_000), (REPAIR, None)):
        known = watched()
        known.hear(window(1, 10_000_000, Counts(1_000, 800)))
        known.loaded(order, 10_000_000, 10_050_000)
        known.hear(window(2, 10_200_000, Counts(1_000, 400)))
        assert known.sample().kv_pollution_ppm is None
        known.hear(window(3, 10_050_000 + cache.SPAN_US, Counts(0, 0)))
        assert known.sample().kv_pollution_ppm == expected


def test_the_former_version_is_the_one_of_the_blend_that_was_loaded_last() -> None:
    assert core.former(RESIDENT, ("tiny",)) is None
    assert core.former(RESIDENT, ("tiny", NEW)) is None
    assert core.former(RESIDENT, ("tiny", "risky@aaaaaaaaaaaa", "tiny@aaaaaaaaaaaa")) is None
    assert core.former(RESIDENT, ("tiny", "risk@000000000000", OLD, "other@aaaaaaaaaaaa", NEW)) == OLD


async def test_the_shift_of_an_injection_is_asked_for_where_there_is_a_former_version() -> None:
    async with Engines() as engines:
        for order, listed, asked in (
            (INJECTION, ("tiny", OLD), [OLD]),
            (INJECTION, ("tiny",), []),
            (REPAIR, ("tiny", OLD), []),
        ):
            shifts = Asked(engines, ("a probe",))
            header = compose("instance/a", order, ORIGIN).header
            Channel("n1", shifts).proven(Received(new_id(), 1, order, header, 1), listed)
            assert shifts.formers == asked


class Asked(Shifts):
    """Remembers what it was asked for."""

    @property
    def formers(self) -> list[str]:
        return [self._waiting.get_nowait()[1].former for _ in range(self._waiting.qsize())]


def test_what_is_no_window_is_passed_over() -> None:
    told = window(1, 1_000_000, Counts(1, 1))
    assert read(compose("node/n1", told, ORIGIN).raw) == told
    assert read(compose("instance/a", stop_order("a"), ORIGIN).raw) is None
    assert read(b"{") is None
