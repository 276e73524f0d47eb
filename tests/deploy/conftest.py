"""A deployment of two nodes on a real server, with its streams made."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kite_cli.deploy.testing import Deployment, made, serving


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncGenerator[Deployment]:
    """The deployment; no service runs yet."""
    async with serving(made(tmp_path)) as found:
        await found.provision()
        yield found
