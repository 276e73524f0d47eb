"""`kite routes`: which instances answer a served name, through which channel."""

from typing import TYPE_CHECKING, Annotated

import typer

from kite_cli.exits import Exit
from kite_cli.flags import AsJson, Dir
from kite_cli.output import show

if TYPE_CHECKING:
    from kite.ledger import Route


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(routes)


def routes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="This served name (else all).")] = None,
    *,
    directory: Dir = None,
    as_json: AsJson = False,
) -> int:
    """[reads] List where requests go: served name, version, instance, endpoint, and the channel that chose it."""
    from kite_cli import place

    with place.reading(place.find(directory)) as reader:
        found = list(reader.routes(name))
    header = ("NAME", "VERSION", "INSTANCE", "ENDPOINT", "CHANNEL", "POS")
    show([_record(route) for route in found], header, [_cells(route) for route in found], as_json=as_json)
    return Exit.OK


def _record(route: "Route") -> dict[str, object]:
    return {
        "name": route.name,
        "version": route.version,
        "instance": route.instance,
        "endpoint": route.endpoint,
        "channel": route.channel,
        "pos": route.pos,
    }


def _cells(route: "Route") -> tuple[str, ...]:
    return route.name, route.version, route.instance, route.endpoint, route.channel, str(route.pos)
