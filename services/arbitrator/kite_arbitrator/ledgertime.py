"""The clock of the ledger: never backwards, and monotonic between two leases, whatever the wall clock does."""

from collections.abc import Callable

from kite import clock

STEP_US = 1_000_000
"""A wall clock that moves by more than this against the monotonic one, between two looks, has been set."""

Now = Callable[[], int]


class LedgerClock:
    """Ledger time after `last_us`, microseconds of UTC as far as the wall clock was right when the lease was taken."""

    def __init__(self, last_us: int, *, wall_us: Now = clock.wall_us, mono_us: Now = clock.mono_us) -> None:
        self._wall_us = wall_us
        self._mono_us = mono_us
        self._apart_us = wall_us() - mono_us()
        self._anchor_us = max(wall_us(), last_us) - mono_us()

    def __call__(self, last_us: int) -> int:
        """Return the time of the next row after one at `last_us`."""
        return max(last_us + 1, self._anchor_us + self._mono_us())

    def stepped(self) -> int:
        """Return by how much the wall clock was set since the last look, 0 when it was not; slow drift is no step."""
        before_us, self._apart_us = self._apart_us, self._wall_us() - self._mono_us()
        by_us = self._apart_us - before_us
        return by_us if abs(by_us) > STEP_US else 0
