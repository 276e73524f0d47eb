"""Lanes: orders of one target in sequence, of different targets side by side. Pure."""

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Lanes(Generic[Item]):
    """One queue per target. A lane is open from its first `push` to the `pop` that finds it empty.

    >>> lanes = Lanes[str]()
    >>> lanes.push("a", "first"), lanes.push("a", "second"), lanes.push("b", "other")
    (True, False, True)
    >>> lanes.pop("a"), lanes.pop("a"), lanes.pop("a"), lanes.push("a", "later")
    ('first', 'second', None, True)
    """

    def __init__(self) -> None:
        self._open: dict[str, deque[Item]] = {}

    def push(self, target: str, item: Item) -> bool:
        """Put an item at the end of its lane; True when this opened the lane: the caller then has to drive it."""
        lane = self._open.get(target)
        if lane is None:
            self._open[target] = deque([item])
            return True
        lane.append(item)
        return False

    def pop(self, target: str) -> Item | None:
        """Take the next item of an open lane. None when there is none: the lane is closed, its driver goes."""
        lane = self._open[target]
        if lane:
            return lane.popleft()
        del self._open[target]
        return None
