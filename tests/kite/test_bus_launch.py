"""The launcher: becomes the program, with its niceness, and refuses to start an orphan."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kite.launch import EXIT_NOT_FOUND, EXIT_ORPHAN, EXIT_USAGE, command, split
from kite.testing.eventually import eventually


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kite.launch", *args], capture_output=True, text=True, check=False)


def test_it_becomes_the_program_with_arguments_and_niceness():
    done = subprocess.run(command(["sh", "-c", 'nice; echo "$1"', "x", "a b"], nice=4), capture_output=True, check=True)
    assert done.stdout == f"{os.nice(0) + 4}\na b\n".encode()


def test_exit_statuses_tell_what_went_wrong():
    assert run("--nice", "1").returncode == EXIT_USAGE
    assert run("--colour", "1", "--", "true").returncode == EXIT_USAGE
    assert run("--nice", "--", "true").returncode == EXIT_USAGE
    missing = run("--", "/no/such/program")
    assert missing.returncode == EXIT_NOT_FOUND
    assert "cannot run /no/such/program" in missing.stderr


def test_an_orphan_is_not_started():
    assert run("--parent", "1", "--", "echo", "started").returncode == EXIT_ORPHAN
    assert run("--parent", "1", "--", "echo", "started").stdout == ""


def test_arguments_after_the_dashes_are_the_programs_own():
    assert split(["--nice", "3", "--", "cmd", "--nice", "--"]) == (3, None, ["cmd", "--nice", "--"])


PARENT = """
import subprocess, sys
from kite.launch import command
child = subprocess.Popen(command(["sh", "-c", "echo $$ > " + sys.argv[1] + "; exec sleep 600"]))
child.wait()
"""


async def test_the_child_dies_with_a_killed_parent(tmp_path: Path):
    note = tmp_path / "pid"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(note))
    try:
        child = int(await eventually(lambda: note.exists() and note.read_text().strip()))
    finally:
        parent.kill()
        await parent.wait()

    def is_gone() -> bool:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return True
        return "\nState:\tZ" in Path(f"/proc/{child}/status").read_text()

    await eventually(is_gone)


async def test_eventually_says_what_it_saw_last():
    with pytest.raises(AssertionError, match="last seen: 0"):
        await eventually(lambda: 0, deadline_s=0.05)
