"""`kite guard`: do two instances that should answer alike do so?"""

from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.flags import AsJson, Dir, Reason, group
from kite_cli.output import Progress, duration, fail, percent, say

if TYPE_CHECKING:
    from kite_cli.asking.request import Comparison

app = group("Compare what instances answer.")


@app.callback()
def guard() -> None:
    """Compare what instances answer."""


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="An instance.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another of the same base.")],
    *,
    blend: Annotated[str | None, typer.Option("--blend", metavar="NAME", help="This blend (else any).")] = None,
    reason: Reason = "",
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[changes] Measure how far the answers of two ready instances are apart; exit 1 without a verdict."""
    from kite_cli import place
    from kite_cli.asking import request
    from kite_cli.asking.telling import into
    from kite_cli.running import finish, run

    with Progress(f"comparing {first} with {second}") as progress:
        asked = request.compare(
            place.find(directory),
            first,
            second,
            blend=blend,
            reason=reason,
            on_event=into(progress),
        )
        outcome = run(asked)
    return finish(outcome, _record, _print, as_json=as_json)


def _print(outcome: "Comparison") -> None:
    from kite_cli.asking.telling import nats

    measured = outcome.measured
    if measured is None:
        fail(f"not compared ({outcome.code}): {outcome.detail}", "`kite yoco instances` shows which are ready")
        return
    say(
        f"{measured.first} and {measured.second} on {measured.model}: KL {nats(measured.kl_micronats)} in the mean, "
        f"{nats(measured.p99_micronats)} at p99, over {measured.positions} positions, "
        f"{percent(measured.covered_ppm)} of the mass, in {duration(measured.duration_us)}"
    )


def _record(outcome: "Comparison") -> dict[str, object]:
    measured = outcome.measured.model_dump(mode="json") if outcome.measured else {}
    return {
        "request": outcome.story.request,
        "trace_id": outcome.story.trace_id,
        "ok": outcome.ok,
        "code": outcome.code,
        "detail": outcome.detail,
        **{name: measured.get(name) for name in MEASURES},
    }


MEASURES = (
    "first",
    "second",
    "model",
    "kl_micronats",
    "p99_micronats",
    "covered_ppm",
    "positions",
    "duration_us",
    "probes",
)
