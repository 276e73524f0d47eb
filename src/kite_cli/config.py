"""`kite config`: the policy that is in force, changes of it, and its history."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kite.errors import UsageError
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, count, fail, moment, note, say, say_json, show

if TYPE_CHECKING:
    from pydantic import JsonValue

    from kite_cli.aliases import Named
    from kite_cli.place import Place
    from kite_incident.policies import Decided, Difference
    from kite_schemas.policy import Change, Policy

app = group("The policy: see it, change it, see how it changed.")

CELL_MAX_CHARS = 60
"""Longer values are cut in tables; `--json` has all of them."""

DIGEST_CHARS = 12

NAMES_HELP = "A position, how a digest begins, `shipped`, or `now`."


@app.callback()
def config() -> None:
    """See the policy, change it, and see how it changed."""


@app.command()
def get(
    key: Annotated[str | None, typer.Argument(metavar="KEY")] = None,
    *,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Print one setting, or all of them, as they are in force."""
    from kite_cli import place
    from kite_schemas.policy import flatten

    flat = flatten(_policy(place.find(directory)))
    if key is not None:
        named = _named(flat, key)
        flat = {named.key: flat[named.key]}
    records = [{"key": name, "value": value} for name, value in flat.items()]
    show(records, ("KEY", "VALUE"), [(name, _whole(value)) for name, value in flat.items()], as_json=as_json)
    return Exit.OK


@app.command(name="list")
def every(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] Print every setting: value, unit, meaning, and what it was shipped with where that differs."""
    from kite_arbitrator import shipped
    from kite_cli import place
    from kite_cli.bounds import settings, takes
    from kite_schemas.policy import flatten

    flat, first = flatten(_policy(place.find(directory))), flatten(shipped.policy())
    records: list[dict[str, object]] = []
    rows: list[tuple[str, ...]] = []
    for key, setting in settings().items():
        value, began = flat[key], first[key]
        found = {"key": key, "value": value, "unit": setting.unit, "shipped": began, "differs": value != began}
        records.append({**found, "takes": takes(setting), "meaning": setting.meaning})
        rows.append((key, _cell(value), setting.unit, _cell(began) if value != began else "", setting.meaning))
    show(records, ("KEY", "VALUE", "UNIT", "SHIPPED", "MEANING"), rows, as_json=as_json)
    return Exit.OK


@app.command(name="set")
def change(
    words: Annotated[
        list[str], typer.Argument(metavar="KEY VALUE | KEY=VALUE", help="Several are one change: all or none.")
    ],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what is refused for being harmful.")] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Change settings; exit 2 for an unknown key or a value it does not take.

    VALUE is JSON in the unit of the key, or has a unit (417ms, 90s, 30%, 2GB). Under its name without the unit a
    setting takes decimals: `upcycle.weight_decay 0.93`, `yoco.cold_start_deadline 0.417`. `unset` takes the value of a
    limit away, which switches its rule off.
    """
    from kite_cli import place
    from kite_cli.bounds import amended
    from kite_schemas.policy import flatten

    fleet = place.find(directory)
    policy = _policy(fleet)
    flat = flatten(policy)
    changes = _wanted(flat, pairs(words))
    amended(policy, changes)
    found = [{"key": one.key, "before": flat[one.key], "after": one.value, "dry_run": dry_run} for one in changes]
    if dry_run:
        return _tell(found, digest=None, as_json=as_json)
    return _change(fleet, found, changes, reason=reason, force=force, as_json=as_json)


def pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Read keys with their values. Raises UsageError for a value without a key, and the other way round.

    >>> pairs(["rules", "1"]), pairs(["rules=1", "expiry.wake=5s"])
    ([('rules', '1')], [('rules', '1'), ('expiry.wake', '5s')])
    """
    if "=" in words[0]:
        split = [word.partition("=") for word in words]
        lonely = [key for key, mark, _ in split if not mark]
        found = [(key, value) for key, _, value in split]
    else:
        lonely = list(words[-1:]) if len(words) % 2 else []
        found = list(zip(words[::2], words[1::2], strict=False))
    if lonely:
        raise UsageError(f"{lonely[0]!r} has no value", hint="give KEY VALUE, or KEY=VALUE for each")
    return found


def _wanted(flat: "dict[str, JsonValue]", given: Sequence[tuple[str, str]]) -> "list[Change]":
    from kite_cli.bounds import settings, wanted
    from kite_schemas.policy import CHANGES_MAX

    if len(given) > CHANGES_MAX:
        raise UsageError(f"{len(given)} changes at once", hint=f"{CHANGES_MAX} at most are one request")
    known = settings()
    changes: list[Change] = []
    for name, text in given:
        named = _named(flat, name, text)
        if any(one.key == named.key for one in changes):
            raise UsageError(f"{named.key} is given twice")
        changes.append(wanted(known, named, text))
    return changes


def _named(flat: "dict[str, JsonValue]", name: str, text: str | None = None) -> "Named":
    """Find a setting; an alias says on stderr which setting, and which value, it means."""
    from kite_cli import aliases

    named = aliases.resolve(flat, name)
    if named.is_alias:
        value = "" if text is None else f": {aliases.shown(text)} is {_whole(aliases.read(named, text))}"
        note(f"{aliases.said(named)}{value}")
    return named


def _change(
    fleet: "Place",
    found: "Sequence[dict[str, JsonValue]]",
    changes: "Sequence[Change]",
    *,
    reason: str,
    force: bool,
    as_json: bool,
) -> int:
    from kite_cli.asking import request
    from kite_cli.running import run

    with Progress(f"changing {', '.join(one.key for one in changes)}"):
        outcome = run(request.change(fleet, [(one.key, one.value) for one in changes], reason=reason, force=force))
    if not outcome.ok:
        fail(f"the change is rejected: {outcome.detail}", "`kite config list` shows what is in force")
        return Exit.USAGE
    return _tell(found, digest=outcome.digest, as_json=as_json)


def _tell(found: "Sequence[dict[str, JsonValue]]", *, digest: str | None, as_json: bool) -> int:
    for one in found:
        if as_json:
            say_json({**one, "digest": digest})
            continue
        mood = "would be" if one["dry_run"] else "is now"
        say(f"{one['key']} {mood} {_whole(one['after'])} (was {_whole(one['before'])})")
    return Exit.OK


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=NAMES_HELP)] = "shipped",
    second: Annotated[str, typer.Argument(metavar="B", help=NAMES_HELP)] = "now",
    *,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Compare two policies; exit 3 when they differ."""
    from kite_cli import place
    from kite_incident import policies

    with place.reading(place.find(directory)) as reader:
        decided, end = policies.history(reader.find(types=policies.TYPES)), reader.head.pos
    before, after = (policies.choose(decided, name, end) for name in (first, second))
    found = list(policies.differences(before, after))
    if not found:
        note(f"{first} and {second} are equal")
        return Exit.OK
    rows = [_ends(one) for one in found]
    show([_record(one) for one in found], ("KEY", "FROM", "TO"), rows, as_json=as_json)
    return Exit.DIVERGED


@app.command()
def history(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] Print every change of the policy, made or rejected: when, by whom, why, and what. Times are UTC."""
    from kite_cli import place

    header = ("TIME", "POS", "WHO", "OUTCOME", "KEY", "FROM", "TO", "REASON")
    decided = _history(place.find(directory))
    rows = [row for one in decided for row in _lines(one)]
    show([_account(one) for one in decided], header, rows, as_json=as_json)
    return Exit.OK


def _lines(decided: "Decided") -> list[tuple[str, ...]]:
    """Return a row for each setting that changed; what they have in common stands in the first one."""
    outcome = f"set {decided.digest[:DIGEST_CHARS]}" if decided.policy else f"rejected: {decided.detail}"
    head = (moment(decided.at_us), str(decided.pos), decided.actor, outcome)
    first, *rest = _cells(decided)
    return [(*head, *first, decided.reason), *((*("",) * len(head), *cells, "") for cells in rest)]


def _cells(decided: "Decided") -> list[tuple[str, str, str]]:
    changes = decided.changes
    if not changes:
        return [("nothing", "", "")]
    if decided.first and len(changes) > 1:
        return [(f"all {count(len(changes), 'setting')}", "", "")]
    return [_ends(one) for one in changes]


def _ends(one: "Difference") -> tuple[str, str, str]:
    """Return key, before and after; a place inside a list or an object (`[`) that is not there is empty, not unset."""
    before, after = ("" if value is None and "[" in one.key else _cell(value) for value in (one.before, one.after))
    return one.key, before, after


def _account(decided: "Decided") -> dict[str, object]:
    return {
        "pos": decided.pos,
        "at": moment(decided.at_us),
        "at_us": decided.at_us,
        "outcome": "set" if decided.policy else "rejected",
        "actor": decided.actor,
        "reason": decided.reason,
        "request": decided.request,
        "digest": decided.digest or None,
        "detail": decided.detail,
        "changes": [_record(one) for one in decided.changes],
    }


def _record(difference: "Difference") -> dict[str, object]:
    return {"key": difference.key, "before": difference.before, "after": difference.after}


def _cell(value: "JsonValue") -> str:
    """Return a value for a table.

    >>> _cell(930_000), _cell(None), len(_cell("x" * 1_000))
    ('930000', 'unset', 60)
    """
    text = _whole(value)
    return text if len(text) <= CELL_MAX_CHARS else f"{text[: CELL_MAX_CHARS - 1]}…"


def _whole(value: "JsonValue") -> str:
    """Return a value for people, however long.

    >>> _whole(None), _whole([1])
    ('unset', '[1]')
    """
    from kite_cli.aliases import UNSET

    return UNSET if value is None else json.dumps(value)


def _history(fleet: "Place") -> "list[Decided]":
    from kite_cli import place
    from kite_incident import policies

    with place.reading(fleet) as reader:
        return policies.history(reader.find(types=policies.TYPES))


def _policy(fleet: "Place") -> "Policy":
    from kite_incident import policies

    return policies.current(_history(fleet))
