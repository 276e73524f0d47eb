"""`kite adapter`: what can be said of an adapter without a fleet."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kite.errors import MissingPath
from kite_cli.embedded.options import Options
from kite_cli.exits import Exit
from kite_cli.flags import AsJson, group
from kite_cli.output import count, fail, note, percent, say, say_json
from kite_cli.upcycle import show_violations

if TYPE_CHECKING:
    from kite_upcycle.verify import Report

app = group("Look at adapters, without a fleet.")

MAX_LORA_RANK = Options(base=Path()).max_lora_rank
PARAMS_SHARE_MAX_PPM = 8_000  # as in the shipped policy


@app.callback()
def adapter() -> None:
    """Look at adapters, without a fleet."""


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the adapter.")],
    *,
    base: Annotated[Path, typer.Option("--base", metavar="PATH", help="Folder of the base.")],
    max_lora_rank: Annotated[
        int, typer.Option("--max-lora-rank", min=1, help="Highest rank that the servers take.")
    ] = MAX_LORA_RANK,
    params_share_max_ppm: Annotated[
        int, typer.Option("--params-share-max-ppm", min=0, help="Parameters, as share of the base's.")
    ] = PARAMS_SHARE_MAX_PPM,
    as_json: AsJson = False,
) -> int:
    """[reads] Check an adapter against the contract of a base; every violation is listed, exit 1 when there is one."""
    from kite_upcycle.verify import Limits
    from kite_upcycle.verify import verify as examine

    if not path.is_dir():
        raise MissingPath(f"adapter {path} is not a folder", hint="give the folder that PEFT's save_pretrained wrote")
    report = examine(path, base, Limits(max_lora_rank, params_share_max_ppm))
    if as_json:
        say_json(_record(report))
    else:
        _print(path, report)
    return Exit.OK if report.accepted else Exit.FAILED


def _print(path: Path, report: "Report") -> None:
    for text in report.notes:
        note(f"note: {text}")
    if report.accepted:
        size = f"rank {report.rank}, {report.modules} modules, {percent(report.share_ppm)} of the base's parameters"
        say(f"{path.name} keeps the contract: {size}")
    else:
        show_violations(report.violations)
        fail(f"{path.name} breaks the contract: {count(len(report.violations), 'violation')}")


def _record(report: "Report") -> dict[str, object]:
    return {
        "accepted": report.accepted,
        "digest": report.digest,
        "parameters": report.parameters,
        "share_ppm": report.share_ppm,
        "rank": report.rank,
        "modules": report.modules,
        "violations": [vars(violation) for violation in report.violations],
        "notes": list(report.notes),
    }
