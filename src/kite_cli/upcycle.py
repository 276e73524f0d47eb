"""`kite upcycle`: inject adapters into blends, return to an earlier version, and see what a blend is made of."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kite.errors import KiteError, UsageError
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import count, duration, fail, percent, say, say_json, table
from kite_cli.output import show as shown
from kite_cli.share import PPM, ppm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kite_arbitrator.state import State
    from kite_cli.asking.request import Injection
    from kite_cli.asking.rollback import Rollback
    from kite_schemas.upcycle import Member
    from kite_schemas.upcycle import Violation as Told
    from kite_upcycle.violations import Violation as Found

    Violations: TypeAlias = Sequence[Told] | Sequence[Found]

app = group("Inject adapters into blends, return to earlier versions, see what they are made of.")

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
Partial = Annotated[
    bool, typer.Option("--partial", help="Promote it where it could be proven, when it could not be everywhere.")
]
OfBlend = Annotated[str, typer.Argument(metavar="BLEND", help="Its name, as `kite upcycle list` shows it.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again whenever it changes, until Ctrl-C.")]

HINTS = {
    "no_former": "`kite upcycle list --versions` shows what the store holds; `--to VERSION` names one",
    "version_unknown": "`kite upcycle list --versions` shows what the store holds",
    "version_quarantined": "its effect was missing: inject its members anew",
    "blend_busy": "one injection or rollback of a blend at a time: `kite timeline --follow` shows the open one",
    "target_busy": "ask again when the open order is done: `kite timeline --follow` shows it",
    "slots_full": "blends take two slots each while one is changed: fewer blends, or start engines with more slots",
    "no_ready_instance": "`kite yoco instances` shows what there is",
    "degraded": "`kite gap acknowledge` when you have looked at what the bus lost",
}
"""What can be done about a reason."""


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
    partial: Partial = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """Inject adapters into blends, return to earlier versions, see what they are made of.

    `kite upcycle --adapter PATH --target BASE` is short for `inject`.
    """
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
        partial=partial,
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
    partial: Partial = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Verify, blend, load, prove and promote one adapter; exit 1 when it does not come to that."""
    from kite_cli import place
    from kite_cli.asking import request
    from kite_cli.asking.phases import Phases
    from kite_cli.running import finish, run
    from kite_upcycle.violations import UnreadableAdapter

    if adapter is None or target is None:
        raise UsageError("--adapter and --target are needed", hint="kite upcycle inject --adapter PATH --target BASE")
    share_ppm = None if weight is None else weight_ppm(weight)
    with Phases(f"injecting {adapter.name}", blend or target) as phases:
        asked = request.inject(
            place.find(directory),
            adapter=adapter,
            base=target,
            blend=blend,
            weight_ppm=share_ppm,
            anchors=anchor or (),
            replace=replace,
            dry_run=dry_run,
            partial=partial,
            reason=reason,
            name=name,
            on_event=phases.see,
            on_copied=lambda path: phases.step(f"copied below the adapter root: {path}"),
        )
        try:
            outcome = run(asked)
        except UnreadableAdapter as error:
            phases.stop()
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
        if outcome.missing:
            say(f"on {', '.join(outcome.instances or ())}; not on {', '.join(outcome.missing)}: {outcome.detail}")
        return
    said = count(outcome.total, "violation") if outcome.violations else outcome.detail or outcome.reason
    fail(f"{outcome.ending} ({outcome.reason}): {said}", _advice(outcome.reason, outcome.story.trace_id))


def _advice(reason: str, trace_id: str) -> str:
    return "; ".join(filter(None, (HINTS.get(reason), f"`kite timeline --steps`; trace {trace_id}")))


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
        "instances": None if outcome.instances is None else list(outcome.instances),
        "missing": None if outcome.missing is None else list(outcome.missing),
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
def rollback(
    blend: OfBlend,
    *,
    to: Annotated[
        str | None, typer.Option("--to", metavar="VERSION", help="One that the store holds (else the one before).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say whether it could be done, change nothing.")] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Let a blend mean an earlier version again; exit 1 when it does not come to that.

    The version is loaded where it is not, and proven, before the name means it; until then the present one answers.
    """
    from kite_cli import blends, place
    from kite_cli.asking import rollback as asking
    from kite_cli.asking.phases import Phases
    from kite_cli.running import finish, run
    from kite_cli.view import latest

    fleet = place.find(directory)
    with place.reading(fleet) as reader:
        state = latest(reader)
    known = blends.blend_of(state, blend)
    version = None if to is None else blends.version_of(state, known.name, to)
    with Phases(f"rolling {blend} back", blend) as phases:
        asked = asking.rollback(fleet, blend, version=version, dry_run=dry_run, reason=reason, on_event=phases.see)
        outcome = run(asked)
    return finish(outcome, _returned, show_rollback, as_json=as_json)


def show_rollback(outcome: "Rollback") -> None:
    """Print how a rollback ended."""
    trace_id = outcome.story.trace_id
    if not outcome.ok:
        fail(f"{outcome.outcome} ({outcome.reason}): {outcome.detail}", _advice(outcome.reason, trace_id))
        return
    former = f", not {outcome.former}" if outcome.former else ""
    if outcome.outcome == "dry_run":
        say(f"dry run: {outcome.blend} would mean {outcome.version} again{former}: {outcome.detail}; trace {trace_id}")
        return
    took = duration(outcome.story.took_us)
    say(f"done: {outcome.blend} means {outcome.version} again{former}, after {took}; trace {trace_id}")


def _returned(outcome: "Rollback") -> dict[str, object]:
    return {
        "request": outcome.story.request,
        "trace_id": outcome.story.trace_id,
        "outcome": outcome.outcome,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "blend": outcome.blend,
        "version": outcome.version,
        "former": outcome.former,
        "instances": list(outcome.instances),
        "took_us": outcome.story.took_us,
    }


@app.command("list")
def list_(
    *,
    versions: Annotated[
        bool, typer.Option("--versions", help="Every version in the store, and what old ones take.")
    ] = False,
    watch: Watch = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] List the blends: what each means, who holds it, and how long the version before is kept loaded."""
    from kite_cli import blends, place
    from kite_cli.live import drawn
    from kite_cli.view import latest

    def draw(state: "State") -> None:
        _draw(state, versions=versions, as_json=as_json)

    def tell(state: "State") -> list[object]:
        return blends.signature([*blends.blends(state), *blends.versions(state), *blends.accounts(state)])

    with place.reading(place.find(directory)) as reader:
        if watch:
            drawn(reader, draw, tell)
        else:
            draw(latest(reader))
    return Exit.OK


def _draw(state: "State", *, versions: bool, as_json: bool) -> None:
    """Print the blends, or what the store holds; people get a line about the store below either."""
    from kite_cli import blends

    found = blends.versions(state) if versions else blends.blends(state)
    header = blends.VERSIONS if versions else blends.BLENDS
    shown([record for record, _ in found], header, [cells for _, cells in found], as_json=as_json)
    taken = blends.accounts(state) if versions else []
    if taken:
        if not as_json:
            say("")
        shown([record for record, _ in taken], blends.ACCOUNTS, [cells for _, cells in taken], as_json=as_json)
    if not as_json:
        say("")
        for line in blends.notes(state):
            say(line)


@app.command()
def show(
    blend: OfBlend,
    *,
    history: Annotated[bool, typer.Option("--history", help="Every version that it ever meant, and why.")] = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Show what a blend's name means now: members, weights, version, instances that hold it."""
    from kite_cli import blends, place, weights
    from kite_cli.view import latest

    with place.reading(place.find(directory)) as reader:
        state = latest(reader)
        known = blends.blend_of(state, blend)
        promotions = weights.history(reader, blend) if history else []
    if as_json:
        say_json(blends.blend_record(state, known))
    else:
        table(("MEMBER", "WEIGHT", "ANCHORED", "DIGEST"), [*_rows(known.members), _base_row(known.base_weight_ppm)])
        for line in blends.account_of(state, known):
            say(line)
    if promotions:
        if not as_json:
            say("")
        shown(weights.history_records(promotions), weights.HISTORY, weights.history_rows(promotions), as_json=as_json)
    return Exit.OK


@app.command("weights")
def weights_(blend: OfBlend, *, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] Show how every member's share of a blend moved, from its first version to the present one.

    An anchored member has a star; what the members leave is the base's.
    """
    from kite_cli import blends, place, weights
    from kite_cli.view import latest

    with place.reading(place.find(directory)) as reader:
        promotions = weights.history(reader, blend)
        if not promotions:
            raise blends.NoSuchBlend(blend, sorted(latest(reader).blends))
    shown(weights.weight_records(promotions), weights.WEIGHTS, weights.weight_rows(promotions), as_json=as_json)
    return Exit.OK


def _rows(members: "Sequence[Member]") -> list[tuple[str, ...]]:
    return [
        (m.adapter.name, percent(m.weight_ppm), "yes" if m.anchored else "", m.adapter.digest[:12]) for m in members
    ]


def _base_row(weight: int) -> tuple[str, ...]:
    return ("(base)", percent(weight), "", "")
