"""`kite ledger`: the rows themselves, whether they are those that were written, and what never came in."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite.errors import Fault, KiteError, UsageError
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, group
from kite_cli.live import committed, newest, until_left
from kite_cli.output import Progress, moment, note, say, say_json, short, show, table

if TYPE_CHECKING:
    from kite.ledger import Reader, Row
    from kite_incident.gaps import Hole, Holes

LINES_MAX = 10_000
TYPE_PARTS = 4

app = group("The ledger: its rows, whether they are as written, and what never came in.")


class NoSuchRow(KiteError):
    """The ledger has no row of that position or event id."""

    code = "no_such_row"
    fault = Fault.USER

    def __init__(self, which: str, head_pos: int) -> None:
        super().__init__(f"the ledger has no row {which}", hint=f"it ends at position {head_pos}; `kite ledger tail`")
        self.which = which


class NoCheckpoint(KiteError):
    """The ledger has no checkpoint yet."""

    code = "no_checkpoint"
    fault = Fault.USER


@app.callback()
def ledger() -> None:
    """Look at the ledger: its rows, whether they are as written, and what never came in."""


@app.command()
def verify(
    *,
    first: Annotated[int, typer.Option("--from", metavar="POS", min=1, help="First position.")] = 1,
    last: Annotated[int | None, typer.Option("--to", metavar="POS", min=1, help="Last position.")] = None,
    operator_key: Annotated[
        Path | None,
        typer.Option("--operator-key", metavar="FILE", help="The operator's; default: the folder's."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="FILE", help="What `kite ledger checkpoint` printed.")
    ] = None,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Check chain, signatures, checkpoints and the end of the ledger; exit 3 at the first break."""
    from kite.trust import load_public
    from kite_cli import outside, place, proving

    fleet = place.find(directory)
    trusted = operator_key or fleet.operator_key
    operator = load_public(trusted) if trusted else None
    file = outside.from_file(checkpoint) if checkpoint else None
    kept, unasked = outside.from_bus(fleet)
    copies = [*([("in the file", file)] if file else []), *(("on the bus", copy) for copy in kept)]
    with place.reading(fleet) as reader, Progress("verifying") as progress:
        scope = proving.scope(reader, (first, last), operator, copies)
        if checkpoint:
            proving.require_own(checkpoint, scope)
        proof = proving.prove(reader, scope, progress)
    if as_json:
        say_json(proving.record(proof, unasked))
    else:
        proving.tell(proof, unasked)
    if proof.broken is None and checkpoint:
        proving.require_genuine(checkpoint, proof)
    return Exit.OK if proof.broken is None else Exit.DIVERGED


@app.command()
def checkpoint(*, directory: Dir = None) -> int:
    """[reads] Print the newest checkpoint as one JSON object, to keep where the ledger is not."""
    from kite.trust import ProducerKey
    from kite_cli import place
    from kite_schemas.envelope import decode
    from kite_schemas.ledger import Checkpointed, ProducerKeyAdded

    with place.reading(place.find(directory)) as reader:
        found = newest(reader, 1, reader.head.pos, types=[Checkpointed.TYPE])
        if not found:
            raise NoCheckpoint("the ledger has no checkpoint", hint="an arbitrator with KITE_SIGNING_KEY writes them")
        data = decode(found[0].raw).data
        assert isinstance(data, Checkpointed)  # noqa: S101 # its type said so
        added = [decode(row.raw).data for row in reader.find(types=[ProducerKeyAdded.TYPE])]
    keys = {ProducerKey.of(one).id: one.public_key for one in added if isinstance(one, ProducerKeyAdded)}
    say_json({**data.model_dump(), "public_key": keys.get(data.key_id), "at": moment(found[0].ledger_us)})
    return Exit.OK


@app.command()
def tail(
    *,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=LINES_MAX, help="So many rows.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as rows are committed, until Ctrl-C.")] = False,
    kind: Annotated[str, typer.Option("--type", metavar="TYPE", help="Only this event type, or its short name.")] = "",
    subject: Annotated[str, typer.Option("--subject", metavar="S", help="Only rows about this, as node/a.")] = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Print the last rows: position, time, type, subject, who signed, size. Times are UTC."""
    from kite_cli import place

    if not subject.isprintable():
        raise UsageError(f"{subject!r} is no subject", hint="as node/a or instance/a")
    types, subjects = _types(kind) if kind else frozenset[str](), frozenset(filter(None, [subject]))
    with place.reading(place.find(directory)) as reader:
        head = reader.head.pos
        found = newest(reader, lines, head, types, subjects)
        header = ("POS", "TIME", "TYPE", "SUBJECT", "SIGNER", "BYTES")
        if not follow:
            show([_summary(row) for row in found], header, [_cells(row) for row in found], as_json=as_json)
            return Exit.OK
        with until_left():
            for row in found:
                _line(row, as_json=as_json)
            for row in committed(reader, head):
                if (not types or row.type in types) and (not subjects or row.subject in subjects):
                    _line(row, as_json=as_json)
    return Exit.OK


def _types(text: str) -> frozenset[str]:
    """Return the event types of a name, whole or short. Raises UsageError."""
    from kite_schemas.registry import TYPES

    if text.startswith("kite.") and len(text.split(".")) == TYPE_PARTS:
        return frozenset({text})
    found = frozenset(name for name in TYPES if short(name) == text)
    if not found:
        raise UsageError(f"{text!r} is no event type", hint="as kite.yoco.wake_ordered.v1, or wake_ordered")
    return found


def _line(row: "Row", *, as_json: bool) -> None:
    if as_json:
        say_json(_summary(row))
    else:
        say("  ".join(_cells(row)))


def _cells(row: "Row") -> tuple[str, ...]:
    return str(row.pos), moment(row.ledger_us), row.type, row.subject, row.key_id or "-", str(len(row.raw))


def _summary(row: "Row") -> dict[str, object]:
    return {
        "pos": row.pos,
        "at": moment(row.ledger_us),
        "at_us": row.ledger_us,
        "type": row.type,
        "subject": row.subject,
        "event_id": row.event_id,
        "key_id": row.key_id or None,
        "bytes": len(row.raw),
    }


@app.command()
def get(
    which: Annotated[str, typer.Argument(metavar="POS|EVENT_ID", help="Its position, or the id of its event.")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Only the event, byte for byte as it was hashed.")] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Show one row whole: every column, and its event."""
    from kite_cli import place

    if raw and as_json:
        raise UsageError("--raw prints the event as it is, --json does not", hint="leave one of them out")
    with place.reading(place.find(directory)) as reader:
        row = _row(reader, which)
    if raw:
        sys.stdout.flush()
        sys.stdout.buffer.write(row.raw)
        sys.stdout.buffer.flush()
    elif as_json:
        say_json({**_columns(row), "event": _event(row)})
    else:
        for name, value in _columns(row).items():
            say(f"{name:<12}{value}")
        say(json.dumps(_event(row), ensure_ascii=False, indent=2))
    return Exit.OK


def _row(reader: "Reader", which: str) -> "Row":
    """Return a row by position or event id. Raises NoSuchRow."""
    from kite_schemas.model import INT64_MAX

    by_pos = which.isascii() and which.isdecimal()
    if by_pos:
        pos = int(which[:20])
        found = reader.row(pos) if pos <= INT64_MAX else None
    else:
        found = reader.by_event_id(which) if which.isprintable() else None
    if found is None:
        raise NoSuchRow(which if by_pos else f"of event {which!r}", reader.head.pos)
    return found


def _columns(row: "Row") -> dict[str, object]:
    """Return every column but the event; bytes as hex."""
    from dataclasses import asdict

    values = {name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(row).items()}
    del values["raw"]
    return {**values, "at": moment(row.ledger_us), "bytes": len(row.raw)}


def _event(row: "Row") -> object:
    """Return the event as JSON; None for bytes that are none, which `--raw` prints."""
    from pydantic_core import from_json

    try:
        return from_json(row.raw)
    except ValueError:
        return None


@app.command()
def gaps(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] List what the bus lost and who acknowledged it, other buses, and what was refused. Times are UTC."""
    from kite_cli import place
    from kite_incident.gaps import EVERY, holes

    with place.reading(place.find(directory)) as reader:
        found = holes(reader.find(types=EVERY))
    if as_json:
        _say_holes(found)
    elif not (found.gaps or found.epochs or found.refused):
        note("no gap, no other bus, nothing refused: everything came in")
    else:
        _show_holes(found)
    return Exit.OK


def _say_holes(found: "Holes") -> None:
    from dataclasses import asdict

    from kite_cli.gap import record

    for one in (*found.gaps, *found.epochs):
        say_json(record(one))
    for refused in found.refused:
        say_json({"kind": "refused", **asdict(refused)})


def _show_holes(found: "Holes") -> None:
    if found.gaps:
        rows = [
            (moment(one.at_us), str(one.pos), one.stream, str(one.first), str(one.last), _by(one), one.reason)
            for one in found.gaps
        ]
        table(("GAP", "POS", "STREAM", "FIRST", "LAST", "ACKNOWLEDGED", "REASON"), rows)
    if found.epochs:
        rows = [
            (
                moment(one.at_us),
                str(one.pos),
                one.stream,
                str(one.bus_epoch),
                str(one.seq),
                one.why,
                _by(one),
                one.reason,
            )
            for one in found.epochs
        ]
        table(("OTHER BUS", "POS", "STREAM", "BUS EPOCH", "READ TO", "WHY", "ACKNOWLEDGED", "REASON"), rows)
    if found.refused:
        rows = [(one.code, str(one.count), str(one.first_pos), str(one.last_pos)) for one in found.refused]
        table(("REFUSED", "COUNT", "FIRST POS", "LAST POS"), rows)


def _by(one: "Hole") -> str:
    return f"by {one.actor} at position {one.acknowledged_pos}" if one.acknowledged_pos else "no"
