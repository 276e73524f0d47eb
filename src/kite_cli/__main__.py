"""`kite`, and `python -m kite_cli`: run a command, turn whatever goes wrong into one message and an exit code."""

import sys
from collections.abc import Sequence

import typer

from kite.errors import KiteError
from kite_cli.app import build
from kite_cli.exits import Exit, code_of
from kite_cli.output import fail, note


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of the process) and return its exit code."""
    command = typer.main.get_command(build())
    try:
        answer: object = command.main(args=argv, prog_name="kite", standalone_mode=False)
    except KiteError as error:
        fail(str(error), error.hint)
        return code_of(error)
    except typer.TyperException as error:
        fail(error.format_message(), "`--help` behind a command says what it takes")
        return Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        answer = Exit.INTERRUPTED
    if answer == Exit.INTERRUPTED:
        note("interrupted")
    return answer if isinstance(answer, int) else Exit.OK


if __name__ == "__main__":
    sys.exit(main())
