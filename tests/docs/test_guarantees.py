"""docs/guarantees.md: every guarantee names a test, and every test that is named exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
NAMED = re.compile(r"`((?:tests|src)/[\w/]+\.py)::(\w+)`")
LIMITS = "## Not guaranteed"


@cache
def names(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file; a contract has them in its class."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50
    assert [
        f"{path}::{name}" for path, name in named if not (ROOT / path).is_file() or name not in names(ROOT / path)
    ] == []


def test_every_guarantee_names_a_test() -> None:
    promises, _, limits = PAGE.read_text().partition(LIMITS)
    guarantees = promises.split("\n- ")[1:]
    assert len(guarantees) > 40
    assert [text.splitlines()[0] for text in guarantees if not NAMED.search(text)] == []
    assert not NAMED.search(limits)
