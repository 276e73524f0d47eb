"""How nice an engine that waits is: what takes niceness back is a capability, or a limit that allows it."""

import os
import resource
import shutil
import subprocess
import sys

import pytest

from kite.engine.manners import HELD_NICENESS, NICE_ZERO, NICENESS

TOLD = "from kite.engine.manners import held_niceness; print(held_niceness())"
WITHOUT = ("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice")

pytestmark = pytest.mark.skipif(
    bool(os.getuid()) or not shutil.which("setpriv"), reason="only root can do without a capability, by setpriv"
)


def held(limit: int) -> int:
    """Return the niceness of what waits, as a process without CAP_SYS_NICE tells it under a limit."""
    done = subprocess.run(
        [*WITHOUT, sys.executable, "-c", TOLD],
        capture_output=True,
        check=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NICE, (limit, limit)),
    )
    return int(done.stdout)


def test_without_the_right_it_is_that_of_any_engine() -> None:
    assert held(0) == NICENESS


@pytest.mark.parametrize(("limit", "expected"), [(NICE_ZERO - NICENESS - 1, NICENESS), (NICE_ZERO, HELD_NICENESS)])
def test_a_limit_that_reaches_back_to_it_is_enough(limit: int, expected: int) -> None:
    try:
        found = held(limit)
    except subprocess.SubprocessError:
        pytest.skip("this machine's root may not raise the limit")
    assert found == expected
