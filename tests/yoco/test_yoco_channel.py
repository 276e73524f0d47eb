"""What yoco says of its channel."""

from kite_schemas.yoco import ChannelSampled, State
from kite_yoco.channel import RECENT_MAX, recent, sampled


def test_nothing_is_known_of_a_node_without_instances() -> None:
    assert sampled("n1", [State.ABSENT], recent(), None) == ChannelSampled(node="n1", instances=0)


def test_the_shares_are_of_the_instances_that_are_there_and_of_the_last_starts() -> None:
    starts = recent()
    starts.extend([False] * 5 + [True] * 15 + [True, False])
    assert len(starts) == RECENT_MAX
    states = [State.READY, State.ASLEEP, State.STARTING, State.FAILED, State.QUARANTINED, State.ABSENT]
    assert sampled("n1", states, starts, 350_000) == ChannelSampled(
        node="n1", instances=5, healthy_ppm=600_000, prewarm_success_ppm=800_000, fragmentation_ppm=350_000
    )
