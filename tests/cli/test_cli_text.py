"""How values are read and written: exact shares, spans, tables, and the doctests of every module of the command."""

import doctest
import importlib
import json
import pkgutil

import pytest

import kite_cli
from kite.errors import UsageError
from kite_cli import output
from kite_cli.share import ppm
from kite_cli.upcycle import weight_ppm

MODULES = [name for _, name, _ in pkgutil.iter_modules(kite_cli.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str):
    assert doctest.testmod(importlib.import_module(f"kite_cli.{name}")).failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.3", 300_000), ("0.1", 100_000), ("0.7", 700_000), ("0.000001", 1), ("1", 1_000_000), ("3e-1", 300_000)],
)
def test_weights_do_not_pass_through_floats(text: str, expected: int):
    assert weight_ppm(text) == expected


@pytest.mark.parametrize("text", ["0.0000001", "", "x", "inf", "1/3"])
def test_what_is_no_share_is_refused(text: str):
    with pytest.raises(UsageError):
        ppm(text)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]):
    output.show([{"a": "ü\n"}, {"a": 2}], ("A",), [], as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"a": "ü\n"}, {"a": 2}]


def test_a_table_without_a_terminal_is_never_cut(capsys: pytest.CaptureFixture[str]):
    output.show([], ("NAME", "TEXT"), [("a", "x" * 500)], as_json=False)
    assert capsys.readouterr().out.splitlines()[1] == f"a     {'x' * 500}"


def test_progress_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]):
    with output.Progress("working") as progress:
        progress.waiting("nobody sees this")
        progress.step("[bold]done[/bold]")
    assert capsys.readouterr().err == "[bold]done[/bold]\n"
