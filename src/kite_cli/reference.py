"""Write what is derived from the code: the reference of commands, and the table of settings.

`python -m kite_cli.reference` writes below the current folder; with `--check` it only tells what differs.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from pydantic_settings import BaseSettings
from typer.cli import get_docs_for_click

from kite.settings import NodeSettings
from kite.tracing.settings import TracingSettings
from kite_arbitrator import shipped
from kite_arbitrator.settings import Settings as ArbitratorSettings
from kite_cli.aliases import UNSET
from kite_cli.app import build
from kite_cli.settings import PlaceSettings
from kite_schemas.generate import Files, run
from kite_schemas.model import Model
from kite_schemas.policy import Policy, flatten
from kite_upcycle.settings import Settings as UpcycleSettings

COMMANDS = Path("docs/cli.md")
SETTINGS = Path("docs/settings.md")

READERS: dict[str, type[BaseSettings]] = {
    "the arbitrator": ArbitratorSettings,
    "upcycle, yoco and the guard": NodeSettings,
    "upcycle": UpcycleSettings,
    "the `kite` command": PlaceSettings,
    "every process": TracingSettings,
}


def commands() -> str:
    """Return the reference of every command as Markdown."""
    command = typer.main.get_command(build())
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="kite"), name="kite", title="Commands")
    return text.rstrip() + "\n"


def settings() -> str:
    """Return the tables of the policy and of the environment as Markdown."""
    lines = [
        "# Settings",
        "",
        "Generated. What decisions follow is the policy: `kite config get` shows it, `kite config set` changes it, and",
        "each change is an event of the ledger. A limit that is unset switches its rule off: `kite status` says which.",
        "The environment only tells a process where things are.",
        "",
        "## Policy",
        "",
        "| key | shipped | meaning |",
        "|---|---|---|",
        *_policy(),
        "",
        "## Environment",
        "",
        "| variable | read by | meaning |",
        "|---|---|---|",
        *_environment(),
    ]
    return "\n".join(lines) + "\n"


def _policy() -> Iterator[str]:
    for key, value in flatten(shipped.policy()).items():
        section, _, leaf = key.partition(".")
        field = _section(section).model_fields[leaf] if leaf else Policy.model_fields[section]
        yield f"| `{key}` | {UNSET if value is None else value} | {field.description or ''} |"


def _section(name: str) -> type[Model]:
    kind = Policy.model_fields[name].annotation
    assert isinstance(kind, type)  # noqa: S101 # a setting with a dot in its key belongs to a model
    assert issubclass(kind, Model)  # noqa: S101 # as above
    return kind


def _environment() -> Iterator[str]:
    readers: dict[tuple[str, str], list[str]] = {}
    for reader, kind in READERS.items():
        prefix = kind.model_config.get("env_prefix", "")
        told = {name for base in READERS.values() if base in kind.__bases__ for name in base.model_fields}
        for name, field in kind.model_fields.items():
            if name in told:
                continue
            readers.setdefault((f"{prefix}{name}".upper(), field.description or ""), []).append(reader)
    for (variable, meaning), names in sorted(readers.items()):
        yield f"| `{variable}` | {', '.join(names)} | {meaning} |"


def files() -> Files:
    """Return every generated file with its content."""
    return {COMMANDS: commands(), SETTINGS: settings()}


if __name__ == "__main__":
    sys.exit(run(files(), sys.argv[1:]))
