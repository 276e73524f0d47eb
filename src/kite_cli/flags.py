"""Options that many commands share."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Dir: TypeAlias = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Folder of the fleet (else KITE_DIR, KITE_NATS_URL…, or .kite)."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Reason: TypeAlias = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the ledger.")]


def group(help_text: str) -> typer.Typer:
    """Return a Typer for one noun, with plain help."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
