"""`kite gap acknowledge`: the word of somebody who has looked at what the bus lost. `kite ledger gaps` shows it."""

from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, group
from kite_cli.output import Progress, count, fail, moment, note, say, say_json

if TYPE_CHECKING:
    from kite_cli.asking.request import Acknowledgement
    from kite_incident.gaps import Gap

app = group("Going on after the bus has lost messages.")


@app.callback()
def gap() -> None:
    """Go on after the bus has lost messages; `kite ledger gaps` shows which."""


@app.command()
def acknowledge(
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="What was found, for the ledger.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be acknowledged.")] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Let decisions destroy again after messages were lost: you have looked at what is missing."""
    from kite_cli import place
    from kite_cli.asking import request
    from kite_cli.asking.telling import into
    from kite_cli.running import finish, run

    open_now = [one for one in _gaps(directory) if not one.acknowledged_pos]
    if not open_now:
        note("no gap is open: there is nothing to acknowledge")
        return Exit.OK
    if dry_run:
        for one in open_now:
            _would(one, as_json=as_json)
        return Exit.OK
    with Progress(f"acknowledging {count(len(open_now), 'gap')}") as progress:
        outcome = run(request.acknowledge(place.find(directory), reason=reason, on_event=into(progress)))
    return finish(outcome, _acknowledged, _print, as_json=as_json)


def _would(one: "Gap", *, as_json: bool) -> None:
    if as_json:
        say_json({**record(one), "dry_run": True})
    else:
        say(f"the gap at position {one.pos} would be acknowledged: {one.stream} {one.first} to {one.last}")


def _print(outcome: "Acknowledgement") -> None:
    if outcome.ok:
        say(f"mode {outcome.mode}: sleep, drain, retire, delete and rollback go on; trace {outcome.story.trace_id}")
    else:
        fail(f"still {outcome.mode}: another gap came meanwhile", "`kite ledger gaps` shows it")


def _acknowledged(outcome: "Acknowledgement") -> dict[str, object]:
    story = outcome.story
    return {"request": story.request, "trace_id": story.trace_id, "ok": outcome.ok, "mode": outcome.mode}


def _gaps(directory: Dir) -> "list[Gap]":
    from kite_cli import place
    from kite_incident import gaps

    with place.reading(place.find(directory)) as reader:
        return gaps.gaps(reader.find(types=gaps.TYPES))


def record(one: "Gap") -> dict[str, object]:
    """Return a gap as a line of JSON."""
    return {
        "pos": one.pos,
        "at": moment(one.at_us),
        "at_us": one.at_us,
        "stream": one.stream,
        "first": one.first,
        "last": one.last,
        "acknowledged_pos": one.acknowledged_pos or None,
        "actor": one.actor or None,
        "reason": one.reason,
    }
