"""`kite yoco`: pools, instances, one more of them, one less, and what their engines wrote."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, Record, count, duration, fail, say, show, table

if TYPE_CHECKING:
    from kite_arbitrator.records import Instance
    from kite_arbitrator.state import State
    from kite_cli.asking.capacity import Drain, Handover
    from kite_cli.view import View

app = group("Pools, instances, one more of them, one less, and their logs.")

US_PER_MS = 1_000
DEADLINE_MAX_MS = 86_400_000
LINES_MAX = 1_000_000
LOOK_S = 1.0
HEADER = (
    "INSTANCE",
    "NODE",
    "BASE",
    "DEVICE",
    "STATE",
    "STANDBY",
    "LAST READY",
    "HOLDS",
    "ENDPOINT",
    "FAILURES",
    "SEEN",
)
SHOWN = "`kite yoco instances` shows what there is"
AGES = ("age_us",)
"""What grows by itself: a live view is not drawn again for it alone."""

Name = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its id, as `kite yoco instances` shows it.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again whenever it changes, until Ctrl-C.")]


@app.callback()
def yoco() -> None:
    """Pools, instances, one more of them, one less, and their logs."""


@app.command()
def pool(
    base: Annotated[str | None, typer.Argument(metavar="BASE", help="Those of this base only.")] = None,
    *,
    watch: Watch = False,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Show each pool: what it should hold and holds, how fast its paths are, and when it is prewarmed."""
    from kite_cli import pools

    def draw(state: "State") -> None:
        _show_pools(state, base, as_json=as_json)

    return _view(directory, draw, lambda state: pools.signature(state, pools.pools(state, base)), watch=watch)


def _show_pools(state: "State", base: str | None, *, as_json: bool) -> None:
    from kite_cli import pools

    found = pools.pools(state, base)
    show(pools.records(state, found), pools.POOLS, pools.rows(state, found), as_json=as_json)
    if as_json:
        return
    if paths := pools.path_rows(state, found):
        say("")
        table(pools.PATHS, paths)
    for number, line in enumerate(pools.notes(state, found)):
        say(line if number else f"\n{line}")


def _view(
    directory: Dir, draw: "Callable[[State], None]", signature: "Callable[[State], object]", *, watch: bool
) -> int:
    """Draw the state at the end of the ledger, once or as it changes."""
    from kite_cli import place
    from kite_cli.live import drawn
    from kite_cli.view import latest

    with place.reading(place.find(directory)) as reader:
        if watch:
            drawn(reader, draw, signature)
        else:
            draw(latest(reader))
    return Exit.OK


@app.command()
def instances(*, watch: Watch = False, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] List the instances: where they are in their life, and what they hold."""

    def tell(state: "State") -> list[Record]:
        return [{key: value for key, value in found.items() if key not in AGES} for found in all_records(state)]

    def draw(state: "State") -> None:
        show_instances(state, as_json=as_json)

    return _view(directory, draw, tell, watch=watch)


def show_instances(state: "State", *, as_json: bool) -> None:
    """Print every instance, by id."""
    show(all_records(state), HEADER, [_cells(found, state) for found in _sorted(state)], as_json=as_json)


def all_records(state: "State") -> list[Record]:
    """Return every instance as JSON, by id."""
    return [record(found, state) for found in _sorted(state)]


def _sorted(state: "State") -> "list[Instance]":
    return sorted(state.instances.values(), key=lambda found: found.id)


def record(instance: "Instance", state: "State") -> dict[str, object]:
    """Return one instance as JSON; its age is that of the last report, in ledger time."""
    return {
        "kind": "instance",
        "instance": instance.id,
        "node": instance.node,
        "base": instance.base,
        "device": instance.device,
        "state": instance.state,
        "mode": instance.mode,
        "standby": instance.standby,
        "summoned": instance.summoned,
        "parked": instance.parked,
        "last_path": instance.path,
        "versions": list(instance.versions),
        "endpoint": instance.endpoint,
        "failures": instance.failures,
        "age_us": state.now_us - instance.seen_us,
    }


def _cells(instance: "Instance", state: "State") -> tuple[str, ...]:
    return (
        instance.id,
        instance.node,
        instance.base,
        instance.device,
        f"{instance.state} ({instance.mode})" if instance.mode else instance.state,
        _standby(instance),
        instance.path or "",
        ", ".join(instance.versions),
        instance.endpoint,
        str(instance.failures or ""),
        f"{duration(state.now_us - instance.seen_us)} ago",
    )


def _standby(instance: "Instance") -> str:
    if instance.parked:
        return "parked"
    return ("woken" if instance.summoned else "yes") if instance.standby else ""


@app.command()
def order(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Served name of the base.")],
    *,
    instance: Annotated[str | None, typer.Option("--instance", metavar="ID", help="This one and no other.")] = None,
    deadline: Annotated[
        int | None,
        typer.Option(
            "--deadline", metavar="MS", min=1, max=DEADLINE_MAX_MS, help="Until the first token (else the policy's)."
        ),
    ] = None,
    late: Annotated[bool, typer.Option("--late", help="Take the fastest path even if it cannot meet it.")] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Ask for one more ready instance, within a deadline; exit 1 when there is none.

    The fastest path that meets the deadline is taken: a standby is woken. None that meets it is said at once, with the
    fastest there is; `--late` takes that one, which may be a start of minutes.
    """
    from kite_cli import place
    from kite_cli.asking import capacity
    from kite_cli.asking.telling import into
    from kite_cli.running import finish, run

    with Progress(f"ordering one more {base}") as progress:
        asked = capacity.order(
            place.find(directory),
            base,
            instance=instance,
            deadline_us=None if deadline is None else deadline * US_PER_MS,
            late=late,
            reason=reason,
            on_event=into(progress),
        )
        outcome = run(asked)
    return finish(outcome, _handed_over, tell, as_json=as_json)


def tell(outcome: "Handover") -> None:
    """Print how an order ended, and what to do when it was not done."""
    ready = outcome.ready
    if ready is None:
        fail(f"not done ({outcome.code}): {outcome.detail}", _advice(outcome))
        return
    verdict = "met" if outcome.in_time else "missed"
    deadline = f"deadline of {duration(outcome.deadline_us)} {verdict}" if outcome.deadline_us else "no deadline"
    say(
        f"{ready.instance} ready ({ready.path}): woke in {duration(ready.t_wake_us)}, first token after "
        f"{duration(ready.t_first_token_us)}; {duration(outcome.took_us)} from the order, "
        f"{deadline}; trace {outcome.story.trace_id}"
    )


def _advice(outcome: "Handover") -> str:
    if outcome.expected_us is None:
        return SHOWN
    ms = -(-outcome.expected_us // US_PER_MS)
    return (
        f"it is expected to take {duration(outcome.expected_us)}: `--deadline {ms}` allows that, `--late` takes the "
        "fastest whatever the deadline says; `kite yoco pool` shows what the paths take"
    )


def _handed_over(outcome: "Handover") -> dict[str, object]:
    ready = outcome.ready
    return {
        "request": outcome.story.request,
        "trace_id": outcome.story.trace_id,
        "ok": outcome.ok,
        "code": outcome.code,
        "detail": outcome.detail,
        "instance": ready.instance if ready else None,
        "path": ready.path if ready else None,
        "expected_us": outcome.expected_us,
        "versions": list(ready.versions) if ready else [],
        "t_wake_us": ready.t_wake_us if ready else None,
        "t_first_token_us": ready.t_first_token_us if ready else None,
        "took_us": outcome.took_us if ready else None,
        "deadline_us": outcome.deadline_us or None,
        "deadline_met": outcome.in_time if ready and outcome.deadline_us else None,
    }


@app.command()
def drain(
    instance: Name,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Even the last one that answers for its base: requests fail then.")
    ] = False,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Take an instance out of service: no new request, those it has end, then it sleeps.

    It is parked then: no rule wakes it, and `kite yoco order BASE --instance ID` does. Exit 1 when it stays in service.
    """
    from kite_cli import place
    from kite_cli.asking import capacity
    from kite_cli.asking.telling import into
    from kite_cli.running import finish, run
    from kite_cli.view import View

    fleet = place.find(directory)
    with Progress(f"draining {instance}") as progress, place.reading(fleet) as reader:
        asked = capacity.drain(fleet, instance, force=force, reason=reason, on_event=into(progress))
        outcome = run(_telling(asked, View(reader), instance, progress))
    return finish(outcome, _drained, _print_drain, as_json=as_json)


async def _telling(asked: "Coroutine[None, None, Drain]", view: "View", instance: str, progress: Progress) -> "Drain":
    """Await the drain, and tell meanwhile how many requests the instance still has, where its windows say so."""
    import asyncio

    task = asyncio.ensure_future(asked)
    told: int | None = None
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
            running = _running(view.refresh(), instance)
            if running not in (None, told):
                progress.step(f"{count(running, 'request')} still in {instance}" if running else f"{instance} is idle")
            told = running
        return task.result()
    finally:
        task.cancel()


def _running(state: "State", name: str) -> int | None:
    """Return how many requests run or wait in an instance, None when its windows do not say."""
    instance = state.instances.get(name)
    feed = state.feeds.get(instance.node) if instance else None
    load = feed.loads.get(name) if feed else None
    return load.in_flight if load else None


def _print_drain(outcome: "Drain") -> None:
    if not outcome.ok:
        hint = "`--force` drains it all the same" if outcome.code == "last_instance" else SHOWN
        fail(f"not done ({outcome.code}): {outcome.detail}", hint)
        return
    how = f"{outcome.state} ({outcome.mode})" if outcome.mode else outcome.state
    say(f"{outcome.instance} {how} after {duration(outcome.story.took_us)}; trace {outcome.story.trace_id}")


def _drained(outcome: "Drain") -> dict[str, object]:
    return {
        "request": outcome.story.request,
        "trace_id": outcome.story.trace_id,
        "ok": outcome.ok,
        "code": outcome.code,
        "detail": outcome.detail,
        "instance": outcome.instance,
        "state": outcome.state,
        "mode": outcome.mode,
        "took_us": outcome.story.took_us,
    }


@app.command()
def logs(
    instance: Name,
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=LINES_MAX, help="So many of the last ones.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it writes, until Ctrl-C.")] = False,
    former: Annotated[bool, typer.Option("--former", help="Of the process before this one.")] = False,
    directory: Dir = None,
) -> int:
    """[reads] Print what the engine of an instance wrote; for a fleet of `kite up`, on its machine."""
    from kite_cli import logs as written
    from kite_cli import place
    from kite_cli.live import until_left

    log = written.find(place.folder(directory), instance, former=former)
    with until_left():
        for line in written.last(log, lines):
            say(line)
        for line in written.added(log) if follow else ():
            say(line)
    return Exit.OK
