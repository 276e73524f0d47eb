"""`kite demo`: the whole job once, on real parts, told as it happens and judged at the end."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli import incident
from kite_cli.exits import Exit
from kite_cli.output import Progress, note, quiet, say

if TYPE_CHECKING:
    from kite_cli.demo.acts import Report

Engine = Annotated[str, typer.Option("--engine", help="vllm, or fake (no vLLM needed).")]
Base = Annotated[str, typer.Option("--base", help="smollm2 (a real model), or tiny (random weights).")]
Folder = Annotated[Path, typer.Option("--dir", help="Folder of the demo; an earlier demo there is removed.")]
Examples = Annotated[Path, typer.Option("--examples", help="Folder of the trained example adapters.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    *,
    engine: Engine = "vllm",
    base: Base = "smollm2",
    directory: Folder = Path(".kite-demo"),
    examples: Examples = Path("examples/adapters"),
) -> int:
    """[changes] Run a fleet: blend, roll back, retire, refuse, press it with load, wake a standby, compare; then stop.

    Every step is told, decisions are explained, and all of them are replayed at the end.
    """
    from kite_cli.demo.acts import Demo, options

    chosen = options(engine, base, directory, examples)
    quiet()
    with Progress("demo") as progress:
        run = Demo(chosen, progress.step)
        asyncio.run(run.run())
    note("")
    say("what happened")
    incident.timeline(directory=directory)
    say("\none decision explained")
    incident.explain(run.report.explained, directory=directory)
    say("\nand why there was pressure")
    incident.explain(run.report.pressure, directory=directory)
    say("\nwhy the blend returned to its former version, and why that one was retired later, in short")
    _briefly(directory, run.report.rolled_back, run.report.retired)
    say("\nfigures")
    _figures(run.report)
    say(f"\nledger, logs and report are in {directory}; look again with `kite timeline --steps --dir {directory}`")
    return incident.replay(directory=directory) or Exit.OK


def _briefly(directory: Path, *decisions: str) -> None:
    from kite_cli import place
    from kite_cli.account import brief
    from kite_incident.explain import explain

    with place.reading(place.in_folder(directory)) as reader:
        for decision in decisions:
            for line in brief(explain(reader, decision)):
                say(f"  {line}")


def _figures(report: "Report") -> None:
    for phase, seconds in report.phases_s.items():
        say(f"  {phase}: {seconds} s")
    say(f"  rollback, from its request to its end: {report.rollback_ms:.0f} ms")
    say(f"  hand-over of the standby: {report.handover_ms:.0f} ms of {report.deadline_ms:.0f} ms")
    say(
        f"  decisions, cause on the bus to decision on the bus: p50 {report.decision_ms_p50:.1f} ms, "
        f"p99 {report.decision_ms_p99:.1f} ms"
    )
