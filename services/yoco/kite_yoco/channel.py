"""What yoco says of its channel: how many instances are well, how starts went, how fragmented the memory is."""

from collections import deque
from collections.abc import Collection, Sequence

from kite_schemas.model import PPM
from kite_schemas.yoco import ChannelSampled, State

RECENT_MAX = 20  # starts and wakes that count
SICK = (State.FAILED, State.QUARANTINED)


def recent() -> deque[bool]:
    """Return an empty record of how the last RECENT_MAX starts and wakes ended."""
    return deque(maxlen=RECENT_MAX)


def sampled(
    node: str, states: Sequence[State], starts: Collection[bool], fragmentation_ppm: int | None
) -> ChannelSampled:
    """Return the report; instances that are not there do not count."""
    there = [state for state in states if state is not State.ABSENT]
    return ChannelSampled(
        node=node,
        instances=len(there),
        healthy_ppm=share_ppm([state not in SICK for state in there]),
        prewarm_success_ppm=share_ppm(starts),
        fragmentation_ppm=fragmentation_ppm,
    )


def share_ppm(flags: Collection[bool]) -> int | None:
    """Return the share that is true in ppm, None of none.

    >>> share_ppm([True, False, True]), share_ppm([])
    (666666, None)
    """
    return sum(flags) * PPM // len(flags) if flags else None
