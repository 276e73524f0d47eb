"""deploy/backup.sh and deploy/restore.sh: back up, destroy, restore, verify."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kite_cli.deploy.testing.stack import Stack, ended

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BASE = "tiny"


def last_row(stack: Stack) -> dict[str, object]:
    head = stack.told("ledger", "verify", "--operator-key", "/run/secrets/operator.pub")[0]
    assert head["ok"]
    return stack.told("ledger", "get", str(head["last"]))[0]


async def test_back_up_destroy_restore_verify(
    deployment: Path, env: Mapping[str, str], material: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    with Stack(ROOT, deployment, env, name="backup") as stack:

        def script(name: str) -> tuple[int, str]:
            done = ended([str(ROOT / "deploy" / name), str(deployment), str(copy)], ROOT, stack.env)
            return done.code, done.err

        await stack.well()
        stack.told("yoco", "add", "/bases/tiny-3", "--name", BASE, "--engine", "fake", "--dtype", "float32")
        await stack.resting()
        inject = ("upcycle", "inject", "--target", BASE, "--blend", "risk", "--adapter", "/in/credit")
        version = stack.told(*inject, mount=material)[0]["version"]
        kept = last_row(stack)
        serving = stack.containers()["yoco-fake"].life
        assert script("backup.sh")[0] == 0
        await stack.well()
        assert stack.containers()["yoco-fake"].life == serving
        assert {path.name for path in copy.iterdir()} == {"ledger.dump", "volumes.tar", "SHA256SUMS"}
        code, said = script("restore.sh")  # never over what is there
        assert code
        assert "the volumes hold something" in said
        stack.down("-v")
        code, said = script("restore.sh")
        assert code == 0, said
        stack.up()
        await stack.well()
        await stack.resting()
        assert stack.told("ledger", "get", str(kept["pos"]))[0] == kept
        assert int(str(last_row(stack)["pos"])) > int(str(kept["pos"]))
        assert stack.told("replay")[0]["identical"]
        assert [one["version"] for one in stack.told("upcycle", "list")] == [version]
        assert stack.told("yoco", "order", BASE)[0]["ok"]
