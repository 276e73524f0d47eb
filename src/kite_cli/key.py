"""`kite key`: keys that sign, and which of them the ledger trusts."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, group
from kite_cli.output import Progress, moment, note, say, say_json, show

if TYPE_CHECKING:
    from kite_cli.asking.keys import Known

app = group("Keys that sign what services say and what people ask for.")


@app.callback()
def key() -> None:
    """Make keys, have the ledger trust them, see which it trusts."""


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key goes; it must not exist.")],
    *,
    as_json: AsJson = False,
) -> int:
    """[changes] Make a key: the private one into FILE (mode 0600), the public one beside it.

    The public key of FILE is FILE.pub, of NAME.key it is NAME.pub. No fleet is told: `kite key add` does that.
    """
    from kite.errors import UsageError
    from kite.trust import PUBLIC_SUFFIX, new_key, public_path

    if file.suffix == PUBLIC_SUFFIX:
        raise UsageError(f"{file} is the name of a public key", hint="name the private key: NAME.key, or NAME")
    made = new_key(file)
    beside = public_path(file)
    if as_json:
        record = {"key": made.key_id, "public_key": made.public.hex()}
        say_json({**record, "file": str(file), "public_file": str(beside)})
    else:
        say(f"key {made.key_id}, public key {made.public.hex()}")
        say(f"private: {file}, public: {beside}")
    return Exit.OK


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The public key, as in node-a.pub.")],
    *,
    source: Annotated[
        str, typer.Option("--source", metavar="SOURCE", help="Whom it speaks for, as in kite/yoco/node-a.")
    ],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why it is to be trusted, for the ledger.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be added.")] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Have the ledger trust a public key from here on; the request must be signed with the operator's key.

    A key of kite/SERVICE/NODE signs that service's facts about that node; one of kite/cli/USER that user's requests.
    """
    from kite.trust import key_id, load_public
    from kite_cli import place
    from kite_cli.asking import keys
    from kite_cli.running import run

    public = load_public(file)
    keys.request(source, public, reason)  # a source that cannot be is refused before anything is asked
    fleet = place.find(directory)
    if found := keys.holds(fleet, source, public):
        note(f"the ledger trusts this key for {source} already: nothing is added")
        outcome = Added(found.id, source, found.pos)
    elif dry_run:
        outcome = Added(key_id(public), source)
    else:
        with Progress(f"adding a key for {source}"):
            story = run(keys.add(fleet, source, public, reason=reason))
        outcome = Added(key_id(public), source, story.facts[0].pos, story.request, story.trace_id)
    _tell(outcome, dry_run=dry_run, as_json=as_json)
    return Exit.OK


@app.command()
def introduce(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `kite init` made.")],
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the ledger.")] = "kite init",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be added.")] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Have the ledger trust the keys of a deployment's services, as `add` does; those it trusts it keeps.

    The arbitrator has to run, and the requests are signed with the operator's key.
    """
    from kite.trust import key_id
    from kite_cli import place
    from kite_cli.asking import keys
    from kite_cli.deploy.folder import introduced
    from kite_cli.running import run

    fleet = place.find(directory)
    for one in introduced(folder):
        public = bytes.fromhex(one.public_key)
        keys.request(one.source, public, reason)  # as in `add`
        outcome = Added(key_id(public), one.source)
        if found := keys.holds(fleet, one.source, public):
            outcome = Added(found.id, one.source, found.pos)
        elif not dry_run:
            story = run(keys.add(fleet, one.source, public, reason=reason))
            outcome = Added(key_id(public), one.source, story.facts[0].pos, story.request, story.trace_id)
        _tell(outcome, dry_run=dry_run, as_json=as_json)
    return Exit.OK


@dataclass(frozen=True, slots=True)
class Added:
    """A key, and since where the ledger trusts it: 0 when this was only tried; `request` if this request did it."""

    key: str
    source: str
    pos: int = 0
    request: str = ""
    trace_id: str = ""


def _tell(outcome: Added, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        said = {name: value or None for name, value in asdict(outcome).items()}
        say_json({**said, "added": bool(outcome.request), "dry_run": dry_run})
    elif outcome.pos:
        say(f"key {outcome.key} speaks for {outcome.source} from position {outcome.pos} on")
    else:
        say(f"key {outcome.key} would speak for {outcome.source}")


@app.command(name="list")
def every(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] List the keys that the ledger trusts, and who had each added. Times are UTC."""
    from kite_cli import place
    from kite_cli.asking import keys

    found = keys.known(place.find(directory))
    header = ("KEY", "SOURCE", "TIME", "POS", "ACTOR", "REASON")
    show([_record(one) for one in found], header, [_cells(one) for one in found], as_json=as_json)
    return Exit.OK


def _record(one: "Known") -> dict[str, object]:
    return {
        "key": one.id,
        "source": one.source,
        "pos": one.pos,
        "at": moment(one.at_us),
        "at_us": one.at_us,
        "actor": one.actor,
        "reason": one.reason,
    }


def _cells(one: "Known") -> tuple[str, ...]:
    return one.id, one.source, moment(one.at_us), str(one.pos), one.actor, one.reason
