"""The newest rows of a ledger, those that are committed from now on, and a view that is drawn again as it changes."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kite.ledger import Reader, Row
    from kite_arbitrator.state import State

FOLLOW_POLL_S = 0.2
REDRAW_S = 1.0
"""Ages are drawn again on a terminal although nothing happened."""

SPAN_ROWS = 10_000
"""So many positions are looked through at a time, from the end backwards."""


def committed(reader: "Reader", pos: int) -> "Iterator[Row]":
    """Yield every row behind a position as it is committed; never ends by itself."""
    while True:
        for row in reader.rows(pos + 1):
            yield row
            pos = row.pos
        time.sleep(FOLLOW_POLL_S)


def newest(
    reader: "Reader", limit: int, last: int, types: Collection[str] = (), subjects: Collection[str] = ()
) -> "list[Row]":
    """Return the last `limit` rows up to position `last` that have one of the types and subjects (empty: any)."""
    found: list[Row] = []
    span = SPAN_ROWS if types or subjects else limit
    while last > 0 and len(found) < limit:
        first = max(1, last - span + 1)
        rows = reader.find(types=types, subjects=subjects, first=first, last=last)
        found = [*deque(rows, maxlen=limit - len(found)), *found]
        last = first - 1
    return found


@contextmanager
def until_left() -> Generator[None]:
    """Follow until Ctrl-C, or until the reader of our output has gone, as `| head` does: both are a normal end."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails once more


def drawn(reader: "Reader", draw: "Callable[[State], None]", signature: "Callable[[State], object]") -> None:
    """Draw the state again whenever what `signature` makes of it has changed, until it is left.

    A terminal is cleared before, and drawn on every second, as ages grow; anything else gets drawing behind drawing.
    """
    from kite_cli.view import View

    view, shown, at_s = View(reader), None, 0.0
    with until_left():
        while True:
            state = view.refresh()
            told = signature(state)
            if told != shown or (sys.stdout.isatty() and time.monotonic() - at_s >= REDRAW_S):
                _clear()
                draw(state)
                shown, at_s = told, time.monotonic()
            time.sleep(FOLLOW_POLL_S)


def _clear() -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        Console().clear()
