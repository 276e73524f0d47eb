"""docker-compose.tls.yml on a real Docker engine: the same fleet, and nothing on the bus can be read on its way."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kite_cli.deploy.testing import certify
from kite_cli.deploy.testing.stack import Stack
from kite_cli.testing import run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
OWNER = 10_001
FILES = "docker-compose.yml:docker-compose.tls.yml"


@pytest.fixture
def encrypted(tmp_path: Path) -> Path:
    """A deployment whose bus encrypts, with the certificates still missing."""
    directory = tmp_path / "deployment"
    owner = [] if os.getuid() else ["--owner", str(OWNER)]
    assert run("init", str(directory), "--tls", *owner).code == 0
    return directory


def owned(directory: Path) -> None:
    """Give the certificates to whoever owns the rest."""
    found = (directory / "nats.conf").stat()
    for path in (directory / "tls").iterdir():
        path.chmod(0o600)
        os.chown(path, found.st_uid, found.st_gid)


async def test_a_fleet_with_tls(encrypted: Path, env: Mapping[str, str]) -> None:
    stack = Stack(ROOT, encrypted, {**env, "COMPOSE_FILE": FILES}, name="tls")
    missing = stack.compose("up", "-d", "nats")
    stack.down("-v")
    assert missing.code
    assert f"bind source path does not exist: {encrypted}/tls/server." in missing.err
    certify(encrypted, "DNS:nats")
    owned(encrypted)
    with stack:
        await stack.well()
        told = stack.told("status")[0]
        assert told["nodes"] == 1
        assert "tls" in (encrypted / ".env").read_text()
        plain = stack.inside(
            "arbitrator", "sh", "-c", "KITE_NATS_CA_FILE= KITE_NATS_URL=nats://nats:4222 kite provision"
        )
        assert plain.code
