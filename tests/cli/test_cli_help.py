"""Help: every command says whether it reads or changes, and none of it costs the import of anything heavy."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from kite_cli.testing import Ended, run

Kite = Callable[..., Ended]

HEAVY = ("torch", "nats", "sqlalchemy", "pydantic", "opentelemetry", "safetensors")
READS = (
    "status",
    "timeline",
    "explain",
    "replay",
    "upcycle show",
    "upcycle list",
    "upcycle weights",
    "adapter verify",
    "adapter list",
    "adapter show",
    "yoco instances",
    "config get",
    "config list",
    "config diff",
    "config history",
    "routes",
    "ledger verify",
    "ledger tail",
    "ledger get",
    "ledger gaps",
)
CHANGES = (
    "up",
    "upcycle inject",
    "upcycle rollback",
    "adapter stamp",
    "adapter migrate",
    "yoco order",
    "guard compare",
    "config set",
    "gap acknowledge",
)


@pytest.mark.parametrize(("command", "mark"), [*((c, "[reads]") for c in READS), *((c, "[changes]") for c in CHANGES)])
def test_every_command_says_what_it_does_to_the_fleet(command: str, mark: str, kite: Kite):
    ended = kite(*command.split(), "--help")
    assert ended.code == 0
    assert mark in ended.out
    assert "--json" in ended.out


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from kite_cli.__main__ import main; code = main(['--help']);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_the_module_is_the_command():
    ended = run("--help")
    assert ended.code == 0
    assert "upcycle" in ended.out
    assert ended.err == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bogus", "bogus"),
        ("status --bogus", "--bogus"),
        ("explain", "name a decision"),
        ("up --base /b --engine other", "other"),
        ("up --base /b --nats-port 0", "nats-port"),
        ("replay --from zero", "--from"),
        ("timeline --since 20x", "20x"),
        ("timeline --since 9999999999d", "longer than any ledger"),
        ("upcycle inject --target tiny", "--adapter"),
        ("upcycle inject --adapter /a --target tiny --weight 1.5", "1.5"),
        ("upcycle inject --adapter /a --target tiny --weight 0", "weight 0"),
        ("upcycle inject --adapter /a --target tiny --weight 0.3333333", "0.3333333"),
        ("upcycle inject --adapter /a --target tiny --weight much", "much"),
        ("upcycle inject --adapter /a --target tiny --weight nan", "nan"),
    ],
)
def test_a_wrong_line_is_a_usage_error(line: str, said: str, kite: Kite):
    ended = kite(*line.split())
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert said in ended.err
    assert "\n\nhint: " in ended.err
