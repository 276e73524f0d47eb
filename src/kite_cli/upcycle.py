"""`kite upcycle`: inject adapters into blends, and see what a blend is made of."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kite.errors import Fault, KiteError, UsageError
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, count, duration, fail, percent, say, say_json, table
from kite_cli.share import PPM, ppm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kite_arbitrator.state import Blend
    from kite_cli.asking.request import Injection
    from kite_schemas.upcycle import Member
    from kite_schemas.upcycle import Violation as Told
    from kite_upcycle.violations import Violation as Found

    Violations: TypeAlias = Sequence[Told] | Sequence[Found]

app = group("Inject adapters into blends.")

AdapterPath = Annotated[
    Path | None, typer.Option("--adapter", metavar="PATH", help="Folder of the adapter, as PEFT saves it.")
]
Target = Annotated[str | None, typer.Option("--target", metavar="BASE", help="Served name of the base.")]
BlendName = Annotated[str | None, typer.Option("--blend", metavar="NAME", help="Blend (else the base's name).")]
AdapterName = Annotated[str | None, typer.Option("--name", help="Name of the adapter (else its folder's).")]
Weight = Annotated[
    str | None, typer.Option("--weight", metavar="DECIMAL", help="Share of the blend, as 0.3 (else an equal one).")
]
Anchors = Annotated[
    list[str] | None, typer.Option("--anchor", metavar="NAME", help="Member whose weight is locked; may be repeated.")
]
Replace = Annotated[str | None, typer.Option("--replace", metavar="NAME", help="Member whose place it takes.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Verify and compute the weights, change nothing.")]


class NoSuchBlend(KiteError):
    """No blend of that name was ever promoted."""

    code = "no_such_blend"
    fault = Fault.USER

    def __init__(self, name: str, known: list[str]) -> None:
        hint = f"there is {', '.join(known)}" if known else "none was promoted yet: `kite upcycle inject`"
        super().__init__(f"no blend {name!r}", hint=hint)
        self.name = name


def weight_ppm(text: str) -> int:
    """Turn a decimal weight into parts per million, exactly. Raises UsageError.

    >>> weight_ppm("0.3"), weight_ppm("1")
    (300000, 1000000)
    """
    weight = ppm(text)
    if not 0 < weight <= PPM:
        raise UsageError(f"weight {text} cannot be", hint="a weight is above 0 and at most 1")
    return weight


@app.callback(invoke_without_command=True)
def upcycle(
    context: typer.Context,
    *,
    adapter: AdapterPath = None,
    target: Target = None,
    blend: BlendName = None,
    name: AdapterName = None,
    weight: Weight = None,
    anchor: Anchors = None,
    replace: Replace = None,
    dry_run: DryRun = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """Inject adapters into blends; `kite upcycle --adapter PATH --target BASE` is short for `inject`."""
    if context.invoked_subcommand is not None:
        return Exit.OK
    return inject(
        adapter=adapter,
        target=target,
        blend=blend,
        name=name,
        weight=weight,
        anchor=anchor,
        replace=replace,
        dry_run=dry_run,
        reason=reason,
        directory=directory,
        as_json=as_json,
    )


@app.command()
def inject(
    *,
    adapter: AdapterPath = None,
    target: Target = None,
    blend: BlendName = None,
    name: AdapterName = None,
    weight: Weight = None,
    anchor: Anchors = None,
    replace: Replace = None,
    dry_run: DryRun = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Verify, blend, load, prove and promote one adapter; exit 1 when it does not come to that."""
    from kite_cli import place
    from kite_cli.asking import request
    from kite_cli.asking.telling import into
    from kite_cli.running import finish, run
    from kite_upcycle.violations import UnreadableAdapter

    if adapter is None or target is None:
        raise UsageError("--adapter and --target are needed", hint="kite upcycle inject --adapter PATH --target BASE")
    share_ppm = None if weight is None else weight_ppm(weight)
    with Progress(f"injecting {adapter.name}") as progress:
        asked = request.inject(
            place.find(directory),
            adapter=adapter,
            base=target,
            blend=blend,
            weight_ppm=share_ppm,
            anchors=anchor or (),
            replace=replace,
            dry_run=dry_run,
            reason=reason,
            name=name,
            on_event=into(progress),
            on_copied=lambda path: progress.step(f"copied below the adapter root: {path}"),
        )
        try:
            outcome = run(asked)
        except UnreadableAdapter as error:
            progress.stop()
            return _unreadable(error, as_json=as_json)
    return finish(outcome, _record, _print, as_json=as_json)


def _print(outcome: "Injection") -> None:
    if outcome.violations:
        show_violations(outcome.violations)
    if outcome.members:
        table(("MEMBER", "WEIGHT", "ANCHORED", "DIGEST"), [*_rows(outcome.members), _base_row(outcome.base_weight_ppm)])
    version = f" as {outcome.version}" if outcome.version else ""
    took = duration(outcome.story.took_us)
    if outcome.ok:
        say(f"{outcome.ending}: {outcome.blend}{version} after {took}; trace {outcome.story.trace_id}")
        return
    said = count(outcome.total, "violation") if outcome.violations else outcome.detail or outcome.reason
    fail(f"{outcome.ending} ({outcome.reason}): {said}", f"`kite timeline --steps`; trace {outcome.story.trace_id}")


def _record(outcome: "Injection") -> dict[str, object]:
    return {
        "request": outcome.story.request,
        "trace_id": outcome.story.trace_id,
        "outcome": outcome.ending,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "blend": outcome.blend,
        "version": outcome.version,
        "members": [member.model_dump(mode="json") for member in outcome.members],
        "base_weight_ppm": outcome.base_weight_ppm,
        "violations": [violation.model_dump(mode="json") for violation in outcome.violations],
        "violations_total": outcome.total,
        "took_us": outcome.story.took_us,
    }


def _unreadable(error: KiteError, *, as_json: bool) -> int:
    """Say why an adapter was refused before it could be asked for: its files cannot even be read safely."""
    from kite_upcycle.violations import UnreadableAdapter

    assert isinstance(error, UnreadableAdapter)  # noqa: S101 # imported late, hence not in the signature
    if as_json:
        found = [vars(violation) for violation in error.violations]
        say_json({"outcome": "refused", "reason": error.code, "violations": found, "violations_total": len(found)})
    else:
        show_violations(error.violations)
        fail("refused: the adapter's files cannot be read safely", error.hint)
    return Exit.FAILED


def show_violations(violations: "Violations") -> None:
    """Print every violation in a table."""
    table(("CODE", "WHERE", "EXPECTED", "FOUND"), [(v.code, v.where, v.expected, v.found) for v in violations])


@app.command()
def show(
    blend: Annotated[str, typer.Argument(metavar="BLEND")], *, directory: Dir = None, as_json: AsJson = False
) -> int:
    """[reads] Show what a blend's name means now: members, weights, version, instances that hold it."""
    from kite_cli import place
    from kite_cli.view import latest

    with place.reading(place.find(directory)) as reader:
        state = latest(reader)
    known = state.blends.get(blend)
    if known is None:
        raise NoSuchBlend(blend, sorted(state.blends))
    version = known.resident.version
    holders = sorted(i.id for i in state.instances.values() if version in i.versions)
    if as_json:
        say_json(_shown(known, holders))
    else:
        table(("MEMBER", "WEIGHT", "ANCHORED", "DIGEST"), [*_rows(known.members), _base_row(known.base_weight_ppm)])
        say(f"{version} of {known.base}, on {', '.join(holders) or 'no instance'}; promoted at position {known.pos}")
    return Exit.OK


def _shown(blend: "Blend", holders: list[str]) -> dict[str, object]:
    return {
        "blend": blend.name,
        "base": blend.base,
        "version": blend.resident.version,
        "path": blend.resident.path,
        "members": [member.model_dump(mode="json") for member in blend.members],
        "base_weight_ppm": blend.base_weight_ppm,
        "instances": holders,
        "pos": blend.pos,
    }


def _rows(members: "Sequence[Member]") -> list[tuple[str, ...]]:
    return [
        (m.adapter.name, percent(m.weight_ppm), "yes" if m.anchored else "", m.adapter.digest[:12]) for m in members
    ]


def _base_row(weight: int) -> tuple[str, ...]:
    return ("(base)", percent(weight), "", "")
