"""Decisions that have an opposite, and which way each of them goes."""

from collections.abc import Callable
from typing import Any

from kite_schemas.arbitration import Channel, ChannelSelected, PressureChanged
from kite_schemas.model import Data
from kite_schemas.yoco import (
    DrainOrdered,
    PrewarmBlocked,
    PrewarmOrdered,
    PrewarmReleased,
    SleepOrdered,
    StartOrdered,
    WakeOrdered,
)

Way = tuple[str, bool]
"""A target, and whether the decision goes up."""

WAYS: dict[type[Data], Callable[[Any], Way]] = {  # Any: each function takes the type that stands before it
    StartOrdered: lambda data: (data.target, True),
    WakeOrdered: lambda data: (data.target, True),
    PrewarmOrdered: lambda data: (data.target, True),
    DrainOrdered: lambda data: (data.target, False),
    SleepOrdered: lambda data: (data.target, False),
    PrewarmBlocked: lambda data: (f"prewarm/{data.node}", True),
    PrewarmReleased: lambda data: (f"prewarm/{data.node}", False),
    PressureChanged: lambda data: (f"pressure/{data.node}.{data.base}", data.on),
    ChannelSelected: lambda data: (f"channel/{data.blend}", data.channel is Channel.YOCO),
}
"""Everything else is exempt: freeze and unfreeze, rollback, quarantine and stop, retire, expiry."""


def way(data: Data) -> Way | None:
    """Return the target of a decision that has an opposite and which way it goes, None for the others."""
    tell = WAYS.get(type(data))
    return tell(data) if tell else None
