"""Walking a ledger in pages: memory is bounded, and no read transaction stays open and keeps the log from shrinking."""

from collections.abc import Callable, Iterator

from kite.ledger.rows import Row

Page = Callable[[int, int], list[Row]]
"""Returns the first PAGE_ROWS rows at positions `first` to `last`, both included."""


def scan(page: Page, first: int, last: int) -> Iterator[Row]:
    """Yield the rows that `page(first, last)` gives, asking again from behind its last row until it gives none.

    Rows are never altered, so pages read at different times fit together.
    """
    while first <= last and (rows := page(first, last)):
        yield from rows
        first = rows[-1].pos + 1
