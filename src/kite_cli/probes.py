"""`kite probes`: the fixed prompts that instances are compared with, one set in force for each base."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, count, moment, note, say, say_json, show

if TYPE_CHECKING:
    from kite_cli.asking.probing import Checked, Known

app = group("The probes that instances are compared with.")

DIGEST_CHARS = 12


@app.callback()
def probes() -> None:
    """Add sets of probes, list them, look at one."""


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Text, one probe a line; in quotation marks, JSON.")],
    *,
    base: Annotated[str, typer.Option("--base", metavar="BASE", help="Served name of the base it is for.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the file.")] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Put a set of probes into the store, in force for a base; exit 1 with every line that is no use.

    A set has 8 to 64 probes of at most 400 characters, one of at most 7 bytes and one of at least 33 words. Blank lines
    are passed over. No text of a probe enters the ledger, logs or traces.
    """
    from kite_cli import place
    from kite_cli.asking import probing
    from kite_cli.running import run

    fleet = place.find(directory)
    checked = probing.check(fleet, file, base)
    if checked.longest_tokens is None:
        note(f"note: the tokenizer of {base} is not at hand here: its tokens were not counted")
    request, trace = None, None
    if not dry_run:
        with Progress(f"registering {file.name}"):
            story = run(probing.register(fleet, checked, reason=reason))
        request, trace = story.request, story.trace_id
    if as_json:
        say_json({**_summary(checked), "dry_run": dry_run, "request": request, "trace_id": trace})
    else:
        say(_added(checked, dry_run=dry_run))
    return Exit.OK


def _summary(checked: "Checked") -> dict[str, object]:
    found = checked.probes
    return {
        "base": checked.base,
        "digest": found.digest,
        "probes": len(found.prompts),
        "longest_tokens": checked.longest_tokens,
    }


def _added(checked: "Checked", *, dry_run: bool) -> str:
    longest = f", the longest of {checked.longest_tokens} tokens" if checked.longest_tokens is not None else ""
    what = f"{checked.probes.digest[:DIGEST_CHARS]}: {count(len(checked.probes.prompts), 'probe')}{longest}"
    return f"{what}, {'would be' if dry_run else 'now'} in force for {checked.base}"


@app.command(name="list")
def every(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] Print the sets of every base, and which of them is in force. Times are UTC."""
    from kite_cli import place
    from kite_cli.asking import probing

    found = probing.known(place.find(directory))
    header = ("BASE", "DIGEST", "PROBES", "LONGEST", "IN FORCE", "SINCE", "WHO", "REASON")
    show([_record(one) for one in found], header, [_cells(one) for one in found], as_json=as_json)
    return Exit.OK


def _record(one: "Known") -> dict[str, object]:
    return {
        "base": one.base,
        "digest": one.digest,
        "probes": one.count,
        "longest_tokens": one.longest_tokens,
        "in_force": one.in_force,
        "shipped": one.pos == 0,
        "pos": one.pos or None,
        "at": moment(one.at_us) if one.pos else None,
        "actor": one.actor or None,
        "reason": one.reason,
    }


def _cells(one: "Known") -> tuple[str, ...]:
    longest = "" if one.longest_tokens is None else f"{one.longest_tokens} tokens"
    since = moment(one.at_us) if one.pos else "shipped"
    force = "yes" if one.in_force else ""
    return one.base, one.digest[:DIGEST_CHARS], str(one.count), longest, force, since, one.actor, one.reason


@app.command(name="show")
def look(
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="Or how it begins.")],
    *,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Print the probes of a set, as `kite probes add` reads them."""
    from kite.probes import line
    from kite_cli import place
    from kite_cli.asking import probing

    found = probing.show(place.find(directory), digest)
    if as_json:
        say_json({"digest": found.digest, "prompts": list(found.prompts)})
        return Exit.OK
    for prompt in found.prompts:
        say(line(prompt))
    return Exit.OK
