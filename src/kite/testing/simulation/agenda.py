"""Simulated time: one thing happens after another, in an order that only the seed decides. Pure."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class Agenda:
    """What is still to happen. Times are microseconds; what is due at the same moment happens as it was entered.

    >>> agenda, done = Agenda(10), list[str]()
    >>> agenda.after(5, lambda: done.append("later")); agenda.at(3, lambda: done.append("overdue"))
    >>> agenda.run(20); done, agenda.now_us
    (['overdue', 'later'], 20)
    """

    def __init__(self, start_us: int) -> None:
        self.now_us = start_us
        self._due: list[tuple[int, int, Action]] = []
        self._order = count()

    def at(self, at_us: int, action: Action) -> None:
        """Enter an action; one that is overdue happens next."""
        heappush(self._due, (max(at_us, self.now_us), next(self._order), action))

    def after(self, us: int, action: Action) -> None:
        """Enter an action that happens so much later."""
        self.at(self.now_us + us, action)

    def run(self, until_us: int) -> None:
        """Let everything happen that is due up to a moment, and what it brings about until then."""
        while self._due and self._due[0][0] <= until_us:
            self.now_us, _, action = heappop(self._due)
            action()
        self.now_us = until_us
