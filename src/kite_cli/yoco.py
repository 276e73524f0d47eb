"""`kite yoco`: instances, and one more of them."""

from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, duration, fail, say, show

if TYPE_CHECKING:
    from kite_arbitrator.state import Instance, State
    from kite_cli.asking.request import Handover

app = group("Instances, and one more of them.")


@app.callback()
def yoco() -> None:
    """Instances, and one more of them."""


@app.command()
def order(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Served name of the base.")],
    *,
    instance: Annotated[str | None, typer.Option("--instance", metavar="ID", help="This standby and no other.")] = None,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Ask for one more ready instance: a standby is woken; exit 1 when there is none."""
    from kite_cli import place
    from kite_cli.asking import request
    from kite_cli.asking.telling import into
    from kite_cli.running import finish, run

    with Progress(f"ordering one more {base}") as progress:
        asked = request.order(
            place.find(directory),
            base,
            instance=instance,
            reason=reason,
            on_event=into(progress),
        )
        outcome = run(asked)
    return finish(outcome, _handed_over, _print, as_json=as_json)


def _print(outcome: "Handover") -> None:
    ready = outcome.ready
    if ready is None:
        fail(f"not done ({outcome.code}): {outcome.detail}", "`kite yoco instances` shows what there is")
        return
    verdict = "met" if outcome.in_time else "missed"
    say(
        f"{ready.instance} ready ({ready.path}): woke in {duration(ready.t_wake_us)}, first token after "
        f"{duration(ready.t_first_token_us)}; {duration(outcome.took_us)} from the order, "
        f"deadline of {duration(outcome.deadline_us)} {verdict}; trace {outcome.story.trace_id}"
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
        "versions": list(ready.versions) if ready else [],
        "t_wake_us": ready.t_wake_us if ready else None,
        "t_first_token_us": ready.t_first_token_us if ready else None,
        "took_us": outcome.took_us if ready else None,
        "deadline_us": outcome.deadline_us or None,
        "deadline_met": outcome.in_time if ready else None,
    }


@app.command()
def instances(directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] List the instances: where they are in their life, and what they hold."""
    from kite_cli import place
    from kite_cli.view import latest

    with place.reading(place.find(directory)) as reader:
        state = latest(reader)
    show_instances(state, as_json=as_json)
    return Exit.OK


def show_instances(state: "State", *, as_json: bool) -> None:
    """Print every instance, by id."""
    found = sorted(state.instances.values(), key=lambda instance: instance.id)
    records = [record(instance, state) for instance in found]
    header = ("INSTANCE", "NODE", "BASE", "DEVICE", "STATE", "STANDBY", "HOLDS", "ENDPOINT", "FAILURES", "SEEN")
    show(records, header, [_cells(instance, state) for instance in found], as_json=as_json)


def record(instance: "Instance", state: "State") -> dict[str, object]:
    """Return one instance as JSON; its age is that of the last report, in ledger time."""
    return {
        "kind": "instance",
        "instance": instance.id,
        "node": instance.node,
        "base": instance.base,
        "device": instance.device,
        "state": instance.state,
        "standby": instance.standby,
        "summoned": instance.summoned,
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
        instance.state,
        ("woken" if instance.summoned else "yes") if instance.standby else "",
        ", ".join(instance.versions),
        instance.endpoint,
        str(instance.failures or ""),
        f"{duration(state.now_us - instance.seen_us)} ago",
    )
