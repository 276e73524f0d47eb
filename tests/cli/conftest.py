"""One embedded fleet for all tests of the command line, and the command itself, run inside the test's process."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from kite.testing import adapters
from kite_cli.__main__ import main
from kite_cli.testing import Ended, Up, left
from kite_cli.testing import run as run_apart

Kite = Callable[..., Ended]
BASE = "tiny"
BLENDS = "15"
"""Every test has blends of its own, and each takes slots in the shared engines."""

UNMOVED = (
    "arbitration.fragmentation_max_ppm=1000000",
    "arbitration.hit_rate_min_ppm=0",
    "arbitration.latency_sigma_max_us=3600000000",
)
"""Limits that nothing crosses: on a busy machine the proofs' own requests would wake the standby between two tests."""


@pytest.fixture(scope="session")
def up(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Up]:
    """A fleet of two ready instances and a standby, which leaves nothing behind."""
    directory = tmp_path_factory.mktemp("cli") / "fleet"
    with Up(tiny_base, directory, "--name", BASE, "--ready", "2", "--blends", BLENDS, "--json") as up:
        calmed = run_apart("config", "set", *UNMOVED, "--dir", str(directory))
        assert calmed.code == 0, calmed.err
        yield up
    assert left(directory) == []


@pytest.fixture
def kite(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kite:
    """Run a command: `kite("status", "--json")`. No fleet is named by the environment."""
    for name in ("KITE_DIR", "KITE_NATS_URL", "KITE_LEDGER_URL", "KITE_ADAPTER_ROOT", "KITE_SIGNING_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Ended:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return run


@pytest.fixture
def on(kite: Kite, up: Up, monkeypatch: pytest.MonkeyPatch) -> Kite:
    """Run a command on the shared fleet."""
    monkeypatch.setenv("KITE_DIR", str(up.dir))
    return kite


@pytest.fixture
def make_adapter(tmp_path: Path, tiny_base: Path) -> Callable[..., Path]:
    """Write an adapter that fits the base: `make_adapter("credit", seed=3)`."""

    def make(name: str, *, seed: int, rank: int = 4) -> Path:
        return adapters.adapter(tmp_path / name, tiny_base, rank=rank, seed=seed)

    return make
