"""`kite doctor` on real things: processes that listen, files with modes, a late sync, a ledger of tomorrow."""

import asyncio
import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kite.bus import DEC, EVT, Bus, Nkey, Peer, Storage, StreamState, server
from kite.bus.server import server_config
from kite.clock import US_PER_S
from kite.ledger import Ledger
from kite.ledger.tables import REVISIONS
from kite.testing.bus import nats
from kite_cli import place
from kite_cli.deploy.members import ARBITRATOR, OPERATOR
from kite_cli.deploy.testing import Deployment, made, serving
from kite_cli.doctor import examine, exit_of
from kite_cli.doctoring import facts, fleet, machine
from kite_cli.doctoring.facts import Disk, Engines, Fleet, Listener, Machine, Secret, Unknown
from kite_cli.doctoring.verdict import Finding, Verdict
from kite_cli.exits import Exit
from kite_cli.place import FleetFile
from kite_cli.testing import Ended, Up
from kite_cli.testing import run as run_apart

Kite = Callable[..., Ended]
GIB = 1024**3
ANY = "0.0.0.0"  # noqa: S104 # the point of it
NOW_US = 1_800_000_000 * US_PER_S

LISTEN = """
import socket, sys
one = socket.create_server((sys.argv[2], 0), family=socket.AF_INET)
print(one.getsockname()[1], flush=True)
sys.stdin.read()
"""
"""Listens where it is told, until its input ends: its other arguments make it look like an engine."""


@contextmanager
def engine(host: str, *, dev: bool) -> Generator[int]:
    """A process that listens as a vLLM would, until the block ends; yields its port."""
    argv = [sys.executable, "-c", LISTEN, "vllm.entrypoints.openai.api_server", host]
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1" if dev else "0"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        assert process.stdin is not None
        process.stdin.close()


def told(ended: Ended) -> Mapping[str, dict[str, Any]]:
    """The findings of `kite doctor --json` by check."""
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert all(set(line) == {"kind", "check", "verdict", "found", "hint"} for line in lines)
    return {line["check"]: line for line in lines}


MACHINE = Machine(
    kite="0.1.0", python="3.11.7", vllm="0.32.0+cpu", nats_server="2.15.1", hugepages=512, engines=Engines()
)
KEPT = [Storage(name, in_files=True, replicas=1, synced_later=False, ahead_us=0, within_us=500) for name in (EVT, DEC)]
STATES = [StreamState(name, "", 1, 100, 10, 100) for name in (EVT, DEC)]
BUS = facts.Bus("nats://127.0.0.1:4222", Peer("2.15.1", clustered=False), tuple(KEPT), tuple(STATES), sync_always=True)
LEDGER = facts.Ledger("/ledger.db", REVISIONS[-1], 7, NOW_US, 100)
FLEET = Fleet(
    name=".kite",
    now_us=NOW_US,
    bus=BUS,
    ledger=LEDGER,
    disks=(Disk(Path("/fleet"), 50 * GIB, 100 * GIB),),
    secrets=(Secret(Path("/fleet/fleet.json"), 0o600),),
    vllm={"n": "0.32.0"},
)


def stored(**change: Any) -> facts.Bus:
    return replace(BUS, storages=(replace(KEPT[0], **change), KEPT[1]))


def filled(share_ppm: int) -> facts.Bus:
    return replace(BUS, states=(replace(STATES[0], bytes=share_ppm, limit_bytes=1_000_000), STATES[1]))


def listening(address: str, *, dev: bool | None = False) -> Engines:
    return Engines((Listener(address, 8000, 7, dev),))


class TestPure:
    def test_a_machine_and_a_fleet_that_are_well(self):
        findings = examine(MACHINE, FLEET)
        assert [(one.check, one.verdict) for one in findings if one.verdict is not Verdict.OK] == []
        assert len({one.check for one in findings}) == len(findings) == 13
        assert exit_of(findings) is Exit.OK

    @pytest.mark.parametrize(
        ("check", "change", "verdict", "says"),
        [
            (machine.versions, {"vllm": "0.17.2"}, Verdict.PROBLEM, "CVE-2026-27893"),
            (machine.versions, {"vllm": "0.18.0"}, Verdict.OK, "vLLM 0.18.0"),
            (machine.versions, {"vllm": ""}, Verdict.OK, "no vLLM"),
            (machine.versions, {"nats_server": "2.9.10"}, Verdict.PROBLEM, "nats-server 2.9.10"),
            (machine.exposed, {"engines": listening(ANY)}, Verdict.PROBLEM, "0.0.0.0:8000"),
            (machine.exposed, {"engines": listening("::")}, Verdict.PROBLEM, "[::]:8000"),
            (machine.exposed, {"engines": listening("10.0.0.4")}, Verdict.WARNING, "10.0.0.4:8000"),
            (machine.exposed, {"engines": listening("::1", dev=True)}, Verdict.OK, "1 engine here"),
            (machine.exposed, {"engines": listening("::ffff:127.0.0.1")}, Verdict.OK, "1 engine here"),
            (machine.exposed, {"engines": Engines(hidden=2)}, Verdict.UNKNOWN, "2 sockets"),
            (machine.exposed, {"engines": Unknown("may not see")}, Verdict.UNKNOWN, "may not see"),
            (machine.dev_mode, {"engines": listening(ANY, dev=True)}, Verdict.PROBLEM, "dev mode"),
            (machine.dev_mode, {"engines": listening(ANY)}, Verdict.OK, "no engine"),
            (machine.dev_mode, {"engines": listening("127.0.0.1", dev=True)}, Verdict.OK, "no engine"),
            (machine.dev_mode, {"engines": listening(ANY, dev=None)}, Verdict.UNKNOWN, "cannot look into"),
            (machine.hugepages, {"hugepages": 511}, Verdict.WARNING, "511"),
            (machine.hugepages, {"hugepages": Unknown("no /proc")}, Verdict.UNKNOWN, "no /proc"),
        ],
    )
    def test_machine(self, check: Callable[[Machine], Finding], change: Any, verdict: Verdict, says: str):
        found = check(replace(MACHINE, **change))
        assert (found.verdict, says in found.found) == (verdict, True), found
        assert bool(found.hint) == (verdict in {Verdict.WARNING, Verdict.PROBLEM}) or verdict is Verdict.UNKNOWN

    @pytest.mark.parametrize(
        ("check", "change", "verdict", "says"),
        [
            (fleet.bus, {"bus": Unknown("no server", silent=True)}, Verdict.PROBLEM, "no server"),
            (fleet.bus, {"bus": Unknown("stopped")}, Verdict.UNKNOWN, "stopped"),
            (fleet.bus, {"bus": replace(BUS, peer=Peer("2.10.1", clustered=False))}, Verdict.PROBLEM, "2.10.1"),
            (fleet.durability, {"bus": stored(in_files=False)}, Verdict.PROBLEM, "in memory"),
            (fleet.durability, {"bus": stored(synced_later=True)}, Verdict.PROBLEM, "before it is synced"),
            (fleet.durability, {"bus": replace(BUS, sync_always=False)}, Verdict.PROBLEM, "not on disk yet"),
            (fleet.durability, {"bus": replace(BUS, sync_always=Unknown("no port"))}, Verdict.UNKNOWN, "no port"),
            (fleet.durability, {"bus": replace(BUS, peer=Peer("2.15.1", clustered=True))}, Verdict.WARNING, "one copy"),
            (fleet.room, {"bus": filled(700_001)}, Verdict.WARNING, EVT),
            (fleet.room, {"bus": filled(700_000)}, Verdict.OK, EVT),
            (fleet.ledger, {"ledger": Unknown("too new", wrong=True)}, Verdict.PROBLEM, "too new"),
            (fleet.ledger, {"ledger": replace(LEDGER, schema="0001")}, Verdict.WARNING, "schema 0001"),
            (fleet.lag, {"now_us": NOW_US + 6 * US_PER_S}, Verdict.PROBLEM, "nothing written for 6.0 s"),
            (fleet.lag, {"ledger": replace(LEDGER, facts_seq=100)}, Verdict.OK, "0 messages behind"),
            (fleet.lag, {"bus": Unknown("stopped")}, Verdict.UNKNOWN, "did not both answer"),
            (fleet.clocks, {"bus": stored(ahead_us=-2_000_000, within_us=100)}, Verdict.PROBLEM, "behind this one"),
            (fleet.clocks, {"bus": stored(ahead_us=200_000, within_us=400)}, Verdict.WARNING, "ahead of this one"),
            (fleet.clocks, {"now_us": NOW_US - 5 * US_PER_S}, Verdict.PROBLEM, "the arbitrator's clock is 5.0 s ahead"),
            (fleet.disks, {"disks": (Disk(Path("/x"), GIB - 1, 100 * GIB),)}, Verdict.PROBLEM, "/x"),
            (fleet.disks, {"disks": (Disk(Path("/x"), 6 * GIB, 200 * GIB),)}, Verdict.WARNING, "/x"),
            (fleet.disks, {"disks": ()}, Verdict.UNKNOWN, "no folder"),
            (fleet.secrets, {"secrets": (Secret(Path("/k"), 0o640),)}, Verdict.PROBLEM, "0640"),
            (fleet.secrets, {"secrets": ()}, Verdict.UNKNOWN, "no keys"),
            (fleet.engines, {"vllm": {"a": "0.32.0", "b": "0.17.0"}}, Verdict.PROBLEM, "0.17.0 on b"),
            (fleet.engines, {"vllm": {}}, Verdict.UNKNOWN, "no node"),
        ],
    )
    def test_fleet(self, check: Callable[[Fleet], Finding], change: Any, verdict: Verdict, says: str):
        found = check(replace(FLEET, **change))
        assert (found.verdict, says in found.found) == (verdict, True), found

    def test_a_burst_that_is_not_taken_in(self):
        busy = replace(BUS, states=(replace(STATES[0], last_seq=501),))
        behind = replace(FLEET, ledger=replace(LEDGER, facts_seq=0), bus=busy)
        assert fleet.lag(behind).verdict is Verdict.WARNING

    def test_exit_codes(self):
        problem = Finding("a", Verdict.PROBLEM, "")
        assert exit_of([Finding("a", Verdict.WARNING, ""), Finding("b", Verdict.UNKNOWN, "")]) is Exit.OK
        assert exit_of([problem]) is Exit.DIVERGED
        assert exit_of([problem, replace(problem, silent=True)]) is Exit.UNREACHABLE


class TestMachine:
    def test_without_a_fleet_the_machine_is_looked_at(
        self, kite: Kite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        ended = kite("doctor", "--json")
        found = told(ended)
        assert set(found) == {"versions", "engine ports", "dev mode", "hugepages", "fleet"}
        assert "no fleet in .kite" in found["fleet"]["found"]
        assert found["versions"]["verdict"] == "ok"
        assert "nats-server 2." in found["versions"]["found"]
        assert ended.code == 0
        pages = Path("/proc/sys/vm/nr_hugepages").read_text().strip()
        assert f"vm.nr_hugepages is {pages}" in found["hugepages"]["found"]

    def test_a_table_with_what_helps(self, kite: Kite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        ended = kite("doctor")
        assert ended.out.splitlines()[0].split() == ["CHECK", "VERDICT", "FOUND"]
        assert "fleet: name one by --dir" in ended.out

    def test_a_folder_that_was_named_has_to_hold_a_fleet(self, kite: Kite, tmp_path: Path):
        ended = kite("doctor", "--dir", tmp_path)
        assert (ended.code, ended.out) == (4, "")
        assert "no fleet in" in ended.err

    def test_an_engine_off_loopback_in_dev_mode(self, kite: Kite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)
        with engine(ANY, dev=True) as port:
            ended = kite("doctor", "--json")
        found = told(ended)
        assert ended.code == 3
        assert found["engine ports"]["verdict"] == found["dev mode"]["verdict"] == "problem"
        assert f"0.0.0.0:{port}" in found["engine ports"]["found"]
        assert f"0.0.0.0:{port}" in found["dev mode"]["found"]
        assert "--host 127.0.0.1" in found["engine ports"]["hint"]

    def test_an_engine_on_loopback_may_be_in_dev_mode(
        self, kite: Kite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        with engine("127.0.0.1", dev=True):
            ended = kite("doctor", "--json")
        assert {told(ended)[check]["verdict"] for check in ("engine ports", "dev mode")} <= {"ok", "unknown"}
        assert ended.code == 0

    def test_another_process_off_loopback_is_no_engine(
        self, kite: Kite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        with socket.create_server((ANY, 0)):
            assert kite("doctor").code == 0


class TestFleet:
    def test_a_fleet_that_runs_is_well(self, on: Kite):
        ended = on("doctor", "--json")
        found = told(ended)
        assert ended.code == 0, ended.out
        well = {name for name, one in found.items() if one["verdict"] == "ok"}
        assert {"versions", "bus", "durability", "streams", "ledger", "arbitrator", "clocks", "permissions"} <= well
        assert "synced always" in found["durability"]["found"]
        assert f"schema {REVISIONS[-1]}" in found["ledger"]["found"]

    def test_a_key_that_others_can_read(self, on: Kite, up: Up):
        key = up.dir / "keys" / "guard.key"
        key.chmod(0o644)
        try:
            ended = on("doctor", "--json")
        finally:
            key.chmod(0o600)
        assert ended.code == 3
        found = told(ended)["permissions"]
        assert f"{key} has mode 0644" in found["found"]
        assert found["hint"] == f"`chmod 0600 {key}`"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fleet's folder with an empty ledger and a bus that is not there."""
    found = tmp_path / "fleet"
    found.mkdir()
    with Ledger.open(f"sqlite:///{found / 'ledger.db'}"):
        pass
    write(found, "nats://127.0.0.1:9", {})
    return found


def write(found: Path, url: str, ports: dict[str, int]) -> None:
    """Write the fleet's file."""
    ledger = f"sqlite:///{found / 'ledger.db'}"
    place.write(
        found, FleetFile(node="n", nats_url=url, ledger_url=ledger, adapter_root=str(found), pid=0, ports=ports)
    )


class TestBroken:
    def test_a_bus_that_is_gone_is_unreachable(self, kite: Kite, folder: Path):
        ended = kite("doctor", "--json", "--dir", folder)
        assert ended.code == 4
        found = told(ended)
        assert found["bus"]["verdict"] == "problem"
        assert "no NATS server answers at nats://127.0.0.1:9" in found["bus"]["found"]
        assert found["ledger"]["verdict"] == "ok"
        assert found["durability"]["verdict"] == "unknown"

    def test_a_fleet_that_was_stopped_is_no_problem(self, kite: Kite, folder: Path):
        write(folder, "", {})
        ended = kite("doctor", "--json", "--dir", folder)
        assert ended.code == 0
        assert told(ended)["bus"] == {
            "kind": "finding",
            "check": "bus",
            "verdict": "unknown",
            "found": "the fleet was stopped",
            "hint": "start it with `kite up`",
        }

    def test_a_ledger_of_a_later_version(self, kite: Kite, folder: Path):
        write(folder, "", {})
        with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as file, file:
            file.execute("UPDATE alembic_version SET version_num = '9999'")
        ended = kite("doctor", "--json", "--dir", folder)
        found = told(ended)["ledger"]
        assert ended.code == 3
        assert "schema 9999, which this version of KITE does not know" in found["found"]
        assert "install the version that wrote it" in found["hint"]

    def test_a_file_of_the_fleet_that_others_can_read(self, kite: Kite, folder: Path):
        write(folder, "", {})
        (folder / "fleet.json").chmod(0o644)
        ended = kite("doctor", "--json", "--dir", folder)
        assert ended.code == 3
        assert "fleet.json has mode 0644" in told(ended)["permissions"]["found"]

    async def test_a_bus_that_acknowledges_before_it_syncs(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(server, "server_config", lax_config)
        async with nats(folder) as running, await Bus.connect(running.url, "test") as bus:
            await bus.provision()
            write(folder, running.url, {place.MONITOR: running.monitor_port})
            ended = await asyncio.to_thread(run_apart, "doctor", "--json", "--dir", str(folder))
        found = told(ended)
        assert ended.code == 3
        assert found["durability"]["verdict"] == "problem"
        assert "sync_interval: always" in found["durability"]["hint"]
        assert found["clocks"]["verdict"] == "ok"
        assert "nothing written for" in found["arbitrator"]["found"]

    async def test_a_bus_whose_monitoring_port_is_not_known(self, folder: Path):
        async with nats(folder) as running, await Bus.connect(running.url, "test") as bus:
            await bus.provision()
            write(folder, running.url, {})
            silent = await asyncio.to_thread(run_apart, "doctor", "--json", "--dir", str(folder))
            env = {"KITE_NATS_MONITOR_URL": running.monitor_url}
            named = await asyncio.to_thread(partial(run_apart, "doctor", "--json", "--dir", str(folder), env=env))
        assert "KITE_NATS_MONITOR_URL" in told(silent)["durability"]["hint"]
        assert told(silent)["durability"]["verdict"] == "unknown"
        assert told(named)["durability"]["verdict"] == "ok"

    async def test_a_bus_without_streams(self, folder: Path):
        async with nats(folder) as running:
            write(folder, running.url, {})
            ended = await asyncio.to_thread(run_apart, "doctor", "--json", "--dir", str(folder))
        assert ended.code == 3
        assert f"stream {EVT} does not exist" in told(ended)["bus"]["found"]


class TestDeployment:
    """A folder of `kite init`, looked at by its operator, who may not do everything on the bus."""

    @pytest.fixture
    async def deployment(self, tmp_path: Path) -> AsyncGenerator[Deployment]:
        async with serving(made(tmp_path)) as found:
            await found.provision()
            with Ledger.open(found.ledger_url):
                pass
            yield found

    async def test_the_operator_may_ask_all_of_it(self, deployment: Deployment):
        code, out, err = await deployment.kite("doctor", "--json")
        found = told(Ended(code, out, err))
        assert {found[check]["verdict"] for check in ("bus", "durability", "streams", "permissions")} == {"ok"}, out
        assert "nothing written for" in found["arbitrator"]["found"]
        assert code == 3

    async def test_a_seed_that_is_not_the_servers_is_told(self, deployment: Deployment):
        deployment.seed(OPERATOR).write_text(Nkey.generate().seed)
        code, out, err = await deployment.kite("doctor", "--json")
        found = told(Ended(code, out, err))
        assert "refuses this process" in found["bus"]["found"]
        assert "KITE_NATS_NKEY_FILE" in found["bus"]["hint"]
        assert code == 3

    async def test_a_seed_of_another_member_that_others_can_read(self, deployment: Deployment):
        deployment.seed(ARBITRATOR).chmod(0o644)
        code, out, err = await deployment.kite("doctor", "--json")
        assert f"{deployment.seed(ARBITRATOR)} has mode 0644" in told(Ended(code, out, err))["permissions"]["found"]


def lax_config(directory: Path, port: int, monitor_port: int) -> str:
    return server_config(directory, port, monitor_port).replace('"sync_interval": "always",', "")
