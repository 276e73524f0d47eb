"""The embedded server: starts ready and safe, refuses clearly, and never outlives its parent."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from kite.bus import (
    Bus,
    BusDirectoryInUse,
    BusDirectoryUnusable,
    BusNotDurable,
    BusPortTaken,
    BusUnreachable,
    EmbeddedServer,
    require_sync,
    server,
    sync_always,
)
from kite.bus.server import find_server, parse_version, server_config
from kite.testing.bus import nats
from kite.testing.eventually import eventually


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_it_syncs_always_and_listens_on_loopback_only(tmp_path: Path):
    async with nats(tmp_path) as running:
        assert await sync_always(running.monitor_url)
        listening = [c.laddr.ip for c in psutil.Process(running.pid).net_connections() if c.status == "LISTEN"]
        assert len(listening) == 2
        assert set(listening) == {"127.0.0.1"}


def lax_config(directory: Path, port: int, monitor_port: int) -> str:
    return server_config(directory, port, monitor_port).replace('"sync_interval": "always",', "")


async def test_a_server_that_acknowledges_before_it_syncs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with nats(tmp_path) as running:
        await require_sync(running.monitor_url)
        gone = running.monitor_url
    with pytest.raises(BusUnreachable):
        await require_sync(gone)
    monkeypatch.setattr(server, "server_config", lax_config)
    async with nats(tmp_path) as running:
        with pytest.raises(BusNotDurable, match="does not sync") as caught:
            await require_sync(running.monitor_url)
    assert "sync_interval: always" in caught.value.hint


async def test_stop_ends_it_and_can_be_repeated(tmp_path: Path):
    async with nats(tmp_path) as running:
        pid = running.pid
        await running.stop()
        await running.stop()
        assert is_gone(pid)


async def test_a_server_that_dies_is_noticed(tmp_path: Path):
    async with nats(tmp_path) as running:
        os.kill(running.pid, signal.SIGKILL)
        assert await running.wait() == -signal.SIGKILL


async def test_a_taken_port_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BusPortTaken, match=f"port {port} ") as caught:
            await EmbeddedServer(tmp_path, port=port).start()
    assert caught.value.port == port


async def test_an_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BusDirectoryUnusable, match="Not a directory"):
        await EmbeddedServer(tmp_path / "file" / "bus").start()


async def test_two_servers_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "LOCK_S", 0.1)
    async with nats(tmp_path) as running:
        with pytest.raises(BusDirectoryInUse):
            await EmbeddedServer(running.directory).start()


async def test_the_wheels_server_is_used_when_the_path_has_none_or_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.9.11\n")
    old.chmod(0o755)
    for path in (tmp_path, tmp_path / "nowhere"):
        monkeypatch.setenv("PATH", str(path))
        found = await find_server()
        assert found != old
        assert found.name == "nats-server"
    assert parse_version("nonsense") == (0, 0)


async def test_nobody_at_the_address_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(BusUnreachable, match=f":{port} within"):
        await Bus.connect(f"nats://127.0.0.1:{port}", "test", wait_s=0.5)


PARENT = """
import asyncio, sys
from pathlib import Path
from kite.bus import EmbeddedServer
async def main():
    server = EmbeddedServer(Path(sys.argv[1]))
    await server.start()
    print(server.pid, file=sys.stderr, flush=True)
    await server.wait()
asyncio.run(main())
"""


async def test_the_server_dies_with_a_killed_parent_and_frees_its_folder(tmp_path: Path):
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert parent.stderr is not None
    try:
        server_pid = int(await parent.stderr.readline())
    finally:
        parent.kill()
        await parent.wait()
    await eventually(lambda: is_gone(server_pid))
    async with EmbeddedServer(tmp_path) as successor:
        assert await sync_always(successor.monitor_url)
