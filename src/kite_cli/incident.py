"""`kite status`, `timeline`, `explain` and `replay`: what the engineer on call asks first."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kite.errors import UsageError
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir
from kite_cli.live import committed, until_left
from kite_cli.output import Progress, duration, fail, moment, say, say_json, short, show, table
from kite_cli.status import status

if TYPE_CHECKING:
    from kite.ledger import Reader
    from kite_incident.replay import Verdict
    from kite_incident.timeline import Entry, Step

SKIPPABLE = ("wake", "sleep", "start", "channel", "shed", "compare", "inject", "rollback", "change")
"""The kinds of `kite_incident.refusals`, which would cost `--help` the import of every schema."""

UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
SPAN_MAX_S = 3_660 * 86_400
HEX_CHARS = 8


def register(app: typer.Typer) -> None:
    """Add the commands that have no noun."""
    app.command()(status)
    app.command()(timeline)
    app.command()(explain)
    app.command()(replay)


def timeline(
    *,
    since: Annotated[str, typer.Option("--since", metavar="SPAN", help="As 20m, 90s, 2h, 1d (before the end).")] = "",
    steps: Annotated[bool, typer.Option("--steps", help="Every event of each entry.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Every event as it is committed, until Ctrl-C.")
    ] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Tell what happened: one row for a request and all that followed from it. Times are UTC."""
    from kite_cli import place
    from kite_incident.timeline import timeline as tell

    span_us = span(since) if since else None
    if follow:
        with place.reading(place.find(directory)) as reader:
            return _follow(reader, span_us, as_json=as_json)
    with place.reading(place.find(directory)) as reader:
        entries = tell(reader.rows(_first(reader, span_us)))
    if as_json:
        for entry in entries:
            say_json(_entry(entry, steps=steps))
    else:
        table(("TIME", "POS", "WHAT", "OUTCOME", "TOOK", "TRACE"), _lines(entries, steps=steps))
    return Exit.OK


def _first(reader: "Reader", span_us: int | None) -> int:
    """Return the first position within a span of ledger time before the end; the first of all without a span."""
    from kite_cli.view import since

    head = reader.head
    return 1 if span_us is None else since(reader, head.ledger_us - span_us, 1, head.pos)


def span(text: str) -> int:
    """Read a span of time into microseconds. Raises UsageError.

    >>> span("20m")
    1200000000
    """
    number, unit = text[:-1], text[-1:]
    if not number.isascii() or not number.isdecimal() or unit not in UNITS_S:
        raise UsageError(f"{text!r} is no span of time", hint="a whole number and s, m, h or d, as in 20m")
    seconds = int(number) * UNITS_S[unit]
    if seconds > SPAN_MAX_S:
        raise UsageError(f"{text!r} is longer than any ledger", hint="leave --since out for all of it")
    return seconds * 1_000_000


def _lines(entries: "list[Entry]", *, steps: bool) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for entry in entries:
        head = (moment(entry.at_us), str(entry.steps[0].pos), entry.title, entry.outcome)
        lines.append((*head, duration(entry.took_us), entry.trace_id[:HEX_CHARS]))
        if steps:
            lines += [_line(step) for step in entry.steps]
    return lines


def _line(step: "Step") -> tuple[str, ...]:
    mark = "→" if step.decision else "·"
    what = f"  {mark} {step.lane}: {short(step.type)} {step.subject}"
    return moment(step.at_us), str(step.pos), what, step.detail, "", step.id[:HEX_CHARS] if step.decision else ""


def _entry(entry: "Entry", *, steps: bool) -> dict[str, object]:
    told: dict[str, object] = {
        "correlation": entry.correlation,
        "at": moment(entry.at_us),
        "at_us": entry.at_us,
        "pos": entry.steps[0].pos,
        "title": entry.title,
        "outcome": entry.outcome,
        "took_us": entry.took_us,
        "events": len(entry.steps),
        "trace_id": entry.trace_id,
    }
    return {**told, "steps": [_step(step) for step in entry.steps]} if steps else told


def _step(step: "Step") -> dict[str, object]:
    return {
        "pos": step.pos,
        "id": step.id,
        "at_us": step.at_us,
        "lane": step.lane,
        "type": step.type,
        "subject": step.subject,
        "decision": step.decision,
        "detail": step.detail,
    }


def _follow(reader: "Reader", span_us: int | None, *, as_json: bool) -> int:
    """Print what is committed from here on, and before it what began within the span. Ctrl-C is its normal end."""
    shown = ""
    with until_left():
        for entry in _committed(reader, span_us):
            (step,) = entry.steps
            if as_json:
                told = {"correlation": entry.correlation, "title": entry.title, "trace_id": entry.trace_id}
                say_json({**told, "at": moment(step.at_us), **_step(step)})
                continue
            if entry.correlation != shown:
                say("  ".join(filter(None, (moment(entry.at_us), entry.trace_id[:HEX_CHARS], entry.title))))
            shown = entry.correlation
            say("  ".join(filter(None, _line(step))))
    return Exit.OK


def _committed(reader: "Reader", span_us: int | None) -> "Iterator[Entry]":
    """Yield each row as an entry of one step, titled as the request that it belongs to; never ends by itself."""
    from kite_incident.timeline import timeline as tell

    for row in committed(reader, reader.head.pos if span_us is None else _first(reader, span_us) - 1):
        for entry in tell([row]):
            cause = reader.by_event_id(entry.correlation)
            whole = tell([cause] if cause else [])  # of a tick or a window nothing is told
            entry.title = whole[0].title if whole else entry.title
            yield entry


def explain(
    decision: Annotated[str, typer.Argument(metavar="DECISION", help="Its position, its id, or how that begins.")] = "",
    *,
    why_not: Annotated[str, typer.Option("--why-not", metavar="WHAT", help=f"Not done: {', '.join(SKIPPABLE)}.")] = "",
    at: Annotated[
        int | None, typer.Option("--at", metavar="POS", min=1, help="As of this position (with --why-not).")
    ] = None,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Say why a decision was taken, or why something was not: rules with margins; candidates; inputs; trace."""
    from kite_cli import place
    from kite_cli.account import lines, record
    from kite_incident.explain import explain as account

    if bool(decision) == bool(why_not):
        raise UsageError("name a decision, or what was not done by --why-not", hint="`kite timeline` lists both")
    with place.reading(place.find(directory)) as reader:
        explanation = account(reader, decision or _skip(reader, why_not, at))
    if as_json:
        say_json(record(explanation))
    else:
        for line in lines(explanation):
            say(line)
    return Exit.OK


def _skip(reader: "Reader", what: str, at: int | None) -> str:
    """Return the position of the skip that was in force. Raises UsageError and NothingSkipped."""
    from kite_incident.refusals import why_not

    if what not in SKIPPABLE:
        raise UsageError(f"{what!r} is nothing that can be skipped", hint=f"one of {', '.join(SKIPPABLE)}")
    return str(why_not(reader, what, at))


def replay(
    *,
    first: Annotated[int, typer.Option("--from", metavar="POS", min=1, help="First position.")] = 1,
    last: Annotated[int | None, typer.Option("--to", metavar="POS", min=1, help="Last position.")] = None,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Decide everything again and compare with what was decided; exit 3 at the first difference."""
    from kite_cli import place
    from kite_incident.replay import verify

    with place.reading(place.find(directory)) as reader, Progress("replaying") as progress:
        end = reader.head.pos
        verdict = verify(reader, first, last, lambda pos: progress.waiting(f"replaying {pos} of {end}"))
    if as_json:
        say_json(_verdict(verdict))
    elif verdict.identical:
        say(f"{verdict.decisions} decisions, identical")
    else:
        _diverged(verdict)
    return Exit.OK if verdict.identical else Exit.DIVERGED


def _diverged(verdict: "Verdict") -> None:
    found = verdict.divergence
    assert found is not None  # noqa: S101 # the caller asked
    if found.differences:
        rows = [(d.field, str(d.recorded), str(d.replayed)) for d in found.differences]
        show([], ("FIELD", "RECORDED", "REPLAYED"), rows, as_json=False)
    what = f"position {found.pos}: {short(found.type)} is {found.kind} (caused by position {found.cause_pos})"
    fail(f"diverged at {what}", f"the {verdict.decisions} decisions before it are identical, if it is the last")


def _verdict(verdict: "Verdict") -> dict[str, object]:
    found = verdict.divergence
    divergence = None
    if found is not None:
        divergence = {
            "pos": found.pos,
            "kind": found.kind,
            "cause_pos": found.cause_pos,
            "type": found.type,
            "differences": [
                {"field": d.field, "recorded": d.recorded, "replayed": d.replayed} for d in found.differences
            ],
        }
    return {
        "first": verdict.first,
        "last": verdict.last,
        "inputs": verdict.inputs,
        "decisions": verdict.decisions,
        "identical": verdict.identical,
        "divergence": divergence,
    }
