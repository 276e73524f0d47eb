"""The demo as a new user runs it: a process of its own, from its first line to its exit code."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kite.ledger import Reader
from kite.testing.eventually import eventually
from kite_schemas.envelope import decode
from kite_schemas.ledger import EventIdConflict, Rejected
from kite_schemas.upcycle import Return, RollbackClosed

ROOT = Path(__file__).parents[2]
DEMO_S = 400


def command(engine: str, directory: Path) -> list[str]:
    demo = [sys.executable, "-m", "kite_cli", "demo", "--engine", engine, "--base", "tiny"]
    return [*demo, "--dir", str(directory), "--examples", str(ROOT / "examples" / "adapters")]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def of_demo(directory: Path) -> list[psutil.Process]:
    """Return every process that names the demo's folder."""
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and names(p, str(directory))]


def names(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in word for word in (*process.cmdline(), *process.environ().values()))
    except psutil.Error:  # it has just ended
        return False


@pytest.mark.timeout(DEMO_S)
@pytest.mark.parametrize("engine", ["fake", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_demo_ends_with_every_decision_identical(engine: str, tmp_path: Path):
    directory = tmp_path / "demo"
    ended = subprocess.run(
        command(engine, directory), env=environment(), capture_output=True, text=True, timeout=DEMO_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    *_, last = ended.stdout.splitlines()
    number, words = last.split(maxsplit=1)
    assert words == "decisions, identical"
    assert int(number) > 20
    report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    assert report["decisions"] == int(number)
    distances = report["torch_kl_micronats"]
    assert all(4 * distances["blend"] < distances[other] for other in ("base", "credit", "laundering"))
    assert report["refused"] == {"nan": ["not_finite"], "wrong_base": ["attention_heads"]}
    assert "retire_ordered of instance/local-tiny-0 at position" in ended.stdout
    assert f"{report['retired_version']} to leave local-tiny-0: its retention is over" in ended.stdout
    assert report["rollback_ms"] > 0
    assert of_demo(directory) == []
    with Reader.open(f"sqlite:///{directory / 'ledger.db'}") as reader:
        refused = [decode(row.raw).data for row in reader.find(types=[Rejected.TYPE, EventIdConflict.TYPE])]
        back, forward = (decode(row.raw).data for row in reader.find(types=[RollbackClosed.TYPE]))
    assert refused == [], "everything that a service says is its own to say"
    assert isinstance(back, RollbackClosed)
    assert isinstance(forward, RollbackClosed)
    assert (back.outcome, back.version) == (Return.DONE, report["retired_version"])
    assert (forward.outcome, forward.version, forward.former) == (Return.DONE, back.former, back.version)


@pytest.mark.parametrize("line", ["base and adapters", "fleet up", "former version retired", "standby handed over"])
async def test_ctrl_c_in_any_phase_leaves_nothing_running(line: str, tmp_path: Path):
    directory = tmp_path / "demo"
    log = tmp_path / "stderr.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(  # noqa: ASYNC220 # its end is awaited below, by polling
            command("fake", directory), env=environment(), stdout=subprocess.DEVNULL, stderr=stderr
        )
    try:
        await eventually(lambda: line in log.read_text(encoding="utf-8"), 90)
        process.send_signal(signal.SIGINT)
        code = await eventually(lambda: (process.poll(),) if process.poll() is not None else None, 60)
    finally:
        process.kill()
    assert code == (130,)
    assert "Traceback" not in log.read_text(encoding="utf-8")
    assert of_demo(directory) == []


def test_a_folder_that_no_demo_wrote_is_left_alone(tmp_path: Path):
    precious = tmp_path / "thesis.txt"
    precious.write_text("mine", encoding="utf-8")
    ended = subprocess.run(
        command("fake", tmp_path), env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "no demo wrote it" in ended.stderr
    assert precious.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("flag", "value"), [("--engine", "cuda"), ("--base", "llama")])
def test_what_the_demo_cannot_run_on_is_a_usage_error(flag: str, value: str, tmp_path: Path):
    ended = subprocess.run(
        [*command("fake", tmp_path / "demo"), flag, value],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert value in ended.stderr
