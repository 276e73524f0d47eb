"""What a command prints: data on stdout, as a table or as JSON, one object a line; everything else on stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kite.clock import iso, mono_us
from kite_incident.units import duration as duration  # noqa: PLC0414 # passed on: whoever prints finds it here
from kite_incident.units import percent as percent  # noqa: PLC0414 # as above
from kite_incident.units import size as size  # noqa: PLC0414 # as above

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

Record = Mapping[str, object]
"""One line of JSON."""

Cells = Sequence[str]
"""One row of a table."""

GAP = "  "


def show(records: Sequence[Record], header: Cells, rows: Sequence[Cells], *, as_json: bool) -> None:
    """Print the records as JSON lines, or the rows as a table."""
    if as_json:
        for record in records:
            say_json(record)
    else:
        table(header, rows)


def say_json(record: Record) -> None:
    """Print one object on one line of stdout."""
    print(json.dumps(record, ensure_ascii=False), flush=True)


def say(text: str) -> None:
    """Print a line of data on stdout."""
    print(text, flush=True)


def note(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str, hint: str = "") -> None:
    """Print an error, and what to do about it, on stderr."""
    note(f"error: {message}" + (f"\n\nhint: {hint}" if hint else ""))


def table(header: Cells, rows: Sequence[Cells]) -> None:
    """Print a table: with rich on a terminal, else as plain columns that are never cut."""
    if sys.stdout.isatty():
        _rich_table(header, rows)
    else:
        for line in columns([header, *rows]):
            say(line)


def columns(rows: Sequence[Cells]) -> list[str]:
    """Align cells under each other.

    >>> columns([["ID", "STATE"], ["a-1", "ready"]])
    ['ID   STATE', 'a-1  ready']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _rich_table(header: Cells, rows: Sequence[Cells]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))  # Text: what a cell holds is never markup
    Console().print(drawn)


class Progress:
    """Steps of something that takes a while: lines on stderr, with a spinner under them on a terminal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            self._status = Console(stderr=True).status(Text(self._text))
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the spinner away; steps are still printed."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, text: str) -> None:
        """Print one step, above the spinner if there is one."""
        if self._status is None:
            note(text)
        else:
            self._status.console.print(text, markup=False, highlight=False)

    def waiting(self, text: str) -> None:
        """Say beside the spinner what is waited for; nothing without a terminal."""
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(text))

    def timing(self, text: str) -> None:
        """Say beside the spinner what goes on, and for how long from now; nothing without a terminal."""
        if self._status is not None:
            self._status.update(_Elapsed(text))


class _Elapsed:
    """A text with the time since it was made; the spinner renders it again and again."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._since_us = mono_us()

    def __rich__(self) -> "Text":
        from rich.text import Text

        return Text(f"{self._text}  {duration(mono_us() - self._since_us)}")


def quiet() -> None:
    """Let the libraries in this process log warnings and errors only, to stderr: stdout is for data."""
    import logging

    import structlog

    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.LogfmtRenderer(sort_keys=False)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # the stderr of then, not of now
    )


def moment(us: int) -> str:
    """Format a time of the ledger, UTC, to the millisecond.

    >>> moment(0)
    '1970-01-01T00:00:00.000Z'
    """
    return f"{iso(us)[:-4]}Z"


def count(number: int, noun: str) -> str:
    """Put a number before a noun.

    >>> count(1, "violation"), count(0, "blend")
    ('1 violation', '0 blends')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(event_type: str) -> str:
    """Return the part of an event type that people call it by.

    >>> short("kite.yoco.wake_ordered.v1")
    'wake_ordered'
    """
    return event_type.split(".")[2]
