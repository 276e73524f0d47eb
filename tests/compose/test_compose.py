"""docker-compose.yml on a real Docker engine: `make test-compose`. The tests follow one fleet through its life."""

import json
import os
import shutil
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from kite.clock import US_PER_S, mono_us
from kite.testing.otlp import Tree
from kite_cli.deploy.testing.stack import Stack
from kite_cli.testing import run

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BASE = "tiny"
INJECT = ("upcycle", "inject", "--target", BASE, "--blend", "risk", "--adapter")
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
PROFILES = ("", "fake", "cpu", "gpu", "metrics", "cli")
ONCE = {"volumes", "provision", "introduce"}
PUBLISHED = {"jaeger"}
LIVING = ("nats", "postgres", "arbitrator", "jaeger", "pod-fake", "yoco-fake", "upcycle-fake", "guard-fake")


Traced = Callable[[object, set[str]], Awaitable[Tree]]


def row(stack: Stack, pos: object) -> dict[str, object]:
    return stack.told("ledger", "get", str(pos))[0]


def blend(stack: Stack) -> dict[str, object]:
    found = stack.told("upcycle", "list")
    assert len(found) == 1
    return found[0]


def proven(stack: Stack) -> dict[str, object]:
    """Verify the whole ledger with the operator's key and decide everything again; return what verifying told."""
    found = stack.told("ledger", "verify", "--operator-key", "/run/secrets/operator.pub")[0]
    assert found["ok"]
    assert found["unchecked_signatures"] == 0
    assert stack.told("replay")[0]["identical"]
    return found


def copied(folder: Path, target: Path) -> None:
    """Copy a folder with the owners of what is in it."""
    shutil.copytree(folder, target)
    for path in (folder, *folder.rglob("*")):
        found = path.stat()
        os.chown(target / path.relative_to(folder), found.st_uid, found.st_gid)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_file_is_accepted_with_every_profile(deployment: Path, env: Mapping[str, str], profile: str) -> None:
    stack = Stack(ROOT, deployment, env, profile)
    tls = ("-f", "docker-compose.yml", "-f", "docker-compose.tls.yml")
    assert stack.compose("config", "-q").code == 0
    assert stack.compose(*tls, "config", "-q").code == 0


async def test_it_becomes_healthy(stack: Stack) -> None:
    began_us = mono_us()
    await stack.well()
    healthy_us = mono_us()
    added = stack.told("yoco", "add", "/bases/tiny-3", "--name", BASE, "--engine", "fake", "--dtype", "float32")
    assert added[0]["ready"] == 1
    await stack.resting()
    well_s, rest_s = ((us - began_us) / US_PER_S for us in (healthy_us, mono_us()))
    print(f"\nhealthy {well_s:.1f} s after that; {rest_s:.1f} s after that with its engines", end="")
    assert {name for name, one in stack.containers().items() if one.at("State", "Status") == "exited"} == ONCE


async def test_an_injection_and_a_handover_are_one_tree_each(stack: Stack, material: Path, traced: Traced) -> None:
    injected = stack.told(*INJECT, "/in/credit", mount=material)[0]
    assert injected["outcome"] == "promoted"
    handed = stack.told("yoco", "order", BASE)[0]
    assert (handed["ok"], handed["path"]) == (True, "hot")
    tree = await traced(injected["trace_id"], {"kite", "arbitrator", "upcycle", "vllm"})
    assert tree.span.service == "kite"
    await traced(handed["trace_id"], {"kite", "arbitrator", "yoco", "vllm"})


def test_the_ledger_is_in_postgresql(stack: Stack) -> None:
    head = proven(stack)["head"]
    counted = stack.inside("postgres", "psql", "-U", "kite", "-d", "kite", "-Atc", "SELECT count(*) FROM ledger")
    assert counted.code == 0, counted.err
    assert int(counted.out) >= int(str(head))


def test_every_container_can_do_as_little_as_possible(stack: Stack) -> None:
    for name, one in stack.containers().items():
        host = cast("dict[str, Any]", one.found["HostConfig"])
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert host["CapAdd"] == (["CHOWN"] if name == "volumes" else None), name
        assert host["SecurityOpt"] == ["no-new-privileges:true"], name
        assert not host["Privileged"], name
        assert host["Memory"], name
        assert host["PidsLimit"], name
        assert host["LogConfig"]["Config"]["max-size"], name
        user = str(one.at("Config", "User"))
        assert (user == "0:0") == (name == "volumes"), name
        bindings = cast("dict[str, list[dict[str, str]]]", host["PortBindings"] or {})
        ports = [bound for every in bindings.values() for bound in every]
        assert bool(ports) == (name in PUBLISHED), name
        assert {bound["HostIp"] for bound in ports} <= {"127.0.0.1"}, name


@pytest.mark.parametrize("service", sorted({*LIVING} - PUBLISHED))
def test_what_runs_has_no_way_out(stack: Stack, service: str) -> None:
    """Jaeger is on a network that has one: nobody else reaches it there."""
    jaeger = stack.containers()["jaeger"]
    outside = jaeger.at("NetworkSettings", "Networks", f"{stack.project}_shown", "IPAddress")
    found = stack.inside(service, "python3", "-c", CONNECT, str(outside), "4318")
    assert found.code
    assert "timed out" in found.err or "unreachable" in found.err


def test_the_node_reaches_jaeger_where_spans_go(stack: Stack) -> None:
    assert stack.inside("upcycle-fake", "python3", "-c", CONNECT, "jaeger", "4318").code == 0


@pytest.mark.parametrize("service", LIVING)
def test_what_runs_is_not_root_has_no_capability_and_writes_nowhere(stack: Stack, service: str) -> None:
    status = stack.inside(service, "cat", "/proc/1/status").out
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["CapEff"].strip("0") == fields["CapBnd"].strip("0") == ""
    assert fields["NoNewPrivs"] == "1"
    assert fields["Uid"].split()[0] != "0"
    assert "Read-only" in stack.inside(service, "touch", "/written").err


def test_no_variable_holds_a_secret(stack: Stack, deployment: Path) -> None:
    secrets = [path.read_text().split()[-1] for path in (deployment / "secrets").rglob("*") if path.is_file()]
    private = [text for text in secrets if text]
    assert len(private) > len(LIVING)
    told = json.dumps([one.found for one in stack.containers().values()])
    assert [text for text in private if text in told] == []


def test_the_arbitrators_image_has_no_torch(stack: Stack) -> None:
    found = stack.inside("arbitrator", "python", "-c", "import torch")
    assert "No module named 'torch'" in found.err
    assert stack.inside("upcycle-fake", "python", "-c", "import torch").code == 0


@pytest.mark.parametrize("service", LIVING)
async def test_one_that_is_killed_comes_back(stack: Stack, service: str) -> None:
    killed = stack.kill(service)
    await stack.well(killed)
    await stack.resting()
    assert blend(stack)["serving_total"]


async def test_down_and_up_again_resumes(stack: Stack) -> None:
    before, version = proven(stack), blend(stack)["version"]
    last = row(stack, before["head"])
    assert stack.compose("stop").code == 0
    assert "farewell_unsaid" not in stack.compose("logs", "--tail=4", "yoco-fake").out  # it goes before the bus
    stack.down()
    assert stack.containers() == {}
    took_s = stack.up()
    await stack.well()
    await stack.resting()
    print(f"\nup again within {took_s:.1f} s", end="")
    assert row(stack, before["head"]) == last
    assert proven(stack)["ledger"] == before["ledger"]
    assert blend(stack)["version"] == version


def test_it_goes_on_afterwards(stack: Stack, material: Path) -> None:
    injected = stack.told(*INJECT, "/in/fraud", mount=material)[0]
    assert injected["outcome"] == "promoted"
    assert len(cast("list[object]", injected["members"])) == 2
    assert proven(stack)["head"]


class TestBadInput:
    """Each is one clear error, and nothing of it stays."""

    @pytest.fixture
    def other(self, tmp_path: Path, env: Mapping[str, str], deployment: Path) -> Generator[tuple[Stack, Path]]:
        """A copy of the deployment, to be spoilt, under a project of its own."""
        directory = tmp_path / "deployment"
        copied(deployment, directory)
        stack = Stack(ROOT, directory, {**env, "KITE_DEPLOY": str(directory), "KITE_JAEGER_PORT": "0"}, name="other")
        yield stack, directory
        stack.down("-v")

    def test_no_deployment_folder(self, tmp_path: Path, env: Mapping[str, str]) -> None:
        done = Stack(ROOT, tmp_path / "nowhere", env).compose("up", "-d")
        assert done.code
        assert str(tmp_path / "nowhere" / ".env") in done.err

    def test_an_empty_env_file(self, other: tuple[Stack, Path]) -> None:
        stack, directory = other
        (directory / "empty").write_text("")
        done = Stack(ROOT, directory, {}, name="other", env_file="empty").compose("up", "-d")
        assert done.code
        assert not stack.containers()
        assert "run kite init first" in done.err

    def test_a_missing_secret(self, other: tuple[Stack, Path]) -> None:
        stack, directory = other
        (directory / "secrets/nats/provisioner.seed").unlink()
        done = stack.compose("up", "-d", "provision")
        assert done.code
        assert f"bind source path does not exist: {directory}/secrets/nats/provisioner.seed" in done.err
        assert not (directory / "secrets/nats/provisioner.seed").exists()

    def test_an_empty_password(self, other: tuple[Stack, Path]) -> None:
        stack, directory = other
        (directory / "secrets/postgres.password").write_text("")
        stack.compose("up", "-d", "postgres")
        assert "holds no password" in stack.compose("logs", "postgres").out

    def test_root_as_the_user(self, other: tuple[Stack, Path]) -> None:
        stack, _ = other
        done = stack.compose("up", "-d", "nats", env={"KITE_UID": "0"})
        assert done.code
        assert "KITE_UID is 0" in stack.compose("logs", "volumes").out
        assert "nats" not in stack.containers()

    def test_a_gpu_that_is_not_there(self, other: tuple[Stack, Path], images: Mapping[str, str]) -> None:
        stack, _ = other
        done = stack.compose(
            "up", "-d", "yoco-gpu", profile="gpu", env={"KITE_NODE_GPU_IMAGE": images["KITE_NODE_IMAGE"]}
        )
        assert done.code
        assert 'could not select device driver "nvidia"' in done.err

    def test_init_replaces_nothing(self, deployment: Path) -> None:
        done = run("init", str(deployment))
        assert done.code == 1
        assert "never replaced" in done.err
