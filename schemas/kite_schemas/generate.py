"""Write what is derived from the models: one JSON Schema per event type, the table of events, the AsyncAPI document.

`python -m kite_schemas.generate` writes below the current folder; with `--check` it only tells what differs.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pydantic.json_schema import JsonSchemaValue

from kite_schemas import asyncapi
from kite_schemas.model import Data
from kite_schemas.registry import TYPES

Files: TypeAlias = Mapping[Path, str]
"""Generated text by its place below the root of the project."""

SCHEMAS = Path("schemas/json")
TABLE = Path("docs/events.md")
ASYNCAPI = Path("schemas/asyncapi.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"

BY = {
    "request": "the CLI asks",
    "fact": "a service reports",
    "decision": "the arbitrator decides",
    "ledger": "the arbitrator records",
}


def schema(model: type[Data]) -> str:
    """Return the JSON Schema of one payload as text."""
    document = {"$schema": DIALECT, "$id": f"urn:{model.TYPE.replace('.', ':')}", **model.model_json_schema()}
    return _text(document)


def _text(document: JsonSchemaValue) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def table() -> str:
    """Return the table of every event type as Markdown."""
    lines = [
        "# Events",
        "",
        "Generated from `schemas/kite_schemas`; the JSON Schema of each payload is in `schemas/json`.",
        "Every event travels in a CloudEvents 1.0 envelope (`kite_schemas.envelope`).",
        "`schemas/asyncapi.json` (AsyncAPI 3) has all of it in one document, with channels and headers of the bus.",
        "",
        "| type | kind | what it says | fields |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(name, model) for name, model in TYPES.items())]) + "\n"


def _row(name: str, model: type[Data]) -> str:
    says = (model.__doc__ or "").strip().splitlines()[0]
    fields = ", ".join(f"`{field}`" for field in model.model_fields)
    return f"| `{name}` | {BY[model.KIND]} | {says} | {fields} |"


def files() -> Files:
    """Return every generated file with its content."""
    schemas = {SCHEMAS / f"{name}.json": schema(model) for name, model in TYPES.items()}
    return schemas | {TABLE: table(), ASYNCAPI: _text(asyncapi.document())}


def differing(root: Path, wanted: Files) -> list[Path]:
    """Return those of the wanted files below `root` that are missing or have other content."""
    return [path for path, text in wanted.items() if not _same(root / path, text)]


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def run(wanted: Files, arguments: Sequence[str]) -> int:
    """Write the files below the current folder, or with `--check` fail when one differs; return the exit code."""
    found = differing(Path(), wanted)
    if "--check" in arguments:
        for path in found:
            sys.stderr.write(f"{path} is not as generated\n")
        return 1 if found else 0
    for path in found:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run(files(), sys.argv[1:]))
