"""Logging in to a real server: the right key gets in, anything else is one clear error at once."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kite.bus import (
    Bus,
    BusAuthorityUnusable,
    BusRefused,
    BusUntrusted,
    Login,
    Nkey,
    NkeyUnusable,
)
from kite.clock import US_PER_S, mono_us
from kite.errors import KiteError
from kite.testing.bus import nats
from kite.testing.eventually import eventually
from kite.trust import KeyFileOpen
from kite_cli.deploy.conf import AUTHORITY, SERVER_CERT, SERVER_KEY
from kite_cli.deploy.members import ARBITRATOR, OPERATOR, PROVISIONER
from kite_cli.deploy.testing import Deployment, certify, made, serving

AT_ONCE_S = 2.0
"""Far less than the time that an absent server is waited for."""


def test_a_seed_is_read_and_never_shown(tmp_path: Path):
    nkey = Nkey.generate()
    path = tmp_path / "seed"
    path.write_text(f"{nkey.seed}\n")
    path.chmod(0o600)
    login = Login.load(path, None)
    assert login.nkey == nkey
    assert nkey.public.startswith("U")
    assert login.inbox == f"_INBOX_{nkey.public}"
    assert nkey.seed not in repr(login)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is empty"),
        ("\n", "it is empty"),
        ("not a seed", "not one line"),
        ("SU" + "A" * 56, "checksum"),
        ("U" + "A" * 55, "not one line"),
        ("SU\u00e4", "not one line of text"),
        (Nkey.generate().seed * 2, "not one line"),
    ],
)
def test_what_is_no_seed_is_refused_without_showing_it(tmp_path: Path, content: str, said: str):
    path = tmp_path / "seed"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(NkeyUnusable, match=said) as refused:
        Login.load(path, None)
    assert "KITE_NATS_NKEY_FILE" in refused.value.hint
    assert len(content) <= 1 or content not in str(refused.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_seed_that_others_can_reach_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "seed"
    path.write_text(Nkey.generate().seed)
    path.chmod(mode)
    with pytest.raises(KeyFileOpen) as refused:
        Login.load(path, None)
    assert "chmod 600" in refused.value.hint


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(NkeyUnusable):
            Login.load(path, None)
        with pytest.raises(BusAuthorityUnusable):
            Login.load(None, path)


@pytest.mark.parametrize("content", ["", "  \n", "no certificate"])
def test_what_is_no_authority_is_refused(tmp_path: Path, content: str):
    path = tmp_path / "ca.crt"
    path.write_text(content)
    with pytest.raises(BusAuthorityUnusable) as refused:
        Login.load(None, path)
    assert "KITE_NATS_CA_FILE" in refused.value.hint


async def refused_at_once(kind: type[KiteError], url: str, login: Login) -> KiteError:
    began_us = mono_us()
    with pytest.raises(kind) as refused:
        await Bus.connect(url, "test", login=login, wait_s=60.0)
    assert mono_us() - began_us < AT_ONCE_S * US_PER_S
    return refused.value


async def test_a_stranger_is_refused_at_once(deployment: Deployment):
    stranger = Nkey.generate()
    error = await refused_at_once(BusRefused, deployment.url, Login(stranger))
    assert stranger.public in str(error)
    assert stranger.seed not in str(error)
    assert "no nkey" in str(await refused_at_once(BusRefused, deployment.url, Login()))


async def test_who_is_taken_out_of_the_configuration_is_told_once_and_comes_back_with_it(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
):
    conf = deployment.dir / "nats.conf"
    before = conf.read_text()
    async with await deployment.connect(OPERATOR) as bus:
        conf.write_text(before.replace(deployment.login(OPERATOR).public, Nkey.generate().public))
        os.kill(deployment.pid, signal.SIGHUP)
        said: list[str] = []

        def refused(times: int) -> bool:
            said.append(capsys.readouterr().out)
            return (deployment.dir.parent / "nats.log").read_text().count("authentication error") >= times

        await eventually(lambda: refused(3))
        assert not bus.is_connected
        conf.write_text(before)
        os.kill(deployment.pid, signal.SIGHUP)
        await bus.ready(10.0)
        assert bus.sessions == 2
    told = "".join(said)
    assert told.count("bus_shut") == 1
    assert "bus_refused" in told


async def test_a_service_with_a_wrong_key_ends_with_one_error(deployment: Deployment):
    deployment.seed(ARBITRATOR).write_text(Nkey.generate().seed)
    async with deployment.service(ARBITRATOR) as process:
        assert await process.wait() == 1
    (line,) = deployment.log(ARBITRATOR).read_text().splitlines()
    assert "code=bus_refused" in line
    assert "KITE_NATS_NKEY_FILE" in line


async def test_an_arbitrator_before_its_streams_says_who_makes_them(tmp_path: Path):
    async with serving(made(tmp_path)) as deployment:
        async with deployment.service(ARBITRATOR) as process:
            assert await process.wait() == 1
        assert "kite provision" in deployment.log(ARBITRATOR).read_text()
        assert deployment.seed(PROVISIONER).exists()
        code, out, err = await deployment.kite("provision", "--facts-gib", "1", name=PROVISIONER)
        assert code == 0, err
        assert "KITE_EVT: at most 1 GiB" in out
        code, _, err = await deployment.kite("provision", "--facts-gib", "2", name=OPERATOR)
        assert code == 1
        assert "forbids" in err


@pytest.fixture
def encrypted(tmp_path: Path) -> Callable[[str], Path]:
    """Make a deployment with TLS whose certificate names a host."""

    def make(name: str = "IP:127.0.0.1") -> Path:
        directory = made(tmp_path, tls=True)
        certify(directory, name)
        return directory

    return make


async def test_tls_end_to_end(encrypted: Callable[..., Path], tmp_path: Path):
    async with serving(encrypted(), tls=True) as deployment:
        await deployment.provision()
        for url in (deployment.url, deployment.url.replace("tls://", "nats://")):
            error = await refused_at_once(BusUntrusted, url, Login(deployment.login(OPERATOR).nkey))
            assert "KITE_NATS_CA_FILE" in error.hint
        certify(tmp_path, "IP:127.0.0.1")
        other = Login.load(deployment.seed(OPERATOR), tmp_path / AUTHORITY)
        await refused_at_once(BusUntrusted, deployment.url, other)
        async with deployment.leading() as process:
            code, out, err = await deployment.kite("config", "set", "arbitration.idle_tick_us=900000")
            assert code == 0, err + deployment.log(ARBITRATOR).read_text()
            assert out
            assert process.returncode is None


async def test_a_certificate_for_another_host_is_not_believed(encrypted: Callable[..., Path]):
    async with serving(encrypted("DNS:elsewhere"), tls=True) as deployment:
        await refused_at_once(BusUntrusted, deployment.url, deployment.login(OPERATOR))


async def test_a_server_without_tls_is_refused_by_whoever_wants_it(tmp_path: Path):
    """Somebody in between could say that there is none."""
    certify(tmp_path, "IP:127.0.0.1")
    async with nats(tmp_path) as server:
        error = await refused_at_once(BusUntrusted, server.url, Login.load(None, tmp_path / AUTHORITY))
        assert "no TLS" in str(error)


def test_the_server_does_not_start_without_its_certificate(tmp_path: Path):
    directory = made(tmp_path, tls=True)
    assert not (directory / SERVER_CERT).exists()
    assert not (directory / SERVER_KEY).exists()
    assert (directory / "tls").is_dir()
