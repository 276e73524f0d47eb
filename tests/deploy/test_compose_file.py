"""docker-compose.yml and the Dockerfile as they stand: no service escapes the rules, and no file is named that is not.

That docker-compose accepts the file, and what runs then, is tests/compose: it needs a Docker engine.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from kite_cli.deploy.folder import Plan, files
from kite_cli.deploy.texts import env

ROOT = Path(__file__).parents[2]
Service = dict[str, Any]  # YAML
DEPLOYMENT = "${KITE_DEPLOY:?run kite init first}/"
PUBLISHED = {"jaeger", "prometheus", "grafana"}
ENGINES = ("fake", "cpu", "gpu")
NODE = "local"


def read(name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", yaml.safe_load((ROOT / name).read_text()))


FILE = read("docker-compose.yml")
SERVICES = cast("dict[str, Service]", FILE["services"])
EVERY = pytest.mark.parametrize("name", sorted(SERVICES))


@EVERY
def test_every_service_can_do_as_little_as_possible(name: str):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["mem_limit"]
    assert "cpus" in service
    assert service["pids_limit"] <= 4_096
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert any(mount.startswith("/tmp:size=") for mount in service["tmpfs"])  # noqa: S108 # the container's
    assert "healthcheck" in service
    assert not {"privileged", "devices", "pid", "ipc", "userns_mode"} & service.keys()
    assert service.get("cap_add", []) == (["CHOWN"] if name == "volumes" else [])


@EVERY
def test_nobody_is_root_but_the_one_that_gives_volumes_away_and_it_has_no_network(name: str):
    service = SERVICES[name]
    if name == "volumes":
        assert (service["user"], service["network_mode"]) == ("0:0", "none")
    else:
        assert service["user"] == "${KITE_UID:?run kite init first}:${KITE_GID:?run kite init first}"


@EVERY
def test_ports_are_published_on_loopback_only(name: str):
    ports = SERVICES[name].get("ports", [])
    assert bool(ports) == (name in PUBLISHED)
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


@EVERY
def test_a_file_that_is_mounted_is_one_that_init_writes_and_nobody_may_change_it(name: str):
    written = {str(path) for path in files(Plan((NODE,)))}
    binds = [mount for mount in SERVICES[name].get("volumes", []) if mount["type"] == "bind"]
    assert [mount for mount in binds if not mount["read_only"]] == []
    for mount in binds:
        source = mount["source"].replace("${KITE_NODE:?run kite init first}", NODE)
        if source.startswith(DEPLOYMENT):
            assert source.removeprefix(DEPLOYMENT) in written
        else:
            assert source == "${KITE_BASES:-./bases}" or (ROOT / source).exists()


@EVERY
def test_an_empty_volume_takes_nothing_from_an_image(name: str):
    volumes = [mount for mount in SERVICES[name].get("volumes", []) if mount["type"] == "volume"]
    assert [mount for mount in volumes if not mount["volume"]["nocopy"]] == []
    assert {mount["source"] for mount in volumes} <= FILE["volumes"].keys()


def test_every_volume_is_given_away():
    given = {mount["source"]: mount["target"] for mount in SERVICES["volumes"]["volumes"]}
    assert given == {name: f"/volumes/{name}" for name in FILE["volumes"]}


def test_nothing_in_the_core_depends_on_a_profile():
    core = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert {"nats", "postgres", "arbitrator", "jaeger"} <= core
    assert {needed for name in core for needed in SERVICES[name].get("depends_on", {})} <= core


@pytest.mark.parametrize("engine", ENGINES)
def test_the_services_of_a_node_share_a_network_and_adapters_at_one_path(engine: str):
    pod = SERVICES[f"pod-{engine}"]
    assert pod["networks"]["bus"]["aliases"] == ["node"]
    assert "ports" not in pod
    for name in ("yoco", "upcycle", "guard"):
        service = SERVICES[f"{name}-{engine}"]
        assert service["network_mode"] == f"service:pod-{engine}"
        assert service["profiles"] == [engine]
        paths = {mount["source"]: mount["target"] for mount in service["volumes"] if mount["type"] == "volume"}
        assert paths == {"adapters": "/var/lib/kite/adapters", f"state-{name}": "/var/lib/kite/state"}
        assert service["environment"]["KITE_ADAPTER_ROOT"] == paths["adapters"]


def test_only_what_needs_the_ledger_reaches_it_or_has_its_password():
    reach = {name for name, one in SERVICES.items() if "data" in one.get("networks", [])}
    known = {name for name, one in SERVICES.items() if any("pgpass" in str(m) for m in one.get("volumes", []))}
    assert reach - {"postgres"} == known == {"arbitrator", "introduce", "cli"}


def test_only_what_shows_something_has_a_way_out():
    ways = {name for name, network in FILE["networks"].items() if network != {"internal": True}}
    assert ways == {"shown"}
    assert {name for name, one in SERVICES.items() if ways & set(one.get("networks", []))} == PUBLISHED


def variables(value: object) -> Iterator[str]:
    yield from re.findall(r"\$\{(\w+):\?run kite init first\}", json.dumps(value))


def test_a_variable_that_has_to_be_there_is_one_that_init_writes():
    written = env((NODE,), folder=Path("/deployment"), owner=1, group=1, tls=False)
    names = {line.partition("=")[0] for line in written.splitlines() if not line.startswith("#")}
    assert set(variables(FILE)) <= names
    assert set(variables(read("docker-compose.tls.yml"))) <= names


def test_the_example_has_what_init_writes_and_only_what_is_read():
    lines = (ROOT / ".env.example").read_text().splitlines()
    named = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    written = env((NODE,), folder=Path("/deployment"), owner=1, group=1, tls=False)
    assert {line.partition("=")[0] for line in written.splitlines() if not line.startswith("#")} <= named
    text = (ROOT / "docker-compose.yml").read_text()
    assert {name for name in named if f"${{{name}:" not in text} == {"KITE_NODES"}  # for people


def test_no_variable_names_a_secret():
    told = [f"{name} {value}" for one in SERVICES.values() for name, value in one.get("environment", {}).items()]
    secret = [text for text in told if re.search("password|secret|token|seed|key", text, re.IGNORECASE)]
    assert [text for text in secret if "/run/secrets/" not in text and not text.endswith(" true")] == []


def test_with_tls_whoever_speaks_to_the_bus_trusts_its_authority():
    tls = read("docker-compose.tls.yml")["services"]
    speaks = {name for name, one in SERVICES.items() if "KITE_NATS_URL" in one.get("environment", {})}
    trusts = {name for name, one in tls.items() if "KITE_NATS_CA_FILE" in one.get("environment", {})}
    assert trusts == speaks
    assert set(tls) == speaks | {"nats"}


def stages() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if started := re.fullmatch(r"FROM \S+ AS (\S+)", line):
            found[started[1]] = [line]
        elif found and not line.startswith("#"):
            found[list(found)[-1]].append(line)
    return found


def test_the_arbitrators_image_has_nothing_of_a_node():
    found = stages()
    assert not re.search("node|torch|vllm", "\n".join(found["control"] + found["control-env"]))
    assert "/lists/node.txt" in "\n".join(found["node-env"])


@pytest.mark.parametrize("target", ["control", "node", "node-cpu", "node-gpu"])
def test_an_image_runs_as_a_number_that_is_not_root(target: str):
    assert [line for line in stages()[target] if line.startswith("USER")] == ["USER 10001:10001"]


def test_nothing_but_what_is_installed_goes_into_a_build():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copies = [line for lines in stages().values() for line in lines if re.match("COPY [^-]", line)]
    copied = {word for line in copies for word in line.split()[1:-1]}
    assert copied == allowed
    assert all((ROOT / path).exists() for path in allowed)


def test_prometheus_takes_its_configuration_and_asks_every_service():
    promtool = ROOT / ".venv" / "bin" / "promtool"
    if not promtool.exists():
        pytest.skip("no promtool: see the Makefile")
    path = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    done = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = yaml.safe_load(path.read_text())["scrape_configs"]
    ports = {int(job["static_configs"][0]["targets"][0].rpartition(":")[2]) for job in jobs}
    served = {int(port) for one in SERVICES.values() if (port := one.get("environment", {}).get("KITE_METRICS_PORT"))}
    assert ports == served


def test_jaegers_links_are_on_what_spans_carry():
    config = read("deploy/jaeger/config.yaml")
    assert config["extensions"]["jaeger_query"]["ui"]["config_file"] == "/etc/jaeger/ui.json"
    links = json.loads((ROOT / "deploy/jaeger/ui.json").read_text())["linkPatterns"]
    assert [link["key"] for link in links] == ["kite.decision.id"]
