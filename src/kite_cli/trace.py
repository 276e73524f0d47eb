"""`kite trace`: from a decision to the tree of spans that it belongs to, in Jaeger."""

from typing import Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir
from kite_cli.output import note, say, say_json

JAEGER_URL = "http://127.0.0.1:16686"
"""Where docker-compose.yml publishes Jaeger."""


def register(app: typer.Typer) -> None:
    """Add `kite trace`."""
    app.command()(trace)


def trace(
    decision: Annotated[str, typer.Argument(metavar="DECISION", help="Its position, its id, or how that begins.")],
    *,
    print_url: Annotated[bool, typer.Option("--print-url", help="Print where it is; open no browser.")] = False,
    jaeger: Annotated[
        str, typer.Option("--jaeger", metavar="URL", envvar="KITE_JAEGER_URL", help="Where Jaeger's pages are.")
    ] = JAEGER_URL,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] Show the trace of a decision, or of any event, in Jaeger: who asked, who decided, who did it, how long.

    Whether Jaeger still has it is not asked: it keeps the newest traces, the ledger keeps every event.
    """
    trace_id = _trace_id(decision, directory)
    url = f"{jaeger.rstrip('/')}/trace/{trace_id}"
    if as_json:
        say_json({"trace_id": trace_id, "url": url})
    elif print_url:
        say(url)
    else:
        note(f"opening {url}")
        if typer.launch(url):
            note("no browser here opens it: `--print-url` prints it")
            return Exit.FAILED
    return Exit.OK


def _trace_id(name: str, directory: "Dir") -> str:
    """Return the trace of an event. Raises NoSuchDecision, Untraced, and the errors of `place.reading`."""
    from kite_cli import place
    from kite_incident.explain import Untraced, find

    with place.reading(place.find(directory)) as reader:
        row = find(reader, name)
    if not row.trace_id:
        raise Untraced(name, row.type)
    return row.trace_id
