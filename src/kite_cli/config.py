"""`kite config`: the policy that is in force, and changes of it."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kite.errors import Fault, KiteError, UsageError
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, fail, say, say_json, show
from kite_cli.share import ppm

if TYPE_CHECKING:
    from pydantic import JsonValue

    from kite_cli.place import Place
    from kite_schemas.policy import Policy

app = group("The policy: see it, change it.")

SHARE = "_ppm"


class NoPolicy(KiteError):
    """The ledger has no policy yet."""

    code = "no_policy"
    fault = Fault.OPERATOR


@app.callback()
def config() -> None:
    """See the policy, and change it."""


@app.command()
def get(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]")] = None,
    *,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Print one setting, or all of them, as they are in force."""
    from kite_cli import place
    from kite_schemas.policy import flatten

    flat = flatten(_policy(place.find(directory)))
    if key is not None:
        name = canonical(flat, key)
        flat = {name: flat[name]}
    records = [{"key": name, "value": value} for name, value in flat.items()]
    show(records, ("KEY", "VALUE"), [(name, json.dumps(value)) for name, value in flat.items()], as_json=as_json)
    return Exit.OK


@app.command(name="set")
def change(
    key: Annotated[str, typer.Argument(metavar="KEY")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="JSON; a decimal when KEY is given without _ppm.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Change one setting of the policy; exit 2 for an unknown key or a value it does not take."""
    from kite_cli import place
    from kite_schemas.policy import flatten

    fleet = place.find(directory)
    policy = _policy(fleet)
    flat = flatten(policy)
    name = canonical(flat, key)
    wanted = parse(name, key, value)
    _check(policy, name, wanted)
    found: dict[str, object] = {"key": name, "before": flat[name], "after": wanted, "dry_run": dry_run}
    if dry_run:
        return _tell({**found, "digest": None}, as_json=as_json)
    return _change(fleet, found, name, wanted, reason=reason, as_json=as_json)


def _change(
    fleet: "Place", found: dict[str, object], name: str, wanted: "JsonValue", *, reason: str, as_json: bool
) -> int:
    from kite_cli.asking import request
    from kite_cli.running import run

    with Progress(f"changing {name}"):
        outcome = run(request.change(fleet, [(name, wanted)], reason=reason))
    if not outcome.ok:
        fail(f"the change is rejected: {outcome.detail}")
        return Exit.USAGE
    return _tell({**found, "digest": outcome.digest}, as_json=as_json)


def _tell(found: dict[str, object], *, as_json: bool) -> int:
    if as_json:
        say_json(found)
    else:
        mood = "would be" if found["dry_run"] else "is now"
        say(f"{found['key']} {mood} {json.dumps(found['after'])} (was {json.dumps(found['before'])})")
    return Exit.OK


def canonical(flat: "dict[str, JsonValue]", key: str) -> str:
    """Return the full name of a setting; `_ppm` may be left out. Raises UsageError for an unknown one."""
    for name in (key, f"{key}{SHARE}"):
        if name in flat:
            return name
    section = [name for name in flat if name.startswith(f"{key.partition('.')[0]}.")]
    raise UsageError(f"unknown setting {key!r}", hint=f"known are {', '.join(section or flat)}")


def parse(name: str, key: str, text: str) -> "JsonValue":
    """Read a value: a decimal share when the key was given without `_ppm`, else JSON. Raises UsageError.

    >>> parse("upcycle.weight_decay_ppm", "upcycle.weight_decay", "0.93")
    930000
    """
    if name == f"{key}{SHARE}":
        return ppm(text)
    try:
        return json.loads(text)
    except ValueError:
        return text  # a word is a string; whether the setting takes one is for the policy to say


def _check(policy: "Policy", name: str, value: "JsonValue") -> None:
    from kite_schemas.policy import Change, PolicyInvalid, amend

    try:
        amend(policy, [Change(key=name, value=value)])
    except PolicyInvalid as error:
        raise UsageError(str(error), hint="`kite config get` shows every setting and its value") from error


def _policy(fleet: "Place") -> "Policy":
    from kite_cli import place
    from kite_incident.replay import state_at

    with place.reading(fleet) as reader:
        policy = state_at(reader.rows()).policy
    if policy is None:
        raise NoPolicy("there is no policy yet", hint="`kite up` sets the first one")
    return policy
