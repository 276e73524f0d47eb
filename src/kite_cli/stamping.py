"""What `kite adapter stamp` and `kite adapter migrate` say."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kite_cli.exits import Exit
from kite_cli.output import Progress, count, fail, note, say, say_json, table
from kite_cli.upcycle import show_violations

if TYPE_CHECKING:
    from kite_upcycle.imprint import Imprint
    from kite_upcycle.migrate import Migrated, State, Step

STATES: "dict[State, str]" = {
    "migrate": "from version 1 to 2",
    "current": "of version 2 already",
    "unstamped": "no stamp",
    "newer": "newer than this kite",
    "stored": "never changed",
    "unreadable": "cannot be read",
}
"""What is said of an adapter before a migration starts."""

BAD: "frozenset[State]" = frozenset({"newer", "unreadable"})
"""States that somebody must look at: the command does not end well."""


def record_of(path: Path, made: "Imprint", *, dry_run: bool) -> dict[str, object]:
    """Return the line of JSON on what came of a stamp."""
    violations = [{**vars(violation), "text": str(violation)} for violation in made.report.violations]
    return {
        "adapter": str(path),
        "outcome": made.outcome,
        "dry_run": dry_run,
        "digest": made.digest,
        "digest_before": made.report.digest,
        "stamp": made.stamp.metadata(),
        "violations": violations,
    }


def print_imprint(path: Path, made: "Imprint", *, dry_run: bool) -> None:
    """Say what came of a stamp."""
    match made.outcome:
        case "refused":
            show_violations(made.report.violations)
            fail(f"{path.name} was not stamped: {count(len(made.report.violations), 'violation')}")
        case "unchanged":
            say(f"{path.name} has this stamp already: nothing was changed")
        case "stamped":
            table(("FIELD", "VALUE"), list(made.stamp.metadata().items()))
            say(f"{path.name} {'would be stamped' if dry_run else 'is stamped'}")


def say_plan(steps: "Sequence[Step]", *, dry_run: bool) -> None:
    """Say on stderr what a migration will do, before it does any of it."""
    from kite_upcycle.migrate import BACKUP_NAME

    for step in steps:
        note(f"{step.path}: {STATES[step.state]}{f' ({step.why})' if step.why else ''}")
    due = sum(step.state == "migrate" for step in steps)
    will = "would be" if dry_run else "will be"
    note(f"{due} of {count(len(steps), 'adapter')} {will} migrated, in place; each old file stays as {BACKUP_NAME}")


def do_steps(steps: "Sequence[Step]", *, dry_run: bool, as_json: bool) -> int:
    """Migrate, tell the progress and what came of it; return the exit code."""
    done = {} if dry_run else {migrated.step.path: migrated for migrated in _migrated(steps)}
    for step in steps:
        record = _record(step, done.get(step.path), dry_run=dry_run)
        if as_json:
            say_json(record)
        else:
            say(f"{step.path.name}: {record['outcome']}")
    failed = [migrated for migrated in done.values() if migrated.error is not None]
    for migrated in failed:
        if migrated.error is not None:
            fail(str(migrated.error), migrated.error.hint)
    return Exit.FAILED if failed or any(step.state in BAD for step in steps) else Exit.OK


def _migrated(steps: "Sequence[Step]") -> "list[Migrated]":
    from kite_upcycle.migrate import migrate

    due = sum(step.state == "migrate" for step in steps)
    done: list[Migrated] = []
    with Progress("migrating") as progress:

        def tell(step: "Step") -> None:
            progress.step(f"{len(done) + 1} of {due}: {step.path.name}")

        for migrated in migrate(steps, tell):
            done.append(migrated)  # noqa: PERF402 # one by one: `tell` counts them
    return done


def _record(step: "Step", migrated: "Migrated | None", *, dry_run: bool) -> dict[str, object]:
    if step.state != "migrate":
        outcome = STATES[step.state]
    elif dry_run:
        outcome = "would be migrated"
    else:
        outcome = "failed" if migrated is None or migrated.error is not None else "migrated"
    error = migrated.error if migrated else None
    return {"adapter": str(step.path), "state": step.state, "outcome": outcome, "why": str(error or step.why)}
