"""`kite doctor`: what is wrong with this machine and with the fleet, and what to do about it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir
from kite_cli.output import Record, say, show

if TYPE_CHECKING:
    from kite_cli.doctoring.facts import Fleet, Machine
    from kite_cli.doctoring.verdict import Finding

HEADER = ("CHECK", "VERDICT", "FOUND")


def register(app: typer.Typer) -> None:
    """Add `kite doctor`."""
    app.command(name="doctor")(doctor)


def doctor(*, directory: Dir = None, as_json: AsJson = False) -> int:
    """[reads] Look for what is wrong with this machine and the fleet, and say what helps.

    Exit 0 when nothing is (warnings may be), 3 on a problem, 4 when the bus or the ledger does not answer.
    """
    from kite_cli.doctoring import gather

    findings = examine(gather.machine(), *_fleet(directory))
    show([record(one) for one in findings], HEADER, [cells(one) for one in findings], as_json=as_json)
    if not as_json:
        for line in hints(findings):
            say(line)
    return exit_of(findings)


def _fleet(directory: Path | None) -> "tuple[Fleet | None, str]":
    """Return what is known of the fleet, or why there is none. Raises NoFleet for a folder that was named."""
    from kite_cli import place
    from kite_cli.doctoring import gather
    from kite_cli.settings import PlaceSettings

    settings = PlaceSettings()
    try:
        return gather.fleet(place.find(directory), settings), ""
    except place.NoFleet as error:
        if directory or settings.dir:
            raise
        return None, str(error)


def examine(machine: "Machine", fleet: "Fleet | None", why: str = "") -> "list[Finding]":
    """Return what every check says; `why` there is no fleet to be checked."""
    from kite_cli.doctoring import fleet as of_fleet
    from kite_cli.doctoring import machine as of_machine
    from kite_cli.doctoring.facts import Unknown
    from kite_cli.doctoring.verdict import unknown

    found = [check(machine) for check in of_machine.CHECKS]
    if fleet is None:
        return [*found, unknown("fleet", Unknown(why, "name one by --dir, or start one with `kite up`"))]
    return [*found, *(check(fleet) for check in of_fleet.CHECKS)]


def record(finding: "Finding") -> Record:
    """Return a finding as JSON."""
    return {
        "kind": "finding",
        "check": finding.check,
        "verdict": finding.verdict,
        "found": finding.found,
        "hint": finding.hint or None,
    }


def cells(finding: "Finding") -> tuple[str, ...]:
    """Return a finding as a row of the table."""
    return finding.check, str(finding.verdict), finding.found


def hints(findings: "Sequence[Finding]") -> Iterator[str]:
    """Yield what to do about each finding that is not well."""
    told = [one for one in findings if one.hint]
    if told:
        yield ""
    yield from (f"{one.check}: {one.hint}" for one in told)


def exit_of(findings: "Sequence[Finding]") -> Exit:
    """Return the exit code of a report."""
    from kite_cli.doctoring.verdict import Verdict

    if any(one.silent for one in findings):
        return Exit.UNREACHABLE
    return Exit.DIVERGED if any(one.verdict is Verdict.PROBLEM for one in findings) else Exit.OK
