"""`kite gap acknowledge`: the word of somebody who has looked at what the bus lost. `kite ledger gaps` shows it."""

from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, group
from kite_cli.output import Progress, count, fail, moment, note, say, say_json

if TYPE_CHECKING:
    from kite_cli.asking.request import Acknowledgement
    from kite_incident.gaps import Hole

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

    open_now = _open(directory)
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


def _would(one: "Hole", *, as_json: bool) -> None:
    if as_json:
        say_json({**record(one), "dry_run": True})
    else:
        say(f"the gap at position {one.pos} would be acknowledged: {one.stream} {_what(one)}")


def _what(one: "Hole") -> str:
    from kite_incident.gaps import Gap

    return f"{one.first} to {one.last}" if isinstance(one, Gap) else "is another bus since"


def _print(outcome: "Acknowledgement") -> None:
    if outcome.ok:
        say(f"mode {outcome.mode}: sleep, drain, retire, delete and rollback go on; trace {outcome.story.trace_id}")
    else:
        fail(f"still {outcome.mode}: another one came meanwhile", "`kite ledger gaps` shows it")


def _acknowledged(outcome: "Acknowledgement") -> dict[str, object]:
    story = outcome.story
    return {"request": story.request, "trace_id": story.trace_id, "ok": outcome.ok, "mode": outcome.mode}


def _open(directory: Dir) -> "list[Hole]":
    from kite_cli import place
    from kite_incident import gaps

    with place.reading(place.find(directory)) as reader:
        return gaps.holes(reader.find(types=gaps.OPENED)).open


def record(one: "Hole") -> dict[str, object]:
    """Return what is missing as a line of JSON."""
    from dataclasses import asdict

    from kite_incident.gaps import Gap

    known = {**asdict(one), "acknowledged_pos": one.acknowledged_pos or None, "actor": one.actor or None}
    return {"kind": "gap" if isinstance(one, Gap) else "epoch", "at": moment(one.at_us), **known}
